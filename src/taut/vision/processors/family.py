"""The common parts of the families: the words of a tokenizer, the library's image processor, and agreement between a
model's files.

Images go through the library's PIL-backed image processor with the settings of the model's directory. Settings that a
family cannot reproduce exactly are refused when the model is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.errors import ModelError


class ModelFiles(NamedTuple):
    """The content of a model's directory."""

    path: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    images: Any
    """The library's image processor: one class a family, without a common type."""
    own: Mapping[str, Any]
    """Settings of the library's processor class (processor_config.json)."""

    def require_same(self, name: str, found: object, expected: object) -> None:
        """Refuse a value of the processor (``found``) that differs from the model's (``expected``)."""
        if found != expected:
            raise ModelError(
                f"model={self.path}: {name} is {found} in the processor's files and {expected} in config.json; "
                "expected them to agree; copy all files from one model"
            )

    def require_setting(self, name: str, expected: object) -> None:
        """Refuse any other value of a setting of the image processor; None is the library's false."""
        value = getattr(self.images, name, None)
        if value != expected and not (value is None and expected is False):
            raise ModelError(
                f"model={self.path}: {name}={value} in preprocessor_config.json; expected {expected}: no other value "
                "is supported; set it so, or use another model"
            )

    def named_token(self, name: str, default: str | None = None) -> str:
        """The tokenizer's token of this ``name`` (image_token, ...), or else the library's default."""
        token = getattr(self.tokenizer, name, None) or default
        if token is None:
            raise ModelError(
                f"model={self.path}: the tokenizer has no {name}; expected it under extra_special_tokens in "
                "tokenizer_config.json; copy the tokenizer's files from the base model"
            )
        return str(token)

    def own_number(self, name: str, default: int | None = None) -> int:
        """A whole number of processor_config.json."""
        value = self.own.get(name, default)
        if not isinstance(value, int):
            raise ModelError(
                f"model={self.path}: found {name}={value} in processor_config.json; expected a number; copy the file "
                "from the base model"
            )
        return value


class Family:
    """The parts of a processor that do not depend on the family."""

    is_two_way = False
    depends_on_count = False

    def __init__(
        self, files: ModelFiles, placeholder: str, image_token: str, others: Sequence[str]
    ) -> None:
        """``others``: words that stand for images, videos or audio; ignored where the tokenizer has no such token."""
        files.require_setting("do_resize", True)
        added = files.tokenizer.get_added_vocab()
        for token in (placeholder, image_token):
            if token not in added:
                raise ModelError(
                    f"model={files.path}: the tokenizer has no token {token}, which stands for pictures; expected it "
                    "among its added tokens; copy the tokenizer's files from the base model"
                )
        self.placeholder = placeholder
        self.image_id = added[image_token]
        files.require_same(f"the id of {image_token}", self.image_id, files.config.image_token_id)
        words = dict.fromkeys((placeholder, image_token, *others))
        self.reserved = tuple(word for word in words if word in added)
        template = files.own.get("chat_template")
        self.template = template.get("default") if isinstance(template, dict) else template
        self._images = files.images
        self._settings = {
            "family": type(self).__name__,
            "libraries": [version("transformers"), version("pillow")],
            "images": files.images.to_dict(),
            "own": {name: value for name, value in files.own.items() if name != "chat_template"},
            "words": self.reserved,
        }

    def identity(self) -> str:
        """A hash of every setting and of the libraries' versions."""
        settings = json.dumps(self._settings, sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()

    def _process(self, images: object, **options: object) -> dict[str, Tensor]:
        """The output of the library's image processor for an image, or nested images."""
        return dict(self._images(images, return_tensors="pt", **options))


def sides(size: Any) -> tuple[int, int]:
    """Height and width of a size of the configuration's: one number, or two."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
