"""The parts of a vision-language model by the names people use, for every family; and which parameters a pattern means.

    vision_tower     what sees the picture: its patches and its blocks
    projector        what makes features of what the tower says: Qwen's mergers (deepstack's too), a connector, a
                     multi_modal_projector, LLaVA's image_newline
    language_model   the rest: decoder, embedding, output head; not a scalar head, which is new

Found by the words of a name, which wrapping by peft or sharding does not change. A pattern is one of these words, a
glob over whole names, or a regular expression between slashes.

May import errors, vision.towers and models.anatomy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from torch import nn

from taut.errors import ModelError
from taut.models import anatomy
from taut.vision import towers

Part: TypeAlias = Literal["vision_tower", "projector", "language_model"]
WORDS: tuple[Part, ...] = get_args(Part)

_LANGUAGE = frozenset({"language_model", "text_model"})
_PROJECTOR = frozenset(
    {
        "merger",
        "deepstack_merger_list",
        "multi_modal_projector",
        "connector",
        "image_newline",
    }
)
_TOWER = frozenset({"visual", "vision_tower", "vision_model"})
_SCALAR = "score"


def has_parts(model: nn.Module) -> bool:
    """Whether it is a vision-language model."""
    return anatomy.takes_pictures(anatomy.unwrap(model).config)


def part_of(name: str) -> Part | None:
    """The part that a parameter or module of a vision-language model belongs to; None: a scalar head, no part."""
    words = set(name.split("."))
    if not words.isdisjoint(_LANGUAGE):
        return "language_model"
    if not words.isdisjoint(_PROJECTOR):
        return "projector"
    if not words.isdisjoint(_TOWER):
        return "vision_tower"
    return None if _SCALAR in words else "language_model"


def matching(model: nn.Module, pattern: str, names: Sequence[str], key: str) -> list[str]:
    """The ``names`` (of the model's parameters or modules) that a pattern means. ``key``: where the user wrote it."""
    if pattern not in WORDS:
        return anatomy.match_names(pattern, list(names))
    if not has_parts(model):
        raise ModelError(
            f"{key}: {pattern!r} is a part of a vision-language model, and {type(anatomy.unwrap(model)).__name__} is "
            "none; expected names of its parameters; leave it out"
        )
    return [name for name in names if part_of(name) == pattern]


def freeze_unread(model: nn.Module) -> list[str]:
    """Stop training what no feature of a picture depends on, and would have no gradient; returns the names."""
    if not has_parts(model):
        return []
    unread = {id(parameter) for parameter in towers.unread(anatomy.decoder(model))}
    found = {name: p for name, p in model.named_parameters() if id(p) in unread}
    for parameter in found.values():
        parameter.requires_grad_(False)
    return list(found)


def unreached(model: nn.Module, trained: Iterable[str], silent: Collection[str]) -> list[Part]:
    """The parts that pictures alone reach, of which something is ``trained`` and all of that is ``silent``."""
    if not has_parts(model):
        return []
    reached = {name: name not in silent for name in trained}
    found: dict[Part | None, list[bool]] = {}
    for name, is_reached in reached.items():
        found.setdefault(part_of(name), []).append(is_reached)
    return [part for part in WORDS[:2] if part in found and not any(found[part])]


def named_once(model: nn.Module, patterns: Iterable[str], key: str) -> dict[str, str]:
    """Parameter -> the one pattern that means it, of those that train. ``key``: where the user wrote them."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found: dict[str, str] = {}
    for pattern in patterns:
        matches = matching(model, pattern, names, key)
        if not matches:
            raise ModelError(
                f"{key}: {pattern!r} matches no parameter that trains; expected one that does; "
                + ("leave it out" if pattern in WORDS else anatomy.suggest(pattern, names))
            )
        twice = next((name for name in matches if name in found), None)
        if twice is not None:
            raise ModelError(
                f"{key}: {twice} is meant by {found[twice]!r} and by {pattern!r}; expected one of them for each "
                "parameter; name fewer with one of the two"
            )
        found |= dict.fromkeys(matches, pattern)
    return found


def counted(names: Iterable[str]) -> str:
    """How many of each part, in words."""
    counts = Counter(part_of(name) or _SCALAR for name in names)
    return ", ".join(f"{counts[part]} in {part}" for part in (*WORDS, _SCALAR) if counts[part])
