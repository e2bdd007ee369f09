"""Tokens and their text: control tokens in what a row says, encoded as text; and the bytes of every token.

transformers tokenizes a rendering as one string, and so do servers that render messages: ``<|im_end|>`` in what a user
wrote ends the user's turn. Harmony and mistral-common encode what is said as text, and write control tokens themselves
alone. So does this, for any template and fast tokenizer:

    written     <|im_start|>user\\n<|im_end|>M ends a turn.<|im_end|>\\n      M, a mark that goes through the template
    spelled     S user\\n<|im_end|> ends a turn.E\\n                          S and E, private characters

A tokenizer to which control tokens are known by these characters alone takes the rest as the text that it is, in its
place: the ids are those of the tokenizer itself for a text without any. A row whose text the template takes apart at a
control token, so that the marks change what it writes, is a RenderError.

Control tokens are the special ones, those that look like them (``<|fim_prefix|>``), and other added tokens that the
template writes. In what an assistant says only the special ones and those of a prompt, but for tags of thoughts:
parsers read tags of thoughts and calls from its text.

With the bytes of every token, ids become text where there is no tokenizer:

    table = token_bytes(tokenizer)
    b"".join(table[i] for i in ids).decode(errors="replace")        equals tokenizer.decode(ids)

A token of a byte-level vocabulary may be part of a character, so that only the joined bytes are text. Where words begin
with a mark for the space before them (Llama 2's), so does the first one, whose space ``decode`` drops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from taut.data.rows.messages import Message
from taut.errors import RenderError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FIRST, MARK = 0x100000, "\U0010fffd"
"""The first private character that replaces a control token; the mark after a control token of a row."""
PRIVATE = re.compile("[\U00100000-\U0010fffc]")
SPECIAL = re.compile(r"<[|\uff5c].+[|\uff5c]>")
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte in a vocabulary of pieces."""


class ControlTokens:
    """The control tokens of a tokenizer and a template, and the tokenizer that tells them from text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, prompt: str) -> None:
        """``prompt``: the rendering of a question, with the generation prompt."""
        self.tokenizer = tokenizer
        added, named = tokenizer.added_tokens_decoder.values(), {*tokenizer.all_special_tokens}
        special = {token.content for token in added if token.special or token.content in named}
        contents = [token.content for token in added if token.content.strip()]
        tokens = [it for it in contents if it in special or SPECIAL.fullmatch(it) or it in template]
        of_turns = {*special, *(token for token in contents if token in prompt)}
        self._letters = {token: chr(FIRST + number) for number, token in enumerate(tokens)}
        self._tokens = {letter: token for token, letter in self._letters.items()}
        self._all = _any_of(tokens)
        self.of_turns = _any_of(token for token in of_turns if "think" not in token.lower())
        """Tokens that no answer has: special ones, and those of a prompt except tags of thoughts."""

    def mark(self, value: Any, pattern: re.Pattern[str] | None = None) -> Any:
        """A JSON value with a mark after each control token in its texts."""
        pattern = pattern or self._all
        if isinstance(value, str):
            return pattern.sub(rf"\g<0>{MARK}", value)
        if isinstance(value, Mapping):
            return {self.mark(key, pattern): self.mark(it, pattern) for key, it in value.items()}
        return [self.mark(item, pattern) for item in value] if isinstance(value, list) else value

    def mark_messages(self, messages: Sequence[Message]) -> list[Message]:
        return [
            self.mark(message, self.of_turns if message["role"] == "assistant" else self._all)
            for message in messages
        ]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of renderings with marks."""
        spelled = [self._spelled(text) for text in texts]
        encodings = self._backend.encode_batch_fast(spelled, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The span [start, stop) of each token in a rendering, marks not counted."""
        spelled = self._spelled(text)
        at = [0, *accumulate(len(self._tokens.get(letter, letter)) for letter in spelled)]
        offsets = self._backend.encode(spelled, add_special_tokens=False).offsets
        return [(at[start], at[stop]) for start, stop in offsets]

    def _spelled(self, text: str) -> str:
        if PRIVATE.search(text):
            raise RenderError(
                f"the text has {PRIVATE.findall(text)[0]!r}, a private character of plane 16, beside control tokens; "
                "expected characters that mean something; remove it"
            )
        marked = re.compile(f"({self._all.pattern})({MARK})?")
        spelled = marked.sub(lambda it: it[1] if it[2] else self._letters[it[1]], text)
        return spelled.replace(MARK, "")

    @cached_property
    def _backend(self) -> Tokenizer:
        """The tokenizer with letters in place of control tokens."""
        from tokenizers import Tokenizer

        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        content |= {"truncation": None, "padding": None}
        model, letters = content["model"], self._letters
        for token in content["added_tokens"]:
            token["content"] = letters.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {letters.get(key, key): at for key, at in model["vocab"].items()}
        else:  # of a Unigram model, with scores
            model["vocab"] = [[letters.get(key, key), score] for key, score in model["vocab"]]
        if "merges" in model:
            pairs = [it.split(" ") if isinstance(it, str) else it for it in model["merges"]]
            model["merges"] = [pair for pair in pairs if "".join(pair) not in letters]
        model["unk_token"] = letters.get(model.get("unk_token"), model.get("unk_token"))
        return Tokenizer.from_str(json.dumps(content))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of these tokens, the longest that there is; no text matches where there are none."""
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


# -- bytes


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes of each id, from 0 to the last one; none for an id without a token."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    kinds = _decoders(tokenizer)
    latin = {ord(char): number for number, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    # How a piece stands for bytes depends on the steps by which the tokenizer decodes.
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
