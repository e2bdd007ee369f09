"""All rewards by name, and how a configuration names them. A new verifier is a file and a line in ``REWARDS``, or an
entry point of a package (``taut.rewards``), as ``code`` of taut_tools/sandbox.

rewards = "math"
rewards = ["exact_match", "own.py:function"]
rewards = ["math", {name = "length_target", weight = 0.1, options = {target = 200}}]
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from taut.config import home_path, restore
from taut.data.render.template_files import SHIPPED
from taut.errors import ConfigError
from taut.io import plugins
from taut.io.user_code import added_code, added_files, find_code, named_files
from taut.rewards.custom import UserReward
from taut.rewards.format import JsonSchema, Language, Repetition, Tags
from taut.rewards.judge import Judge, RewardModel, RewardServer
from taut.rewards.length import LengthCosine, LengthOverlong, LengthTarget, Stop
from taut.rewards.maths import Math
from taut.rewards.numeric import Numeric
from taut.rewards.settings import Judged, RewardSpec
from taut.rewards.text_match import Contains, ExactMatch, Regex
from taut.rewards.verifier import RewardInput, Verifier

REWARDS: dict[str, type[Verifier]] = {
    "exact_match": ExactMatch,
    "contains": Contains,
    "numeric": Numeric,
    "math": Math,
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

ADDED = "taut.rewards"
"""Entry points of packages that add verifier classes and functions, each a reward by its name."""


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
    """Judged quality by the configuration; None: by the verifier itself."""

    def read(self, answer: RewardInput, extract: bool) -> RewardInput:
        """Return the part of an answer that the reward judges. ``extract``: take it from between its marks (``inside``,
        ``after``); otherwise the answer is bare, and the verifier writes it in the form that it reads.
        """
        if not extract:
            return replace(answer, text=self.verifier.dress(answer.text))
        if self.after is not None:
            _, mark, rest = answer.text.rpartition(self.after)
            return _cut(answer, rest.strip() if mark else "")
        if self.inside is None:
            return answer
        _, opened, rest = answer.text.rpartition(f"<{self.inside}>")
        within, closed, _ = rest.partition(f"</{self.inside}>")
        return _cut(answer, within.strip() if opened and closed else "")


def _cut(answer: RewardInput, text: str) -> RewardInput:
    """Return the input with ``text`` as the answer, in the conversation too."""
    turns = answer.messages
    last = max((k for k, turn in enumerate(turns) if turn.get("role") == "assistant"), default=None)
    if last is not None:
        turns = (*turns[:last], {"role": "assistant", "content": text}, *turns[last + 1 :])
    return replace(answer, text=text, messages=turns)


def listed(rewards: str | Sequence[str | RewardSpec]) -> list[RewardSpec]:
    """Return the rewards of a configuration, which may be one name or several."""
    each = [rewards] if isinstance(rewards, str) else rewards
    return [RewardSpec(name=spec) if isinstance(spec, str) else spec for spec in each]


def files_of(rewards: str | Sequence[str | RewardSpec]) -> list[Path]:
    """Return the user's files that the rewards name."""
    named = [[spec.name, spec.options.get("judge")] for spec in listed(rewards)]
    names = [name for names in named for name in names if isinstance(name, str)]
    return named_files(names) + added_files(
        (name for name in names if name not in REWARDS), ADDED, "the reward"
    )


def read_parts(
    rewards: str | Sequence[str | RewardSpec], reserved: Sequence[str] = ()
) -> list[Part]:
    """Read the rewards of a configuration. ``reserved``: names of other metrics, which no reward may have."""
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
    if (cls := class_of(name)) is not None:
        place = f"in the options of the reward {name}"
        return restore(cls, options, place, f"{name}.")
    path = home_path(name.rpartition(":")[0])
    if code := find_code(name, path, ADDED, f"the reward {name}", "function"):
        return UserReward(name, code.portable(), options)
    known = [*REWARDS, *plugins.names(ADDED)]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "correct it"
    if home_path(name).is_dir():
        hint = f'a reward model is {{ name = "reward_model", model = "{name}" }}'
    elif name.endswith(".py"):
        hint = f"name its function, as in {name}:score"
    raise ConfigError(
        f"found the reward {name!r}; expected one of {', '.join(known)}, or FILE.py:function; {hint}"
    )


def class_of(name: str) -> type[Verifier] | None:
    """The verifier class of a reward: one of the core, or one that a package adds, which is imported here. None: the
    reward is a function, which only worker processes import, or there is none of this name. Raises ConfigError.
    """
    if name in REWARDS:
        return REWARDS[name]
    label = f"the reward {name}"
    code = None if ":" in name else added_code(name, ADDED, label, "function or class")
    if code is None:
        return None
    # Read the source of a function, and do not run it.
    try:
        body = ast.parse(code.source).body
    except (SyntaxError, ValueError):
        body = []
    if any(isinstance(it, ast.FunctionDef) and it.name == code.name for it in body):
        return None
    loaded = code.load()
    if not isinstance(loaded, type) or not issubclass(loaded, Verifier):
        return None
    if "__pydantic_fields__" not in vars(loaded):
        raise ConfigError(
            f"{label}: the class {code.name} of {code.path} is no configclass; expected one; decorate it with "
            "taut.config.configclass"
        )
    return loaded


def _made_from(
    kinds: tuple[type[Verifier], ...], rewards: str | Sequence[str | RewardSpec]
) -> Iterator[tuple[RewardSpec, Verifier]]:
    """The rewards of these classes, and of classes that packages make from them."""
    for spec in listed(rewards):
        if issubclass(class_of(spec.name) or Verifier, kinds):
            yield spec, verifier_of(spec.name, spec.options)


def charges_steps(rewards: str | Sequence[str | RewardSpec]) -> bool:
    """Whether one of the rewards charges the steps of an answer apart."""
    kinds = (RewardModel, RewardServer)
    return any(_charges(verifier) for _, verifier in _made_from(kinds, rewards))


def _charges(verifier: Verifier) -> bool:
    return isinstance(verifier, RewardModel | RewardServer) and verifier.steps.charge


# -- models that judge in this process


def models_of(rewards: str | Sequence[str | RewardSpec]) -> dict[str, RewardModel]:
    """The rewards' models that judge in this process, by label."""
    found = _made_from((RewardModel,), rewards)
    return {spec.label or spec.name: cast(RewardModel, verifier) for spec, verifier in found}


def files_read(rewards: str | Sequence[str | RewardSpec]) -> list[str]:
    """Return the model directories and templates of the reward models in this process."""
    models = models_of(rewards).values()
    paths = [path for model in models for path in (model.model, model.template) if path]
    return [path for path in paths if path not in SHIPPED]
