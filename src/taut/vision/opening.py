"""A model's album, if it takes pictures; else nothing, and no setting of pictures that would do nothing.

May import the rest of vision, config and errors. Imported by run and by what opens an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from taut.config import fields_of
from taut.errors import ConfigError, ModelError
from taut.vision.album import Album
from taut.vision.picture import ImagesConfig
from taut.vision.processors import open_processor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

OF_ROWS = (
    "folder",
    "allow_urls",
    "bad",
    "workers",
    "fps",
    "max_frames",
    "limit_video_pixels",
    "limit_video_seconds",
)
"""Settings of pictures that are for files of rows."""


def open_album(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: ImagesConfig,
    directory: Path,
    trust_remote_code: bool = False,
    *,
    key: str = "data.images",
) -> Album | None:
    """The pictures of a run, as the model at ``path`` takes them; None: it takes none. ``directory``: the cache's;
    ``key``: where ``images`` are in the configuration.
    """
    processor = open_processor(path, config, tokenizer, trust_remote_code)
    if processor is not None:
        return Album(processor, images, directory / "pictures", key)
    reader = f"model={path}, which takes no pictures"
    require_unset(images, fields_of(ImagesConfig), reader, key)
    return None


def require_alike(
    path: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    album: Album,
    key: str,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError where the model at ``path`` takes pictures in another way than those of ``album`` are made
    ready.
    """
    theirs = open_processor(path, config, tokenizer, trust_remote_code)
    if theirs is None or theirs.identity() != album.processor.identity():
        found = "takes no pictures" if theirs is None else "scales or cuts pictures in another way"
        raise ModelError(
            f"{key}={path} {found}, and is given those of the model that trains; expected the same processor; name a "
            "model of the same family with equal processor files"
        )


def require_unset(
    images: ImagesConfig, names: Iterable[str], reader: str, key: str = "images"
) -> None:
    """Raise ConfigError where one of these settings would be ignored."""
    for name in names:
        if getattr(images, name) != getattr(ImagesConfig, name):
            raise ConfigError(
                f"{key}.{name} would be ignored by {reader}; expected it unset; remove it"
            )
