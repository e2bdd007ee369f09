"""What describes a model's pictures, carried from the model that was loaded to what is saved: the files as they are.

But for a chat template among them: the library prefers one there to chat_template.jinja, where the template in use is
saved. May import errors and models.anatomy.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn
from transformers.utils.hub import cached_file

from taut import durable
from taut.errors import OutputError
from taut.models import anatomy

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def find_processor(model: nn.Module) -> dict[str, Path]:
    """Name -> file, of the model that was loaded; nothing for one that takes no pictures. Asked once when a hub model
    is loaded, it is answered from the library's cache ever after.
    """
    inner = anatomy.unwrap(model)
    if not anatomy.takes_pictures(inner.config):
        return {}
    origin = str(inner.name_or_path)
    found: dict[str, Path] = {}
    for name in FILES:
        file = cached_file(
            origin,
            name,
            revision=getattr(inner.config, "_commit_hash", None),
            _raise_exceptions_for_missing_entries=False,
        )
        if file is not None:
            found[name] = Path(file)
    if not found:
        raise OutputError(
            f"{origin} has no {FILES[0]} any more, which says how pictures are scaled and cut; expected it beside "
            "config.json; put it back"
        )
    return found


def copy_processor(model: nn.Module, directory: Path, *, has_template: bool) -> None:
    """Write into ``directory`` what the library needs to make pictures ready for ``model``. ``has_template``: whether
    the directory has a chat template of its own.
    """
    for name, file in find_processor(model).items():
        said = durable.read_json(file)
        if has_template and said.pop("chat_template", None) is not None:
            text = json.dumps(said, indent=2, ensure_ascii=False) + "\n"
            (directory / name).write_text(text, encoding="utf-8")
        else:
            (directory / name).write_bytes(file.read_bytes())
