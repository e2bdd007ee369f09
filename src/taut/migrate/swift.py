"""ms-swift: ``swift sft``, ``swift rlhf --rlhf_type METHOD``, ``swift pt``, and YAML or JSON as their first word.

Option names are those of ms-swift 4.6. ``megatron sft`` is another program and is not read. ``examine.py`` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from taut.migrate.dialect import Dialect, Found, Release
from taut.migrate.recipe import Method, Setting

METHODS: tuple[Method, ...] = ("sft", "dpo", "grpo", "kto", "ppo", "reward", "other")
COMMANDS: Mapping[str, Method | None] = {"sft": "sft", "pt": "other", "rlhf": None}
TYPES: Mapping[str, Method] = {
    "dpo": "dpo",
    "grpo": "grpo",
    "kto": "kto",
    "ppo": "ppo",
    "rm": "reward",
}


def find(words: Sequence[str]) -> Found | None:
    """``swift sft``, or swift/cli/sft.py under torchrun."""
    for at, (word, after) in enumerate(zip(words, (*words[1:], ""), strict=True)):
        path = PurePosixPath(word)
        for command, method in COMMANDS.items():
            if path.name == "swift" and after == command:
                return Found(method, at + 2)
            if word.endswith((f"cli/{command}.py", f"swift.cli.{command}")):
                return Found(method, at + 1)
    return None


def method_of(settings: Mapping[str, Setting]) -> Method | None:
    """What ``rlhf_type`` says; a file without one may be for any command."""
    setting = settings.get("rlhf_type")
    if setting is None or setting.obstacle:
        return None
    return TYPES.get(str(setting.value), "other")


def release(settings: Mapping[str, Setting]) -> Release:
    """3.x where a name is used that 4 has another for."""
    return Release("4.6.0", "the newest known; say another as swift==VERSION:FILE")


DIALECT = Dialect(
    name="swift",
    library="ms-swift",
    find=find,
    methods=METHODS,
    release=release,
    options_of="ms-swift 4.6",
    model=("model",),
    data=("dataset",),
    aliases={"train_type": "tuner_type", "model_id_or_path": "model", "sft_type": "tuner_type"},
    method_of=method_of,
    environment="ENV",
)
