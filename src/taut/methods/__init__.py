"""``METHODS``, the only list of training methods: the name of each, its class, and its line in ``taut --help``.

The command line, ``taut.NAME(...)``, ``taut resume``, ``taut show``, ``taut check``, ``taut plan`` and docs/config.md
are made of this list. To add a method, write ``methods/NAME.py`` with the class ``Name`` and add a line here.
``METHODS.register`` does the same for a class outside this package.

A class is imported when it is first looked up, so that ``import taut`` and ``taut --help`` load neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from taut.methods.method import RunConfig


class Entry(NamedTuple):
    """A training method that may not be imported yet."""

    place: str
    """``module:class``."""
    about: str
    """Purpose of the command, in a few words."""


class Methods(Mapping[str, "type[RunConfig]"]):
    """Name -> class. Names and ``about`` are known without importing a method."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> type[RunConfig]:
        module, _, attribute = self.entries[name].place.partition(":")
        method: type[RunConfig] = getattr(import_module(module), attribute)
        return method

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def register(self, name: str, place: str, about: str) -> None:
        """Add a method from outside this package. ``place``: ``module:class``."""
        self.entries[name] = Entry(place, about)


METHODS = Methods(
    {
        name: Entry(f"taut.methods.{name}:{name.title().replace('_', '')}", about)
        for name, about in {
            "sft": "fine-tune a model on your data",
            "reward": "train a reward model on comparisons, scores or steps",
            "dpo": "train on preferences, against a reference",
            "kto": "train on answers marked good or bad",
            "orpo": "train on preferences and good answers, without a reference",
            "simpo": "train on preferences by mean logprobs, without a reference",
            "cpo": "train on preferences and good answers, contrastively",
            "distill": "distill a teacher into the model, on your data",
            "grpo": "train on the model's own answers, judged and compared in groups",
            "ppo": "train on the model's own answers, with a critic",
            "online_dpo": "train on preferences between the model's own answers",
            "best_of_n": "fine-tune on the best of the model's own answers",
            "gkd": "on-policy distillation: a teacher on the model's own answers",
        }.items()
    }
)


PUBLISHED = {
    "rloo": "grpo.advantage=rloo grpo.loss=reinforce",
    "dapo": "rollout.dynamic_sampling_rounds=3 shaping.soft_overlong=N",
    "dr_grpo": "grpo.advantage=mean grpo.loss_aggregation=constant",
    "reinforce": "grpo.advantage=mean grpo.loss=reinforce",
    "reinforce_pp": "grpo.advantage=reinforce_pp grpo.kl_in=reward grpo.kl_coef=0.01",
    "gspo": "grpo.loss=gspo grpo.loss_aggregation=sequence",
    "cispo": "grpo.loss=cispo",
    "sapo": "grpo.loss=sapo grpo.loss_aggregation=sequence",
    "gmpo": "grpo.loss=gmpo grpo.loss_aggregation=sequence",
    "maxrl": "grpo.advantage=maxrl",
    "gdpo": "grpo.advantage=gdpo",
}
"""Published methods that are settings of ``taut grpo`` (docs/rl.md has all of them) -> these settings."""


def published(name: str) -> str | None:
    """Return the command for a published method that is a setting of another one here, if there is one."""
    keys = PUBLISHED.get(name.replace("-", "_"))
    return None if keys is None else f"taut grpo {keys}"


def command_of(method: str) -> str:
    """The command of a method, as typed."""
    return f"taut {method.replace('_', '-')}"


def commands_for(kind: str) -> str:
    """The commands that train on rows of this kind, for messages."""
    settings = {command_of(name): dict(method.row_kinds) for name, method in METHODS.items()}
    return ", ".join(
        f"{command} with {kinds[kind]}" if kinds[kind] else command
        for command, kinds in settings.items()
        if kind in kinds
    )
