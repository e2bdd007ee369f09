"""What an adapter is put on: the user's names -> peft's, or one line why not.

A target is the end of a name (q_proj, mlp.up_proj), wherever that is; a glob over whole names or a /regular
expression/; or a part of a vision-language model (``parts.WORDS``). Refused: what matches nothing, the output head as a
target (it is scored in chunks, not called), one half of a tied pair.

May import errors and models.{anatomy,heads,parts}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from taut.errors import ModelError
from taut.models import anatomy, parts
from taut.models.heads import scalar_head

ALL: Literal["all-linear"] = "all-linear"
_TARGETS, _SAVED = "lora.targets", "lora.modules_to_save"


def is_meant(full_name: str, name: str) -> bool:
    """peft's rule: a name is matched by its last parts."""
    return full_name == name or full_name.endswith(f".{name}")


def target_names(
    model: PreTrainedModel, targets: Sequence[str]
) -> list[str] | Literal["all-linear"]:
    """The ends of names as they are; what patterns and parts mean, in full."""
    if targets == ALL:
        if not parts.has_parts(model):
            return ALL
        targets = ["language_model"]
    head, linear = _head(model), _linear(model)
    found: dict[str, None] = {}
    for target in targets:
        is_part = target in parts.WORDS
        is_end = not is_part and not any(sign in target for sign in "*?[/")
        if is_end:
            matches = [name for name in linear if is_meant(name, target)]
        else:
            matches = parts.matching(model, target, list(linear), _TARGETS)
        if is_part:
            matches = [name for name in matches if linear[name] is not head]
        if not matches:
            remedy = anatomy.suggest(target, list(linear))
            if is_part:
                remedy = f"train it whole ({_SAVED}), or leave it out"
            raise ModelError(f"{_TARGETS}: {target!r} matches no linear module; {remedy}")
        if any(linear[name] is head for name in matches):
            raise ModelError(
                f"{_TARGETS}: {target!r} is the output head, which is scored in chunks and takes no adapter; "
                + (
                    f"train it whole with {_SAVED}, or "
                    if anatomy.has_head(model)
                    else "it trains whole: "
                )
                + "leave it out"
            )
        found |= dict.fromkeys([target] if is_end else matches)
    return list(found)


def saved_names(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The modules that train whole: ends of names as they are; for ``projector`` what it is made of."""
    head, modules = _head(model), dict(model.named_modules())
    found: list[str] = []
    for name in names:
        matches = [full for full in modules if is_meant(full, name)]
        if name == "projector" and not matches:
            found += _whole(model, name)
            continue
        if not matches:
            raise ModelError(
                f"{_SAVED}: {name!r} matches no module; {anatomy.suggest(name, list(modules))}"
            )
        if any(modules[full] is head for full in matches) and anatomy.is_tied(model):
            raise ModelError(
                f"{_SAVED}: {name!r} is tied to the embedding; "
                f"name the embedding instead ({anatomy.table_names(model)[0]}): both are then "
                "trained as one"
            )
        found.append(name)
    return found


def _whole(model: PreTrainedModel, part: str) -> list[str]:
    """The outermost modules that a part is made of, none a list."""
    own = set(parts.matching(model, part, [name for name, _ in model.named_parameters()], _SAVED))
    found: list[str] = []
    for name, module in model.named_modules():
        whole = {f"{name}.{rest}" for rest, _ in module.named_parameters()}
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if whole and whole <= own and not is_inside and not isinstance(module, nn.ModuleList):
            found.append(name)
    return found


def _linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    every = model.named_modules()
    return {name: module for name, module in every if isinstance(module, nn.Linear | Conv1D)}


def _head(model: PreTrainedModel) -> nn.Module:
    """The output head, or the scalar one."""
    found = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found if isinstance(found, nn.Module) else scalar_head(model)
