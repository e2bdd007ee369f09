"""TRL: ``trl METHOD``, its scripts under accelerate or torchrun, and YAML for ``--config``.

Option names are those of trl 1.16.0. ``examine.py`` imports it; ``open_r1.py`` takes its aliases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from taut.migrate.dialect import Dialect, Found, Release
from taut.migrate.recipe import Method, Setting

METHODS: tuple[Method, ...] = ("sft", "dpo", "grpo", "kto", "rloo", "reward")
ALIASES: Mapping[str, str] = {
    "torch_dtype": "dtype",
    "model_init_kwargs.attn_implementation": "attn_implementation",
    "model_init_kwargs.dtype": "dtype",
    "model_init_kwargs.torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
}
NEWEST = "1.16.0"


def find(words: Sequence[str]) -> Found | None:
    """``trl sft``, or a script called sft.py."""
    for at, (word, after) in enumerate(zip(words, (*words[1:], ""), strict=True)):
        path = PurePosixPath(word)
        for method in METHODS:
            if path.name == "trl" and after == method:
                return Found(method, at + 2)
            if path.name in (f"{method}.py", f"{method}_trainer.py") and "open_r1" not in word:
                return Found(method, at + 1, is_script=True)
            if word == f"trl.scripts.{method}":
                return Found(method, at + 1, is_script=True)
    return None


def release(settings: Mapping[str, Setting]) -> Release:
    """The newest version that the traps were checked against."""
    return Release(NEWEST, "the newest known; say another as trl==VERSION:FILE")


DIALECT = Dialect(
    name="trl",
    library="trl",
    find=find,
    methods=METHODS,
    release=release,
    options_of=f"trl {NEWEST}",
    model=("model_name_or_path",),
    data=("dataset_name", "datasets"),
    aliases=ALIASES,
    prefers_alias=frozenset({"model_init_kwargs.attn_implementation", "model_init_kwargs.dtype"}),
    environment="env",
)
