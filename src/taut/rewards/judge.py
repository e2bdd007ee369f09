"""Rewards from models: a language model that judges, and a reward model in this process or at a server.

Pictures are sent inside the request, as data URLs: no server has our files.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from taut.config import ComputeDtype, configclass, read_secret, read_url
from taut.conflicts import conflict
from taut.errors import ConfigError, DataError, EngineError, PictureError
from taut.rewards.process_rewards import Stepped, probability, split_steps
from taut.rewards.settings import Place, StepsConfig
from taut.rewards.verifier import Client, Explained, RewardInput, Verifier, compile_pattern
from taut.vision.content import encoded, mime_type
from taut.vision.settings import ImagesConfig

WITHIN = ImagesConfig(max_bytes=2**40)
"""Limits of pictures that are sent: they were read within the run's own."""


def sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as JSON, each picture an ``image_url``. Raises PictureError for one that cannot be read."""
    as_json = [dict(message) for message in messages]
    for message in as_json:
        if not isinstance(message.get("content"), list | tuple):
            continue
        parts = []
        for part in message["content"]:
            if part["type"] == "image":
                raw = encoded(part["image"], WITHIN)
                if (kind := mime_type(raw)) is None:
                    raise PictureError(
                        f"the picture {part['image'].name} is of no format that is read"
                    )
                url = f"data:{kind};base64,{base64.b64encode(raw).decode('ascii')}"
                part = {"type": "image_url", "image_url": {"url": url}}
            parts.append(part)
        message["content"] = parts
    return as_json


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pictures of messages, in their order, as parts of a content."""
    return [
        part
        for message in sent(messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


TEMPLATE = """\
Judge how good the answer to the question is.

<question>
{question}
</question>
<reference>
{reference}
</reference>
<answer>
{answer}
</answer>

The reference, where there is one, is right. Say in a sentence or two what is right and wrong with the answer. Then end
with a line "Score: N", where N is a whole number from 0 (useless or wrong) to 10 (perfect)."""


CONVERSATION = """\
Judge how well the assistant did in this conversation, in all of its turns and calls of tools together.

<conversation>
{conversation}
</conversation>
<reference>
{reference}
</reference>

The reference, where there is one, is right. Say in a sentence or two what is right and wrong with what the assistant
said and did. Then end with a line "Score: N", where N is a whole number from 0 (useless or wrong) to 10 (perfect)."""


@configclass
class Judge(Verifier):
    """The number that a language model gives an answer, over an OpenAI-compatible chat endpoint.

    The model is sent one user message, ``template`` with {question}, {answer}, {reference} and {conversation} filled
    in, at temperature 0; the last match of ``pattern`` in its reply is the number, and (number - low) / (high - low)
    the reward. The reply is recorded with it. One without a number, or with one outside of low to high, is requested
    again, ``tries`` times in all; then it is an error. An answer may try to persuade the judge, and a model that
    trains against a judge learns what pleases it: keep another measure in use.
    """

    runs: ClassVar[Place] = "remote"
    seconds: ClassVar[float] = 120.0

    url: str
    """URL of the endpoint, as in http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; none is sent by default."""
    sees: Literal["answer", "conversation"] = "answer"
    """answer: the prompt and the last answer. conversation: every turn with its role, calls of tools and their results,
    from the prompt to the policy's last turn. It chooses the default of template."""
    template: str | None = None
    """The prompt of the judge; {question}, {answer}, {reference} and {conversation} are filled in, other braces stay.
    By default one that asks for a number from 0 to 10."""
    pattern: str = r"(?i)score(?:\s*\([^()\n]*\)(?=[^\w\n]*[\d:=]))?\W*?(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number. The default skips a scale in brackets, as in
    "Score (0-10): 7"."""
    low: float = 0.0
    """The number that becomes the reward 0."""
    high: float = 10.0
    """The number that becomes the reward 1."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Largest number of tokens of a reply."""
    tries: Annotated[int, Field(ge=1)] = 2
    """Replies that are requested until one has a number; from the second on at temperature 1."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, as the server names them."""

    def __post_init__(self) -> None:
        read_url(self.url, "judge.url", "options.api_key_env")
        if self.high <= self.low:
            raise conflict(
                self, "low high", "no number is between", "expected a lower `low`; correct them"
            )
        if f"{{{self.sees}}}" not in self.prompt:
            raise ConfigError(
                f"found a template without {{{self.sees}}}, and the judge sees the {self.sees}; expected it; put it "
                "in, or set sees"
            )
        if compile_pattern(self.pattern).groups < 1:
            raise ConfigError(
                f"pattern={self.pattern!r:.80} has no group; expected one around the number; put it in brackets"
            )

    @property
    def prompt(self) -> str:
        """The template in use."""
        if self.template is not None:
            return self.template
        return TEMPLATE if self.sees == "answer" else CONVERSATION

    def prepare(self) -> None:
        """ConfigError if the key is not in the environment."""
        read_secret(self.api_key_env, "api_key_env")

    async def reach(self, client: Client) -> None:
        await client.require_listening(self.url, "judge.url")

    async def ask(self, client: Client, answer: RewardInput) -> float:
        """Raises DataError if no reply has a number."""
        reply = ""
        for attempt in range(self.tries):
            reply = await self._reply(client, answer, temperature=float(attempt > 0))
            # The first group of the last match.
            matches = [match[1] for match in re.finditer(self.pattern, reply)]
            with suppress(ValueError):
                number = float((matches[-1] or "") if matches else "")
                if self.low <= number <= self.high:
                    return Explained((number - self.low) / (self.high - self.low), reply)
        raise DataError(
            f"the judge replied {' '.join(reply.split())[-120:]!r}; expected a number from {self.low:g} to "
            f"{self.high:g}"
        )

    async def _reply(self, client: Client, answer: RewardInput, temperature: float) -> str:
        # Fill in the template, and show the pictures before it.
        values = {
            "question": prompt_text(answer.prompt),
            "answer": answer.text,
            "reference": "\n".join(answer.references),
            "conversation": conversation_text(answer),
        }
        question = re.sub(
            r"\{(question|answer|reference|conversation)\}",
            lambda match: values[match[1]],
            self.prompt,
        )
        content: Any = question
        shown = [] if isinstance(answer.prompt, str) else [*answer.prompt]
        shown += answer.messages if self.sees == "conversation" else []
        pictures = pictures_of(shown)
        if pictures:
            content = [*pictures, {"type": "text", "text": question}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": temperature,
            "max_tokens": self.max_tokens,
            **self.extra,
        }
        url = f"{self.url.rstrip('/')}/chat/completions"
        reply = await client.post(url, body, self.api_key_env)
        try:
            content = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            raise DataError(
                f"{url} answered {reply!r:.120}; expected a chat completion with a text"
            )
        return content


def prompt_text(prompt: Sequence[Mapping[str, Any]] | str) -> str:
    """A conversation as text; a single message without its role."""
    if isinstance(prompt, str):
        return prompt
    texts = [_content(message.get("content")) for message in prompt]
    if len(prompt) == 1:
        return texts[0]
    return "\n\n".join(f"{m.get('role')}: {text}" for m, text in zip(prompt, texts, strict=True))


def conversation_text(answer: RewardInput) -> str:
    """Every turn under its role, with its calls of tools, from the prompt on; a prompt that is a text is unchanged."""
    prompt = answer.prompt
    turns = answer.messages or ({"role": "assistant", "content": answer.text},)
    blocks = [prompt] if isinstance(prompt, str) else []
    for message in turns if isinstance(prompt, str) else (*prompt, *turns):
        name = f" {message['name']}" if message.get("name") else ""
        lines = [f"[{message.get('role')}{name}]", _content(message.get("content"))]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            lines.append(f"[call of {function['name']}] {arguments}")
        blocks.append("\n".join(line for line in lines if line))
    return "\n\n".join(blocks)


def _content(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return " ".join(part.get("text", "") for part in content if isinstance(part, Mapping))


UNREAD = (
    "folder",
    "bad",
    "fps",
    "max_frames",
    "max_frame_pixels",
    "limit_video_pixels",
    "limit_video_seconds",
)
"""Picture settings that only concern files of rows."""


@configclass
class RewardModel(Verifier):
    """The number of a reward model's scalar head, or of each step of a process model's. The model is loaded in this
    process and scores batches of answers (``taut.inference.reward_model``, which may load models; here are only its
    settings).
    """

    runs: ClassVar[Place] = "model"

    model: str
    """Directory or hub name of the reward model."""
    template: str | None = None
    """File with a chat template to use instead of the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """Compute dtype. By default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """auto, reference, varlen or flex."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Pictures in the prompts and answers."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Tokens of a forward pass; a longer answer is computed alone."""
    steps: StepsConfig = field(default_factory=StepsConfig)

    rules: ClassVar[str] = f"""
        {" ".join(f"images.{name}" for name in UNREAD)} unread: a reward is shown what a run has read
    """


@configclass
class RewardServer(Verifier):
    """The number of a reward model at ``taut serve-reward``, or of each step of a process model's. Each answer is a
    request; the server batches them.
    """

    runs: ClassVar[Place] = "remote"
    seconds: ClassVar[float] = 60.0

    url: str
    """URL of taut serve-reward, as in http://127.0.0.1:5000."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key; none is sent by default."""
    steps: StepsConfig = field(default_factory=StepsConfig)

    rules: ClassVar[str] = """
        steps.mark steps.tokens unread: the server divides the answer, as a reward_model in this process does not
    """

    def __post_init__(self) -> None:
        read_url(self.url, "reward_server.url", "options.api_key_env")

    def prepare(self) -> None:
        """ConfigError if the key is not in the environment."""
        read_secret(self.api_key_env, "api_key_env")

    async def reach(self, client: Client) -> None:
        await client.require_listening(self.url, "reward_server.url")

    async def ask(self, client: Client, answer: RewardInput) -> float:
        """Raises EngineError if the server answers anything but one number, or one for each step."""
        url = f"{self.url.rstrip('/')}/score"
        prompt: Any = answer.prompt
        completion: Any = answer.text
        separator, body = self.steps.separator, dict[str, Any]()
        if separator is not None:
            if not split_steps(answer.text, separator):
                return Stepped.of(answer.text, [], self.steps)
            body["step_separator"] = separator
        if not isinstance(prompt, str):
            prompt = sent(prompt)
            if answer.messages:
                completion = sent(conversed(answer, separator))
        body |= {"prompts": [prompt], "completions": [completion]}
        # One number, or one for each step.
        reply = await client.post(url, body, self.api_key_env)
        scores: Any = reply.get("scores") if isinstance(reply, dict) else None
        expected = ""
        if not isinstance(scores, list) or len(scores) != 1 or scores[0] is None:
            expected = "one score"
        elif separator is not None:
            num_steps = len(split_steps(answer.text, separator))
            if not isinstance(scores[0], list) or len(scores[0]) != num_steps:
                expected = f"{num_steps} scores, one for each step"
        if expected:
            raise EngineError(f"{url} answered {reply!r:.120}; expected {expected}")
        if separator is None:
            score: float = scores[0]
            return score
        return Stepped.of(answer.text, [probability(float(it)) for it in scores[0]], self.steps)


def conversed(answer: RewardInput, separator: str | None) -> Sequence[Mapping[str, Any]]:
    """The turns after the prompt. Where steps are scored, the last is what was written, without calls apart from it."""
    turns = answer.messages or ({"role": "assistant", "content": answer.text},)
    if separator is None:
        return turns
    return (*turns[:-1], {"role": "assistant", "content": answer.text})
