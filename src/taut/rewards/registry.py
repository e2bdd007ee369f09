"""All rewards by name, and how a configuration names them. A new verifier is a file and a line in ``REWARDS``.

rewards = "math"
rewards = ["exact_match", "own.py:function"]
rewards = ["math", {name = "length_target", weight = 0.1, options = {target = 200}}]
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from taut.config import configclass, home_path, restore
from taut.data.template_files import SHIPPED
from taut.errors import ConfigError
from taut.io.user_code import read_user_code
from taut.rewards.code import Code
from taut.rewards.format import JsonSchema, Language, Repetition, Tags
from taut.rewards.gym import Gym
from taut.rewards.judge import Judge, RewardModel, RewardServer
from taut.rewards.length import LengthCosine, LengthOverlong, LengthTarget, Stop
from taut.rewards.maths import Math
from taut.rewards.numeric import Numeric
from taut.rewards.text_match import Contains, ExactMatch, Regex
from taut.rewards.user import UserReward
from taut.rewards.verifier import Answered, Judged, Verifier

REWARDS: dict[str, type[Verifier]] = {
    "exact_match": ExactMatch,
    "contains": Contains,
    "numeric": Numeric,
    "math": Math,
    "code": Code,
    "reasoning_gym": Gym,
    "format": Tags,
    "regex": Regex,
    "json_schema": JsonSchema,
    "language": Language,
    "length_target": LengthTarget,
    "length_overlong": LengthOverlong,
    "length_cosine": LengthCosine,
    "repetition": Repetition,
    "stop": Stop,
    "reward_model": RewardModel,
    "reward_server": RewardServer,
    "judge": Judge,
}
"""name -> verifier, a configclass of its options. Every entry is held to tests/unit/rewards/test_verifiers.py, and
where it runs on this machine without a model, to tests/attacks/answers.py; both have a line for each."""


@configclass
class RewardSpec:
    """One reward and its settings."""

    name: str
    """Name of a reward, or FILE.py:function."""
    weight: float = 1.0
    """Factor of its value in the total. 0: it is logged and does not count."""
    label: str | None = None
    """Name of its metric. By default the reward's name, or the function's."""
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Time limit for an answer, in seconds. The default depends on the reward; rewards that cannot hang have none."""
    inside: str | None = None
    """Judge only the content of the last tag of this name; an answer without the tag is judged as an empty one."""
    after: str | None = None
    """Judge only what follows the last such mark, as </think>; an answer without the mark is judged as an empty one."""
    judges: Judged | None = None
    """correctness: the check rewards.gold requires that right answers score higher than wrong ones. form (length,
    style, format): it requires only that the reward can be computed. The default depends on the reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the reward; for FILE.py:function, arguments by name."""

    def __post_init__(self) -> None:
        if self.inside is not None and self.after is not None:
            raise ConfigError(
                f"the reward {self.name} has inside={self.inside} and after={self.after}; expected one of them; "
                "remove one"
            )

    @property
    def metric(self) -> str:
        """Name of its metric."""
        return self.label or self.name.rpartition(":")[2]


@dataclass(frozen=True)
class Part:
    """A verifier with its settings, ready to be asked."""

    label: str
    verifier: Verifier
    weight: float
    timeout: float
    """Seconds."""
    inside: str | None = None
    after: str | None = None
    judges: Judged | None = None
    """What it judges by the configuration; None: by the verifier itself."""

    def read(self, answered: Answered, is_bare: bool) -> Answered:
        """The part of an answer that is judged. ``is_bare``: there are no marks around it."""
        if is_bare:
            return replace(answered, text=self.verifier.dress(answered.text))
        if self.after is not None:
            _, mark, rest = answered.text.rpartition(self.after)
            return _cut(answered, rest.strip() if mark else "")
        if self.inside is None:
            return answered
        _, opened, rest = answered.text.rpartition(f"<{self.inside}>")
        within, closed, _ = rest.partition(f"</{self.inside}>")
        return _cut(answered, within.strip() if opened and closed else "")


def _cut(answered: Answered, text: str) -> Answered:
    """The same with ``text`` as the answer, in the conversation too."""
    turns = answered.messages
    last = max((k for k, turn in enumerate(turns) if turn.get("role") == "assistant"), default=None)
    if last is not None:
        turns = (*turns[:last], {"role": "assistant", "content": text}, *turns[last + 1 :])
    return replace(answered, text=text, messages=turns)


def listed(rewards: str | Sequence[str | RewardSpec]) -> list[RewardSpec]:
    """The rewards of a configuration, which may be one name or several."""
    each = [rewards] if isinstance(rewards, str) else rewards
    return [RewardSpec(name=spec) if isinstance(spec, str) else spec for spec in each]


def files_of(rewards: str | Sequence[str | RewardSpec]) -> list[Path]:
    """The user's own files that the rewards name."""
    named = [[spec.name, spec.options.get("judge")] for spec in listed(rewards)]
    functions = [name for names in named for name in names if isinstance(name, str) and ":" in name]
    return [home_path(name.rpartition(":")[0]) for name in functions]


def read_parts(
    rewards: str | Sequence[str | RewardSpec], reserved: Sequence[str] = ()
) -> list[Part]:
    """The rewards of a configuration. ``reserved``: names of other metrics, which no reward may have."""
    parts: list[Part] = []
    for spec in listed(rewards):
        label = spec.metric
        if label in reserved or label in [part.label for part in parts]:
            raise ConfigError(
                f"found the reward {spec.name!r}, and there is another metric {label!r}; expected each name once; "
                "leave it out, or give it a label of its own"
            )
        verifier = verifier_of(spec.name, spec.options)
        if _charges(verifier) and (spec.inside or spec.after):
            raise ConfigError(
                f"the reward {label} has steps.charge=true and judges a part of the answer (inside, after); expected "
                "the whole answer, whose tokens are charged; take one of them out"
            )
        timeout = verifier.seconds if spec.timeout is None else spec.timeout
        parts.append(
            Part(label, verifier, spec.weight, timeout, spec.inside, spec.after, spec.judges)
        )
    return parts


def verifier_of(name: str, options: Mapping[str, Any]) -> Verifier:
    """The verifier of a name with its options."""
    if ":" in name:
        code = read_user_code(
            name, home_path(name.rpartition(":")[0]), f"the reward {name}", "function"
        )
        return UserReward(name, code, options)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, 1)
        hint = f"did you mean {near[0]}?" if near else "correct it"
        raise ConfigError(
            f"found the reward {name!r}; expected one of {', '.join(REWARDS)}, or FILE.py:function; {hint}"
        )
    return restore(REWARDS[name], options, f"in the options of the reward {name}")


def charges_steps(rewards: str | Sequence[str | RewardSpec]) -> bool:
    """Whether one of the rewards charges the steps of an answer apart."""
    specs = [spec for spec in listed(rewards) if spec.name in ("reward_model", "reward_server")]
    return any(_charges(verifier_of(spec.name, spec.options)) for spec in specs)


def _charges(verifier: Verifier) -> bool:
    return isinstance(verifier, RewardModel | RewardServer) and verifier.steps.charge


# -- models that judge in this process


def models_of(rewards: str | Sequence[str | RewardSpec]) -> dict[str, RewardModel]:
    """The rewards' models that judge in this process, by label."""
    models = {}
    for spec in listed(rewards):
        verifier = verifier_of(spec.name, spec.options) if spec.name == "reward_model" else None
        if isinstance(verifier, RewardModel):
            models[spec.label or spec.name] = verifier
    return models


def files_read(rewards: str | Sequence[str | RewardSpec]) -> list[str]:
    """Model directories and templates that the models in this process are read from."""
    models = models_of(rewards).values()
    paths = [path for model in models for path in (model.model, model.template) if path]
    return [path for path in paths if path not in SHIPPED]
