"""How many processes a recipe trains on, which its batch is multiplied by.

Read from the words that start it (torchrun, accelerate, deepspeed), the files that those name, and the environment.
Imports errors, ``recipe.py``, ``files.py`` and ``dialect.py``. ``carry.py`` imports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from taut.errors import ConfigError
from taut.migrate.dialect import find_near
from taut.migrate.files import SUFFIXES, read_settings, read_text
from taut.migrate.recipe import Recipe, Setting, parsed

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
SHIPPED = {"single_gpu": 1} | dict.fromkeys(
    ("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8
)
"""Processes of the configurations that come with trl, by the name that ``--accelerate_config`` takes."""


class Processes(NamedTuple):
    """The number of processes and what says so."""

    number: int | None
    """None: the recipe says it in a way that cannot be read."""
    reason: str
    is_assumed: bool = False
    """The recipe does not say it."""
    stated_by: frozenset[str] = frozenset()
    """Keys of the options that say it: of ``Recipe.settings``, ``$NAME`` or ``--NAME`` of the launcher."""


def launcher_options(recipe: Recipe) -> dict[str, Setting]:
    """The options among the words that start the framework, by ``--NAME``."""
    options = dict[str, Setting]()
    for word, after in zip(recipe.launcher, (*recipe.launcher[1:], "--"), strict=False):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        key = "--" + name.strip("-").replace("-", "_")
        takes_next = not equals and not after.startswith("-") and not after.endswith(".py")
        text = value if equals else after if takes_next else "true"
        obstacle = text if "$" in text or "`" in text else ""
        options[key] = Setting(key, parsed(text), recipe.place, obstacle)
    return options


def count_processes(recipe: Recipe, directory: Path, asked: int | None = None) -> Processes:
    """``asked``: what the user says, which holds in any case."""
    if asked is not None:
        return Processes(asked, "as asked")
    stated = {key.replace("--", ""): one for key, one in launcher_options(recipe).items()}
    if recipe.framework == "trl":
        own = ("num_processes", "accelerate_config", "config_file")
        stated |= {key: recipe.settings[key] for key in own if key in recipe.settings}
    variables = recipe.environment
    if "nproc_per_node" in stated or "nnodes" in stated:
        return _product(stated, ("nproc_per_node", "nnodes"))
    if "num_processes" in stated:
        return _product(stated, ("num_processes",))
    for key in ("config_file", "accelerate_config"):
        if key in stated:
            return _of_accelerate(stated[key], directory)
    if "num_gpus" in stated or "num_nodes" in stated:
        return _product(stated, ("num_gpus", "num_nodes"))
    if "include" in stated:
        devices = str(stated["include"].value).rpartition(":")[2]
        return Processes(
            len(devices.split(",")),
            f"--include {stated['include'].value}",
            False,
            frozenset({"--include"}),
        )
    if "hostfile" in stated:
        return _of_hostfile(stated["hostfile"], directory)
    if recipe.value("use_ray") is True:
        return Processes(None, "the device groups of Ray", stated_by=frozenset({"use_ray"}))
    if recipe.framework == "swift":
        if "NPROC_PER_NODE" in variables or "NNODES" in variables:
            return _product(variables, ("NPROC_PER_NODE", "NNODES"))
        if recipe.launcher[-2:-1] and recipe.launcher[-2].endswith("swift"):
            return Processes(1, "swift starts one process where NPROC_PER_NODE is not set")
    else:
        for name in VISIBLE:
            if name in variables and not variables[name].obstacle:
                devices = str(variables[name].value)
                number = len([one for one in devices.split(",") if one.strip()])
                return Processes(number, f"{name}={devices}", False, frozenset({f"${name}"}))
    return Processes(1, "the recipe does not say it", is_assumed=True)


def _product(options: Mapping[str, Setting], names: tuple[str, ...]) -> Processes:
    """The product of those that are set."""
    found = [options[name] for name in names if name in options]
    reason = " x ".join(f"{one.key}={one.obstacle or one.value}" for one in found)
    keys = frozenset(f"${one.key}" if one.key.isupper() else one.key for one in found)
    number = 1
    for one in found:
        value = parsed(one.value) if isinstance(one.value, str) else one.value
        if one.obstacle or type(value) is not int:
            return Processes(None, reason, False, keys)
        number *= value
    return Processes(number, reason, False, keys)


def _of_accelerate(option: Setting, directory: Path) -> Processes:
    """What accelerate's file says."""
    name, keys = str(option.value), frozenset({option.key})
    if name in SHIPPED:
        return Processes(SHIPPED[name], f"{name} of trl", False, keys)
    path = None if option.obstacle else find_near(directory / "recipe", name)
    if path is None or path.suffix not in SUFFIXES:
        return Processes(None, f"{option.key.strip('-')} {name}, which is not here", False, keys)
    try:
        content: dict[str, Any] = {one.key: one.value for one in read_settings(path).settings}
    except ConfigError as error:
        return Processes(None, str(error), False, keys)
    if content.get("distributed_type") in ("NO", False):
        return Processes(1, f"{name}: distributed_type NO", False, keys)
    number = content.get("num_processes")
    if type(number) is not int:
        return Processes(None, f"{name}, which has no num_processes", False, keys)
    return Processes(number, f"{name}: num_processes {number}", False, keys)


def _of_hostfile(option: Setting, directory: Path) -> Processes:
    """The slots of deepspeed's file of hosts."""
    name, keys = str(option.value), frozenset({option.key})
    path = None if option.obstacle else find_near(directory / "recipe", name)
    if path is None:
        return Processes(None, f"hostfile {name}, which is not here", False, keys)
    slots = [int(found) for found in re.findall(r"(?m)^[^#\n]*\bslots=(\d+)", read_text(path))]
    return Processes(sum(slots) or None, f"{name}: {sum(slots)} slots", False, keys)
