"""Tokenizers for templates that other people made: the real one where it can be had, else a stand-in.

A stand-in is the nearest real tokenizer, with its commonest merges alone so that it is quick, to which the markers that
the template writes are added as single tokens; eos, bos and generation_config are those of the template's family.
``base``: a tokenizer of ``artifacts.TOKENIZERS``, or ``bare``, the byte-level BPE of Qwen without its added tokens.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from tests.real import artifacts
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

NUM_MERGES = 20_000
END_OF_TEXT = "<|endoftext|>"
UNUSED = re.compile(r"unused\d|reserved_special_token|place▁holder")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
MARKER = re.compile(
    r"<\|[\w/ :.\-]+\|>|<｜[^｜<>{}']+｜>|｜\w+｜|<\|[\w/]+>|<\w+\|>|\[\|\w+\|\]|<SPECIAL_\d+>|</?seed:[\w]+>"
    r"|<start_of_turn>|<end_of_turn>|<start_of_image>|<end_of_utterance>|<image>|\[gMASK\]|<sop>|\]~b\]|\]~!b\[|\[e~\["
    r"|<begin_of_document>|<beginning_of_sentence>|<end_of_sentence>|〈\|EOS\|〉|</?assistant>(?=\")|<REKA_IMG_TOKEN>"
)
"""Control tokens: special."""
TAG = re.compile(
    r"</?(?:think|tool_call|tool_response|arg_key|arg_value|minimax:tool_call|mm:think)>"
)
"""Tags of thoughts and calls: single tokens that are not special, as in the tokenizers of Qwen and GLM."""
BRACKETS = [
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]"),
    *("[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[IMG]"),
]
"""Control tokens of Mistral from its second version on."""
HY3 = [
    *(
        f"<｜hy_{word}:opensource｜>"
        for word in ("eos", "begin_of_sentence", "pad", "User", "Assistant")
    ),
    "<｜reasoning_mode:opensource｜>",
    *(
        f"<{slash}{word}:opensource>"
        for word in (
            "think",
            "tool_calls",
            "tool_call",
            "arg_key",
            "arg_value",
            "tool_responses",
            "tool_response",
        )
        for slash in ("", "/")
    ),
    "<tool_sep:opensource>",
]
"""Control tokens that Hy3's template puts together."""


@dataclass(frozen=True)
class Family:
    """What a family of models has in common."""

    pattern: str
    """Regular expression of the names of its templates, found anywhere."""
    eos: str
    bos: str | None = None
    base: str = "bare"
    ends: tuple[str, ...] = ()
    """Tokens that generation_config names, beside eos."""
    special: tuple[str, ...] = ()
    """Control tokens that cannot be told from the template."""
    swallows: bool = False
    """Whether the control tokens take the white space after them along."""


def _family(pattern: str, eos: str, bos: str | None = None, **more: Any) -> Family:
    return Family(pattern, eos, bos, **more)


DEEPSEEK4 = tuple(
    f"<｜{word}｜>"
    for word in ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
)
GEMMA4 = ("<|tool_call>", "<tool_call|>", "<|image>", "<image|>", "<|image|>", "<|think|>")
IM_END, EOT, START = "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>"
FAMILIES = [
    _family(
        "gemma-?4|diffusion_gemma",
        "<turn|>",
        "<bos>",
        base="gemma3",
        ends=("<eos>", "<|tool_response>"),
        special=GEMMA4,
    ),
    _family("gemma", "<end_of_turn>", "<bos>", base="gemma3", ends=("<eos>",)),
    _family(
        "gpt-?oss",
        "<|return|>",
        "<|startoftext|>",
        base="gptoss",
        ends=("<|endoftext|>", "<|call|>"),
    ),
    _family(
        "DeepSeek-V4",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        base="deepseek_v3",
        special=DEEPSEEK4,
    ),
    _family("deepseek", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", base="deepseek_v3"),
    _family("Hermes", IM_END, START, base="llama3"),
    _family("idefics3", "<end_of_utterance>", START, base="llama3"),
    _family("llama4", "<|eot|>", START),
    _family(
        "[Ll]lama-?_?3[._-]?[123]|functionary", EOT, START, base="llama3_1", ends=("<|eom_id|>",)
    ),
    _family("[Ll]lama-?_?3", EOT, START, base="llama3", ends=("<|end_of_text|>",)),
    _family("[Gg][Ll][Mm]", "<|endoftext|>", ends=("<|user|>", "<|observation|>")),
    _family("[Pp]hi_?-?4", IM_END, "<|endoftext|>"),
    _family(
        "[Pp]hi",
        "<|endoftext|>",
        "<s>",
        base="llama2",
        ends=("<|end|>", "<|assistant|>"),
        swallows=True,
    ),
    _family("mistral_v1|llava_next|alpaca", "</s>", "<s>", base="llama2"),
    _family("zephyr|oumi/llava|axolotl/llava|oumi/default|molmo", "</s>", "<s>", base="llama2"),
    _family("mistral_v2v3", "</s>", "<s>", base="llama2", special=tuple(BRACKETS)),
    _family("[Mm]istral|pixtral|Ministral|Devstral", "</s>", "<s>", special=tuple(BRACKETS)),
    _family("cohere|aya|command|Cohere", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    _family("lfm2|LFM2", IM_END, "<|startoftext|>"),
    _family("smolvlm", "<end_of_utterance>", "<|im_start|>"),
    _family("muse[_-]glimmer", "<|eot|>", START, ends=("<|eom|>",)),
    _family("Nemotron-Nano-v2", "<SPECIAL_12>", "<s>"),
    _family("[Nn]emotron", IM_END, "<s>"),
    _family(
        "exaone", "[|endofturn|]", "[BOS]", special=("[|system|]", "[|user|]", "[|assistant|]")
    ),
    _family("falcon_h1", "<|end_of_text|>", START, ends=(IM_END,)),
    _family("jamba", "<|endoftext|>", "<|startoftext|>", ends=("<|eom|>",)),
    _family("metharme", "</s>", "<s>"),
    _family("Apertus", "<|assistant_end|>", "<s>", ends=("<|tools_suffix|>",)),
    _family("Apriel", "<|end|>", "<s>"),
    _family("Seed", "<seed:eos>", "<seed:bos>"),
    _family("GigaChat", "</s>", "<s>", ends=("<|message_sep|>",)),
    _family("Kimi-K3", "<|end_of_msg|>", "[BOS]"),
    _family("Kimi", "[EOS]", "[BOS]", ends=(IM_END,)),
    _family("MiniMax-M1", "<end_of_sentence>", "<begin_of_document>"),
    _family("MiniMax", "[e~[", "]~!b["),
    _family("Reka", "<sep>"),
    _family("Spark", "<｜end▁of▁sentence｜>", "<｜start▁of▁sentence｜>"),
    _family("StepFun", IM_END, "<｜begin▁of▁sentence｜>"),
    _family("rwkv", "<|endoftext|>", "<s>"),
    _family("granite", "<|end_of_text|>"),
    _family("ling-", "<|role_end|>"),
    _family("Laguna", "〈|EOS|〉", ends=("</assistant>",), special=("<assistant>", "</assistant>")),
    _family("Hy3", HY3[0], HY3[1], special=tuple(HY3)),
    _family("Solar", "<|end|>", ends=("<|calls|>",)),
    _family("MiniCPM|Bielik", IM_END, "<s>"),
    _family("oumi/gpt2", "<|endoftext|>"),
    _family("internvl3", IM_END),
    _family("[Qq]wen|QwQ|MiMo", IM_END, base="qwen3", ends=("<|endoftext|>",)),
    _family("chat_?ml|SmolLM3", IM_END, base="qwen3"),
]
OWN = {
    "qwen3": (IM_END, "<|endoftext|>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "deepseek_v3": ("<｜end▁of▁sentence｜>",),
    "llama3": ("<|end_of_text|>", EOT),
    "llama3_1": ("<|end_of_text|>", EOT),  # <|eom_id|> has a reserved name in this tokenizer
    "llama2": ("</s>",),
}
"""Real tokenizers, unchanged, and the tokens that the generation_config of their model names."""


def family_of(name: str) -> Family:
    """``name``: collection/template."""
    return next(family for family in FAMILIES if re.search(family.pattern, name))


@cache
def real(name: str) -> Any:
    """A real tokenizer as a user loads it."""
    return AutoTokenizer.from_pretrained(artifacts.get(artifacts.TOKENIZERS[name]))


@cache
def _json_of(base: str) -> tuple[str, list[AddedToken]]:
    """The tokenizer.json that stand-ins begin with, and the added tokens of its own."""
    file = artifacts.get(artifacts.TOKENIZERS["qwen3" if base == "bare" else base])
    content = json.loads((file / "tokenizer.json").read_text("utf-8"))
    added = [token for token in content["added_tokens"] if not UNUSED.search(token["content"])]
    model = content["model"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"][:NUM_MERGES]]
    kept = {token["content"] for token in added} | {"".join(pair) for pair in merges}
    kept.update(part for pair in merges for part in pair)
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kept.update(token for token in by_id if len(token) == 1 or BYTE.fullmatch(token))
    model["vocab"] = {token: number for number, token in enumerate(t for t in by_id if t in kept)}
    model["merges"], content["added_tokens"], content["post_processor"] = merges, [], None
    own = [] if base == "bare" else added
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    tokens = [AddedToken(t["content"], **{flag: t[flag] for flag in flags}) for t in own]
    return json.dumps(content, ensure_ascii=False), tokens


def stand_in(name: str, template: str) -> tuple[Any, dict[int, str]]:
    """A tokenizer for the template ``name`` (collection/template), and the ids that generation_config would name."""
    family = family_of(name)
    special = {family.eos, *family.ends, *family.special, *MARKER.findall(template)}
    made = copy.copy(_built(family, frozenset(special), frozenset(TAG.findall(template))))
    made.chat_template = template
    return made, inherited(made, (family.eos, *family.ends))


@lru_cache(maxsize=8)
def _built(family: Family, special: frozenset[str], tags: frozenset[str]) -> Any:
    text, added = _json_of(family.base)
    tokenizer, known = Tokenizer.from_str(text), {token.content for token in added}
    marks = {*special, *([family.bos] if family.bos else []), *([] if added else [END_OF_TEXT])}
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens(
        [
            AddedToken(mark, special=True, normalized=False, rstrip=family.swallows)
            for mark in sorted(marks - known)
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in sorted(tags - known)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token=None if added else END_OF_TEXT,
    )


def inherited(tokenizer: Any, tokens: tuple[str, ...]) -> dict[int, str]:
    """The ids of generation_config with the name of that file, as ``load.stop_ids_in_files`` gives them."""
    return {int(tokenizer.convert_tokens_to_ids(t)): "generation_config.json" for t in tokens}
