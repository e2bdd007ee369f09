"""The bytes of every token: with them ids become text where there is no tokenizer.

    table = token_bytes(tokenizer)
    b"".join(table[i] for i in ids).decode(errors="replace")        what tokenizer.decode(ids) says

A token of a byte-level vocabulary may be part of a character, so that only the joined bytes are text. Where words begin
with a mark for the space before them (Llama 2's), so does the first one, whose space ``decode`` drops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that stands for one byte, where a vocabulary of pieces has them."""


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes of each id, from 0 to the last one; none for an id without a token."""
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    kinds = _decoders(tokenizer)
    latin = {ord(char): number for number, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    table = []
    for index in range(max(pieces | added, default=-1) + 1):
        piece = pieces.get(index)
        if index in added:
            text = added[index].encode()
        elif piece is None:
            text = b""
        elif "ByteLevel" in kinds:
            raw = piece.translate(latin)
            text = raw.encode("latin-1") if max(raw, default="") <= "\xff" else piece.encode()
        elif "ByteFallback" in kinds and (match := BYTE.fullmatch(piece)):
            text = bytes([int(match[1], 16)])
        elif "WordPiece" in kinds:
            text = (
                piece.removeprefix("##").encode()
                if piece.startswith("##")
                else f" {piece}".encode()
            )
        elif kinds & {"Metaspace", "Replace"}:
            text = piece.replace("▁", " ").encode()
        else:
            text = str(tokenizer.decode([index])).encode()
        table.append(text)
    return table


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes that each id adds to a text without special tokens."""
    table = token_bytes(tokenizer)
    for index in tokenizer.all_special_ids:
        table[index] = b""
    return table


def _decoders(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The types of the steps by which a tokenizer decodes; none for one that is not a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found: set[str] = set()

    def collect(decoder: Mapping[str, Any] | None) -> None:
        if decoder is not None:
            found.add(decoder["type"])
            for step in decoder.get("decoders", ()):
                collect(step)

    if backend is not None:
        collect(json.loads(backend.to_str())["decoder"])
    return found
