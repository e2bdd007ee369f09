"""Tables of a framework's options: their names for ``convert.py``, their defaults, and outcomes of options that no key
of taut carries. One TOML file for each framework; ``extends`` names files whose tables it includes, where its own
outcomes replace entries under ``lacking``.

``names``      the framework's name of an option -> the name that ``convert.py`` reads
``defaults``   by method (``*`` for all): the framework's value of an option that the recipe does not set, by the name
               that is read; ``like`` names tables of ``groups`` to begin with, ``unset`` options without a value
``columns``    the framework's name of a column of the data -> taut's
``needless``, ``machine``, ``lacking``   reasons -> options (see draft.py). An option that is not listed here and that
               convert.py does not read is lacking. ``off`` lists values that switch an option off.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Lacking(NamedTuple):
    """The outcome of an option for which taut has nothing."""

    why: str
    off: tuple[Any, ...] = ()
    """Values that switch the option off, in addition to empty and false ones."""
    changes: bool = True
    """Whether another model is learned without the option."""
    refuses: bool = False
    """Whether taut has no such run."""


@dataclass
class Tables:
    """The options of one framework."""

    title: str = ""
    """Name of the framework as its authors write it."""
    methods: dict[str, str] = field(default_factory=dict)
    """Method of taut by the framework's method; a sentence for a method that taut lacks."""
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    """Reason by option, as in the next three tables."""
    machine: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, Lacking] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    """taut's name of a column, by the framework's."""
    variables_elsewhere: dict[str, str] = field(default_factory=dict)
    """Environment variables that are settings for which taut has nothing."""
    none_is_unset: bool = False
    """Whether a null value means that the option is not set."""

    def names_of(self, method: str) -> Mapping[str, str]:
        return {**self.names.get("*", {}), **self.names.get(method, {})}

    def defaults_of(self, method: str) -> Mapping[str, Any]:
        return {**self.defaults.get("*", {}), **self.defaults.get(method, {})}

    def read(self, name: str) -> None:
        """Add a file after the files that it extends. Raises ValueError for an option with two outcomes."""
        text = files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
        said: dict[str, Any] = tomllib.loads(text)
        for base in said.get("extends", ()):
            self.read(base)
        self.title = said.get("title", self.title)
        self.none_is_unset |= said.get("none_is_unset", False)
        self.methods |= said.get("methods", {})
        self.columns |= said.get("columns", {})
        for method, names in said.get("names", {}).items():
            self.names.setdefault(method, {}).update(names)
        for group, values in said.get("groups", {}).items():
            self.groups[group] = self._values(values)
        for method, values in said.get("defaults", {}).items():
            self.defaults.setdefault(method, {}).update(self._values(values))
        for kind in ("needless", "machine", "variables_elsewhere"):
            table = getattr(self, kind)
            for why, options in said.get(kind, {}).items():
                for option in options.split():
                    if table.setdefault(option, why) != why:
                        raise ValueError(f"{option} has two outcomes: {table[option]}; {why}")
                    if kind != "variables_elsewhere":
                        self.lacking.pop(option, None)
        for entry in said.get("lacking", ()):
            for option in entry["options"].split():
                off = entry.get("off", {}).get(option, ())
                self.lacking[option] = Lacking(
                    entry["why"],
                    tuple(off) if isinstance(off, list | tuple) else (off,),
                    entry.get("changes", True),
                    entry.get("refuses", False),
                )

    def _values(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Values of a table of defaults, with those of its groups."""
        values: dict[str, Any] = {}
        for group in table.get("like", ()):
            values |= self.groups[group]
        values |= {key: table[key] for key in table if key not in ("like", "unset")}
        return values | dict.fromkeys(table.get("unset", "").split())


@cache
def tables_of(framework: str) -> Tables:
    """Read the tables of a framework, by its name in ``DIALECTS``."""
    tables = Tables()
    tables.read(framework)
    return tables


def words(text: str) -> tuple[str, ...]:
    """Split a text into words, which is a readable way to write a list of names."""
    return tuple(text.split())


VARIABLES = words(
    "*_API_KEY ACCELERATE_* CPU_AFFINITY_* CUDA_* GLOO_* HCCL_* HF_* HSA_* LD_* MKL_* MODELSCOPE_* NCCL_* NPU_* "
    "NPROC_PER_NODE NNODES NODE_RANK MASTER_* OMP_* PATH PYTHON* PYTORCH_* RAY_* SWANLAB_* "
    "TASK_QUEUE_* TENSORBOARD_* TOKENIZERS_* TORCH* TRANSFORMERS_* TRITON_* USE_HF WANDB_* "
    "TRACKIO_* ASCEND_* VLLM_* UCX_* FI_* IB_* GPUS_PER_NODE WORLD_SIZE RANK LOCAL_RANK LOGLEVEL "
    "HYDRA_* SLURM_* DS_* FSDP_* NVTE_* MULTI_STREAM_* COMBINED_ENABLE TE_* MEGATRON_LM_PATH "
    "LOCAL_WORLD_SIZE TMPDIR HOME LANG LC_* http_proxy https_proxy no_proxy TF_CPP_* TZ USE_MCORE_GDN "
    "CELOSS_PARALLEL_SIZE"
)
"""Patterns of environment variables that concern the machine."""
