"""A Hugging Face tokenizer -> the tokenizer.* keys of a GGUF file, or one line why llama.cpp would give other ids.

llama.cpp knows how a text is cut before the merges by a name (tokenizer.ggml.pre). The name is looked up by what the
tokenizer does, in an explicit table of byte-level BPE tokenizers; another structure is refused by what was found.
Token types: control for added tokens that are special, user-defined for other added tokens, unused for rows of the
embedding that are no token (written ``[PAD7]``, as llama.cpp's converter does), normal for the rest.

llama.cpp ends an answer at tokenizer.ggml.eos_token_id, eot_token_id, eom_token_id, and at tokens of well-known text,
whatever their type. The stop set goes into these; one that does not fit is refused.

Does not convert sentencepiece-like vocabularies: their scores are not in tokenizer.json. May import errors. Imported by
``gguf.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from gguf import Keys, TokenType
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.errors import ModelError

Value: TypeAlias = str | bool | int | float | list[str] | list[int]
Metadata: TypeAlias = dict[str, Value]
"""Keys of a GGUF file. An int is written as uint32, a float as float32."""
Steps: TypeAlias = tuple[str, ...]

REMEDY: Final = "convert it with llama.cpp's own convert_hf_to_gguf.py"

_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

PRE_TOKENIZERS: Final[Mapping[tuple[Steps, bool], str]] = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((_WORDS + r"\p{N}" + _REST, "bytes"), False): "qwen2",
    ((_WORDS + r"\p{N}{1,3}" + _REST, "bytes"), True): "llama-bpe",
    ((_WORDS + r"\p{N}{1,3}" + _REST, "bytes"), False): "dbrx",
}
"""(how a text is cut, whether a word that is a token skips the merges) -> llama.cpp's name for it. ``digits``: each
digit alone; ``words``: GPT-2's pattern; ``bytes``: nothing more; else the pattern it is cut by."""

ENDS_BY_TEXT: Final = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|eom_id|> <|endoftext|> <|end_of_text|> <end_of_turn> "  # noqa: SIM905
    "</s> <EOT> _<EOT>".split()
)
"""Tokens at which llama.cpp ends an answer by their text (llama-vocab.cpp), those that it has known for long."""


def vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    stop_ids: Sequence[int],
    num_rows: int,
) -> Metadata:
    """The tokenizer.* keys. ``stop_ids``: the turn end first; ``num_rows``: of the embedding."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer is a {type(tokenizer).__name__} without tokenizer.json; expected a fast tokenizer; {REMEDY}"
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, types = _tokens(tokenizer, num_rows)
    metadata: Metadata = {
        Keys.Tokenizer.MODEL: "gpt2",
        Keys.Tokenizer.PRE: pre_tokenizer_name(backend),
        Keys.Tokenizer.LIST: tokens,
        Keys.Tokenizer.TOKEN_TYPE: types,
        Keys.Tokenizer.MERGES: _merges(backend),
        **_ends(tokenizer, stop_ids),
        **_specials(tokenizer, config),
        **_templates(tokenizer),
    }
    return metadata


def notes(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> list[str]:
    """Where llama.cpp will do otherwise than this tokenizer and stop set, and no key says so."""
    found = []
    if json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"]:
        found.append(
            "llama.cpp does not bring text into Unicode's NFC form, as this tokenizer does: other ids where it is not"
        )
    known = tokenizer.get_vocab()
    others = sorted(text for text in ENDS_BY_TEXT if known.get(text, stop_ids[0]) not in stop_ids)
    if others:
        found.append(f"llama.cpp also ends an answer at {', '.join(others)}, by its text")
    if tokenizer.chat_template is None:
        found.append("the tokenizer has no chat template: llama.cpp falls back to one of its own")
    return found


def pre_tokenizer_name(backend: Mapping[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer.json cuts a text, or ModelError."""
    model, normalizer = backend["model"], backend["normalizer"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = (
            "a sentencepiece-like BPE with byte fallback"
            if model["type"] == "BPE"
            else model["type"]
        )
        raise _unknown(kind)
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise _unknown(f"the normalizer {json.dumps(normalizer)}")
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise _unknown("a BPE with marks on parts of words")
    cut = backend["pre_tokenizer"] or {"type": "none"}
    parts = cut["pretokenizers"] if cut["type"] == "Sequence" else [cut]
    steps = tuple(_step(part) for part in parts)
    name = PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))
    if name is None:
        raise _unknown(f"the pre-tokenizer {' then '.join(steps)}")
    return name


def _step(part: Mapping[str, Any]) -> str:
    """A pre-tokenizer in the words of ``PRE_TOKENIZERS``; as JSON where they do not fit."""
    kind = part["type"]
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return "words" if part["use_regex"] else "bytes"
    if kind == "Digits" and part["individual_digits"]:
        return "digits"
    if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        return str(part["pattern"].get("Regex", part["pattern"]))
    return json.dumps(part)


def _unknown(found: str) -> ModelError:
    known = ", ".join(sorted(set(PRE_TOKENIZERS.values())))
    return ModelError(
        f"the tokenizer has {found[:300]}; expected a byte-level BPE that cuts text like one of {known}, or llama.cpp "
        f"would give other ids; {REMEDY}"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[list[str], list[int]]:
    """A text and a type for each row of the embedding."""
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if max(texts) >= num_rows:
        raise ModelError(
            f"the tokenizer has id {max(texts)} and the embedding {num_rows} rows; expected a row for each token; "
            "copy the tokenizer of the base model"
        )
    added = tokenizer.added_tokens_decoder
    for token in added.values():
        if token.lstrip or token.rstrip or token.single_word:
            raise ModelError(
                f"the added token {token.content} takes white space beside it, or whole words only; expected one that "
                f"does not, since llama.cpp cannot; {REMEDY}"
            )
    tokens, types = [], []
    for row in range(num_rows):
        tokens.append(texts.get(row, f"[PAD{row}]"))
        if row not in texts:
            kind = TokenType.UNUSED
        elif row in added:
            kind = TokenType.CONTROL if added[row].special else TokenType.USER_DEFINED
        else:
            kind = TokenType.NORMAL
        types.append(int(kind))
    if len(set(tokens)) != num_rows:
        raise ModelError(
            "two rows of the vocabulary have one text; expected them to differ; copy the tokenizer of the base model"
        )
    return tokens, types


def _merges(backend: Mapping[str, Any]) -> list[str]:
    return [
        merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]
    ]


def _ends(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> Metadata:
    """The stop set where llama.cpp looks for it."""
    if not stop_ids:
        raise ModelError(
            "the tokenizer names no token that ends an answer; expected an eos token; set it in tokenizer_config.json"
        )
    further = [
        index
        for index in stop_ids[1:]
        if tokenizer.convert_ids_to_tokens(index) not in ENDS_BY_TEXT
    ]
    keys = (Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
    if len(further) > len(keys):
        names = ", ".join(str(tokenizer.convert_ids_to_tokens(index)) for index in further)
        raise ModelError(
            f"the stop set has {names} beside its turn end; expected two at most, which is what llama.cpp has keys "
            "for; take those that end no answer from eos_token_id in generation_config.json"
        )
    return {
        Keys.Tokenizer.EOS_ID: int(stop_ids[0]),
        **{key: int(index) for key, index in zip(keys, further, strict=False)},
    }


def _specials(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> Metadata:
    """bos, pad and unknown, and which of them a plain text gets."""
    bos = tokenizer.bos_token_id
    if bos is None:
        bos = getattr(config.get_text_config(), "bos_token_id", None)
    metadata: Metadata = {
        key: int(index)
        for key, index in (
            (Keys.Tokenizer.BOS_ID, bos),
            (Keys.Tokenizer.PAD_ID, tokenizer.pad_token_id),
            (Keys.Tokenizer.UNK_ID, tokenizer.unk_token_id),
        )
        if index is not None
    }
    plain, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    if whole not in (plain, [bos, *plain]):
        raise ModelError(
            f"the tokenizer makes {whole} of 'a', and {plain} without special tokens; expected nothing or bos in "
            f"front: an eos behind a prompt would end it; {REMEDY}"
        )
    metadata[Keys.Tokenizer.ADD_BOS] = whole != plain
    metadata[Keys.Tokenizer.ADD_EOS] = False
    metadata[Keys.Tokenizer.ADD_PREFIX] = False
    return metadata


def _templates(tokenizer: PreTrainedTokenizerBase) -> Metadata:
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"default": template}
    others = sorted(name for name in named if name != "default")
    metadata: Metadata = {}
    if named.get("default"):
        metadata[Keys.Tokenizer.CHAT_TEMPLATE] = str(named["default"])
    for name in others:
        metadata[Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)] = str(named[name])
    if others:
        metadata[Keys.Tokenizer.CHAT_TEMPLATES] = others
    return metadata
