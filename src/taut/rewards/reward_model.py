"""The number of a reward model's scalar head: the model in this process, or at ``taut serve-reward``.

In this process it is loaded beside the model that trains and scores a batch of answers at a time
(``rollout/rated.py``, which may load models; here are its settings only). At a server each answer is a request, and
the server scores those that wait together.

May import config, errors, vision, ``http.py``, ``pictures.py`` and the verifiers' base.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from taut.config import ComputeDtype, configclass
from taut.errors import EngineError
from taut.rewards.answered import Answered
from taut.rewards.http import Client, require_url, secret_of
from taut.rewards.pictures import sent
from taut.rewards.verifier import Place, Verifier
from taut.vision.picture import ImagesConfig

UNREAD = ("folder", "bad", "fps", "max_frames", "limit_video_pixels", "limit_video_seconds")
"""Settings of pictures that are for files of rows."""


@configclass
class RewardModel(Verifier):
    """A reward model in this process."""

    runs: ClassVar[Place] = "model"

    model: str
    """Directory (or hub name) of the reward model."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """By default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """auto, reference, varlen or flex."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    images: ImagesConfig = ImagesConfig()
    """Pictures in what is scored."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Tokens computed at a time; a longer answer is computed alone."""

    def __post_init__(self) -> None:
        from taut.vision.opening import require_unset  # with it come the processors

        require_unset(self.images, UNREAD, "a reward, which is shown what a run has read")


@configclass
class RewardServer(Verifier):
    """A reward model at a server."""

    runs: ClassVar[Place] = "remote"
    seconds: ClassVar[float] = 60.0

    url: str
    """Of taut serve-reward, as in http://127.0.0.1:5000."""
    key: str | None = None
    """Name of the environment variable that holds its key; none is sent by default."""

    def __post_init__(self) -> None:
        require_url(self.url, "reward_server")

    def prepare(self) -> None:
        """The key has to be there."""
        secret_of(self.key)

    async def ask(self, client: Client, answered: Answered) -> float:
        """EngineError where the server says something else than one number."""
        url = f"{self.url.rstrip('/')}/score"
        prompt: Any = answered.prompt
        completion: Any = answered.text
        if not isinstance(prompt, str):
            prompt, completion = sent(prompt), sent(answered.messages) or answered.text
        said = await client.post(url, {"prompts": [prompt], "completions": [completion]}, self.key)
        scores = said.get("scores") if isinstance(said, dict) else None
        if not isinstance(scores, list) or len(scores) != 1:
            raise EngineError(f"{url} answered {said!r:.120}; expected one score")
        if scores[0] is None:
            raise EngineError(f"{url} answered {said!r:.120}; expected one score")
        score: float = scores[0]
        return score
