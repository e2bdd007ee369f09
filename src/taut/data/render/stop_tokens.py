"""The stop set: every token that ends an answer, derived once from template, tokenizer and generation_config.

In this order, each with its reason:

1. the token that ends a plain assistant turn in the rendered template (``turn_ends.py``; without a template: the
   tokenizer's eos), which is saved as eos;
2. the token that ends a turn with tool calls, where the template writes another one there (gpt-oss's ``<|call|>``);
3. the tokenizer's original eos;
4. ``inherited``: the tokens that the model's generation_config and config name (``models.load.stop_ids_in_files``).

Ids of 3 and 4 are left out, with the reason, where stopping at them would be wrong: no token of the tokenizer, plain
text (config.json naming an id of another vocabulary) or white space, a token that the template writes inside an answer
(a reasoning or call marker), or one that opens the assistant's turn. Leaving them out is safe, since the tokens that
end turns are in the set already; refusing would exclude models whose config is merely careless.

The set is shown to the user, trained as targets, used by every engine and written on save; rows with one of these
tokens before the end of their targets are refused (``render.py``). Reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taut.data.render.chat_template import PROBE, Template, common_length
from taut.data.render.render import Renderer
from taut.data.rows.messages import Message
from taut.data.rows.tool_calls import PROBES, THOUGHT, TOOLS

PLAIN_END = "ends an assistant turn"
TOOL_END = "ends a turn that calls tools"
TEXT_END = "the tokenizer's end of text"
UNNAMED = ", which neither eos nor generation_config.json names yet"


@dataclass(frozen=True)
class StopSet:
    """The tokens that end an answer, each with its reason."""

    reasons: Mapping[int, str]
    """id -> reason. First the token that ends a plain assistant turn, which is saved as eos."""
    turn_ends: tuple[int, ...] = ()
    """Tokens with which the template ends a turn: they are trained as targets."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Ids that tokenizer, config or generation_config name and that must not end an answer -> reason."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.reasons)


def derive_stop_set(renderer: Renderer, inherited: Mapping[int, str] | None = None) -> StopSet:
    """The stop set of a model; ``inherited``: id -> the file that names it.

    Raises RenderError for a template that ends turns with no token at all.
    """
    template, eos = renderer.template, renderer.tokenizer.eos_token_id
    named = {int(index): f"{source} names it" for index, source in (inherited or {}).items()}
    template.name_ends(named)
    ends: dict[int, str] = {}
    inside: set[int] = set()
    """The ids that the template writes inside an answer: a plain one, one with reasoning, a tool call."""
    opening: set[int] = set()
    """The ids with which it opens the assistant's turn."""
    # What ends turns of the template, what it writes inside them, and what opens them.
    if template.template is None:
        ends = dict.fromkeys(renderer.stop_ids, TEXT_END)
    else:
        turn_ends = template.turn_ends
        for index in turn_ends.plain:
            is_known = index in named or index == eos
            ends[index] = PLAIN_END if is_known else f"{PLAIN_END}{UNNAMED}"
        for index in turn_ends.calls:
            ends.setdefault(index, TOOL_END)
        call: Message = {**PROBE[1], "content": "", "tool_calls": [PROBES[0].as_message()]}
        for answer, tools in ((PROBE[1], ()), ({**PROBE[1], **THOUGHT}, ()), (call, TOOLS[:1])):
            probe = template.probe(answer, tools)
            if probe is None:
                continue
            before_end = probe.ids[probe.start : probe.end]
            if not tools or PROBES[0].name in template.decode(before_end):
                inside.update(before_end)
        history = template.apply(PROBE[:1], (), "the probe")
        prompt = template.apply(PROBE[:1], (), "the probe", is_prompt=True)
        ids_of = template.encode([history, prompt])
        opening.update(ids_of[prompt][common_length(ids_of[history], ids_of[prompt]) :])
    # Of what the files name, only what can end an answer.
    candidates: dict[int, str] = {}
    if eos is not None:
        candidates[int(eos)] = TEXT_END
    for index, why in named.items():
        candidates.setdefault(index, why)
    reasons, left_out = dict(ends), dict[int, str]()
    for index, why in candidates.items():
        if index in ends:
            continue
        obstacle = _obstacle(template, index, inside, opening)
        if obstacle is None:
            reasons[index] = why
        else:
            left_out[index] = f"{why}, but {obstacle}"
    return StopSet(reasons, tuple(ends), left_out)


def described(stops: StopSet, template: Template) -> tuple[str, str]:
    """Two lines for the console: the tokens of the set, and their reasons."""
    tokens: dict[int, str] = {}
    for index in (*stops.reasons, *stops.left_out):
        token = _token(template, index)
        is_name = token is not None and _is_special(template, index)
        tokens[index] = token if token is not None and is_name else f"id {index}"
    reasons = [f"{tokens[index]} {why}" for index, why in stops.reasons.items()]
    reasons += [f"left out: {tokens[index]}, {why}" for index, why in stops.left_out.items()]
    return " ".join(tokens[index] for index in stops.reasons), "; ".join(reasons)


def _token(template: Template, index: int) -> str | None:
    """The token's text in the vocabulary; None where the tokenizer has no such token."""
    token = template.tokenizer.convert_ids_to_tokens(index) if index >= 0 else None
    return token if isinstance(token, str) else None


def _is_special(template: Template, index: int) -> bool:
    tokenizer = template.tokenizer
    return index in tokenizer.added_tokens_decoder or index in tokenizer.all_special_ids


def _obstacle(template: Template, index: int, inside: set[int], opening: set[int]) -> str | None:
    """Reason why an answer must not end at this token; None if it may."""
    if _token(template, index) is None:
        return "the tokenizer has no such token"
    if not _is_special(template, index):
        return f"it is text, {template.quoted([index])}"
    if not template.decode([index]).strip():
        return "it is white space"
    if index in inside:
        return "the template writes it inside an answer"
    if index in opening:
        return "the template opens the assistant's turn with it"
    return None
