"""Faults of chat templates and tokenizers, as they are met in models that people share and in templates they write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.checks.planting import Place, fault
from tests.helpers.chat_runs import chats
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import CHATML, QWEN3, QWEN25, tiny_tokenizer

from taut.checks.session import Session

Rows = Sequence[Mapping[str, Any]]
WORDS = (
    "the cat",
    "a big red house",
    "some birds",
    "the blue sky",
    "the dog ran",
    "two plus three",
)
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}}}
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def rows_of(*kinds: str, number: int = 8, **fields: Any) -> list[dict[str, Any]]:
    """Chats of these roles, with other words each; ``fields`` go to the assistant's messages."""
    found = []
    for row in range(number):
        messages = []
        for at, role in enumerate(kinds):
            words = (
                f"{WORDS[(row + at) % len(WORDS)]} and {WORDS[(row + 2 * at) % len(WORDS)]} {row}"
            )
            more = fields if role == "assistant" else {}
            messages.append({"role": role, "content": words, **more})
        found.append({"messages": messages})
    return found


PLAIN = rows_of("user", "assistant")
LONGER = rows_of("user", "assistant", "user", "assistant")
THOUGHT = rows_of("user", "assistant", reasoning_content="the question is about birds")


def templated(place: Place, text: str, rows: Rows | None = None, **keys: Any) -> Session:
    """A session whose template is a file."""
    path = place.directory / "template.jinja"
    path.write_text(text, encoding="utf-8")
    return place.session(
        data=place.data(PLAIN if rows is None else rows), data__template=str(path), **keys
    )


def tokenized(place: Place, name: str | None, rows: Rows, **keys: Any) -> Session:
    """A session with the tokenizer and template of that name."""
    eos = None if name else "<|endoftext|>"
    model = save_tiny("llama", place.directory / "llama", tiny_tokenizer(name, eos=eos))
    return place.session(model, place.data(rows), **keys)


def normalized(place: Place, normalizer: Mapping[str, Any] | None, rows: Rows = PLAIN) -> Session:
    """A session with another normalizer in tokenizer.json."""
    model = save_tiny("llama", place.directory / "llama", tiny_tokenizer())
    path = model / "tokenizer.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**saved, "normalizer": normalizer}), encoding="utf-8")
    return place.session(model, place.data(rows))


# -- template.takes


@fault("template.takes", says="no chat template")
def a_base_model_without_a_template(place: Place, is_faulty: bool) -> Session:
    """Chats for a base model whose tokenizer has no chat template."""
    return tokenized(place, None if is_faulty else "chatml", PLAIN)


@fault("template.takes", says="System role not supported")
def system_messages_for_gemma(place: Place, is_faulty: bool) -> Session:
    """Every row has a system message, which Gemma's template refuses."""
    return tokenized(place, "gemma", chats(8) if is_faulty else PLAIN)


@fault("template.takes", says="must alternate")
def two_user_messages_running(place: Place, is_faulty: bool) -> Session:
    """Mistral's template wants user and assistant in turn."""
    kinds = ("user", "user", "assistant") if is_faulty else ("user", "assistant")
    return tokenized(place, "mistral", rows_of(*kinds))


@fault("template.takes", says="data.template")
def a_slip_in_the_template(place: Place, is_faulty: bool) -> Session:
    """A misspelled key, which jinja gives no value."""
    return templated(place, CHATML.replace("['content']", "['contents']") if is_faulty else CHATML)


# -- template.plain


def plainly(rows: Rows) -> list[dict[str, Any]]:
    """The same questions and answers as plain text."""
    texts = [[message["content"] for message in row["messages"]] for row in rows]
    return [{"prompt": f"{prompt}?", "completion": f" {text}"} for prompt, text in texts]


@fault("template.plain", says="data.apply_chat_template=true", outcome="warning")
def plain_text_for_a_model_that_chats(place: Place, is_faulty: bool) -> Session:
    """Prompts and completions as text, which are used without the template of the chat model."""
    keys = {} if is_faulty else {"data__apply_chat_template": True}
    return place.session(data=place.data(plainly(PLAIN)), **keys)


@fault("template.plain", says="4 completions, 4 conversations")
def plain_text_among_conversations(place: Place, is_faulty: bool) -> Session:
    """Half of the rows are messages and go through the template, half are plain text and do not."""
    keys = {} if is_faulty else {"data__apply_chat_template": False}
    return place.session(data=place.data([*PLAIN[:4], *plainly(PLAIN[4:])]), **keys)


@fault("template.plain", says="data.eval: 4 conversations", outcome="warning")
def plain_text_to_train_on_and_conversations_to_measure(place: Place, is_faulty: bool) -> Session:
    """What is held out goes through the template, what is trained on does not."""
    held_out = place.data(LONGER[:4], "eval.jsonl")
    rows = plainly(PLAIN) if is_faulty else PLAIN
    keys = {} if is_faulty else {"data__apply_chat_template": True}
    return place.session(data=place.data(rows), data__eval=str(held_out), **keys)


# -- template.lossless


@fault("template.lossless", says="becomes")
def a_tokenizer_that_lowers_the_case(place: Place, is_faulty: bool) -> Session:
    """An uncased vocabulary: what is in capitals cannot be said."""
    rows = rows_of("user", "assistant")
    for row in rows:
        for message in row["messages"]:
            message["content"] = message["content"].title()
    return normalized(place, {"type": "Lowercase"} if is_faulty else None, rows)


@fault("template.lossless", says="becomes")
def a_tokenizer_that_has_no_line_breaks(place: Place, is_faulty: bool) -> Session:
    """As T5's: a line break is a space, and code or lists cannot be learned."""
    replace = {"type": "Replace", "pattern": {"String": "\n"}, "content": " "}
    return normalized(place, replace if is_faulty else None)


# -- template.markup


@fault("template.markup", says="rendered already")
def rows_that_were_rendered_before(place: Place, is_faulty: bool) -> Session:
    """The user's message is a whole ChatML prompt, and the template is put around it once more."""
    rows = rows_of("user", "assistant")
    for row in rows:
        words = row["messages"][0]["content"]
        if is_faulty:
            row["messages"][0]["content"] = (
                f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
            )
    return place.session(data=place.data(rows))


@fault("template.markup", says="data.control_tokens=as_text", outcome="warning")
def a_control_token_in_a_question(place: Place, is_faulty: bool) -> Session:
    """One user asks what <|im_end|> means, which ends the question there."""
    rows = rows_of("user", "assistant")
    rows[5]["messages"][0]["content"] += " and <|im_end|>" if is_faulty else " and <|im_end"
    return place.session(data=place.data(rows))


@fault("template.markup", says="read it as a control token", outcome="warning")
def a_control_token_that_is_trained_as_text(place: Place, is_faulty: bool) -> Session:
    """The model is trained on the text, and a server reads the token."""
    rows = rows_of("user", "assistant")
    rows[5]["messages"][1]["content"] += " and <|im_end|>" if is_faulty else " and <|im_end"
    return place.session(data=place.data(rows), data__control_tokens="as_text")


# -- template.tokenizer


@fault("template.tokenizer", says="TokenizersBackend", outcome="warning")
def a_class_that_splits_otherwise(place: Place, is_faulty: bool) -> Session:
    """The class that tokenizer_config.json names makes its own pre-tokenizer, which is not that of tokenizer.json."""
    model = save_tiny("llama", place.directory / "llama", tiny_tokenizer())
    path, settings = model / "tokenizer.json", model / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    letters = {
        "type": "Split",
        "pattern": {"Regex": r"\p{L}"},
        "behavior": "Isolated",
        "invert": False,
    }
    saved["pre_tokenizer"]["pretokenizers"][0] = letters
    path.write_text(json.dumps(saved), encoding="utf-8")
    named = json.loads(settings.read_text(encoding="utf-8"))
    named["tokenizer_class"] = "Qwen2Tokenizer" if is_faulty else "TokenizersBackend"
    settings.write_text(json.dumps(named), encoding="utf-8")
    return place.session(model, place.data(PLAIN))


# -- template.system


@fault("template.system", says="leaves out the system message")
def a_template_without_system_messages(place: Place, is_faulty: bool) -> Session:
    """A hand-written template that knows two roles."""
    ignoring = CHATML.replace(
        "%}{{ '<|im_start|>'", "%}{% if message['role'] != 'system' %}{{ '<|im_start|>'", 1
    )
    ignoring = ignoring.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    return templated(place, ignoring if is_faulty else CHATML, chats(12))


@fault("template.system", says="You are a helpful assistant")
def a_default_in_place_of_the_system_message(place: Place, is_faulty: bool) -> Session:
    """The model's own system prompt stands where the rows have theirs."""
    fixed = (
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
        + CHATML.replace(
            "for message in messages", "for message in messages if message['role'] != 'system'"
        )
    )
    return templated(place, fixed if is_faulty else QWEN25, chats(12))


@fault("template.system", says="leaves out the system message")
def a_system_message_at_inference_only(place: Place, is_faulty: bool) -> Session:
    """As in Mistral's template of 2024: it is written where the conversation ends with the user, which no row does."""
    last = (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
        "{% set messages = messages[1:] %}{% endif %}"
    ) + CHATML.replace(
        "message['content'] +",
        "(system + '\\n\\n' if loop.last and system is defined else '') + message['content'] +",
    ).replace("loop.last", "loop.last and message['role'] == 'user'")
    return templated(place, last if is_faulty else CHATML, chats(12))


# -- template.content


def _changed(place: Place, is_faulty: bool, change: str, rows: Rows = PLAIN) -> Session:
    text = (
        CHATML.replace("message['content']", f"message['content']{change}") if is_faulty else CHATML
    )
    return templated(place, text, rows)


@fault("template.content", says="changes words")
def a_template_in_capitals(place: Place, is_faulty: bool) -> Session:
    """A filter left over from another data set."""
    return _changed(place, is_faulty, " | upper")


@fault("template.content", says="changes words")
def a_template_that_cuts_messages(place: Place, is_faulty: bool) -> Session:
    """Messages are cut to a number of characters."""
    return _changed(place, is_faulty, "[:16]")


@fault("template.content", says="changes words")
def a_template_that_escapes_html(place: Place, is_faulty: bool) -> Session:
    """Quotes and angle brackets become entities."""
    rows = rows_of("user", "assistant")
    for row in rows:
        row["messages"][1]["content"] += " is <b>2 > 1</b>"
    return _changed(place, is_faulty, ".replace('<', '&lt;')", rows)


@fault("template.content", says="(tool)")
def a_template_that_skips_what_tools_say(place: Place, is_faulty: bool) -> Session:
    """The answer rests on a tool's result that the model never sees."""
    skipping = CHATML.replace(
        "for message in messages", "for message in messages if message['role'] != 'tool'"
    )
    return templated(
        place, skipping if is_faulty else CHATML, rows_of("user", "assistant", "tool", "assistant")
    )


@fault("template.content", says="assistant with calls")
def words_beside_a_call_are_dropped(place: Place, is_faulty: bool) -> Session:
    """As in Llama 3.1's template: a turn with calls has calls only."""
    dropping = QWEN25.replace("{%- if content %}{{- content }}{%- endif %}", "")
    rows = rows_of("user", "assistant", tool_calls=[CALL])
    return templated(place, dropping if is_faulty else QWEN25, rows)


# -- template.thinking


@fault("template.thinking", says="leaves out the reasoning")
def reasoning_is_cut_from_the_answer_being_trained(place: Place, is_faulty: bool) -> Session:
    """As in the templates of the R1 distillations: what is before </think> goes, from every answer."""
    cutting = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    rows = rows_of("user", "assistant")
    for row in rows:
        message = row["messages"][1]
        message["content"] = f"<think>\nwhat about birds?\n</think>\n\n{message['content']}"
    return templated(place, cutting if is_faulty else CHATML, rows)


@fault("template.thinking", says="leaves out the reasoning")
def a_field_of_reasoning_that_is_passed_over(place: Place, is_faulty: bool) -> Session:
    """A template without thinking for rows with reasoning_content."""
    return templated(place, CHATML if is_faulty else QWEN3, THOUGHT)


OPENING = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
CLOSING = QWEN3.replace(
    "assistant\\n' }}{%- endif", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif"
)
assert OPENING != CHATML and CLOSING != QWEN3
INLINE = rows_of("user", "assistant")
for _row in INLINE:
    _row["messages"][1]["content"] = (
        f"<think>\nbirds?\n</think>\n\n{_row['messages'][1]['content']}"
    )


@fault("template.thinking", says="opens a thought")
def a_thinking_prompt_for_plain_answers(place: Place, is_faulty: bool) -> Session:
    """The generation prompt of a reasoning model, and rows without reasoning."""
    return templated(place, OPENING, PLAIN if is_faulty else INLINE)


@fault("template.thinking", says="opens a thought")
def a_thinking_prompt_with_brackets_for_plain_answers(place: Place, is_faulty: bool) -> Session:
    """The same with Mistral's tags."""
    opening = OPENING.replace("<think>", "[THINK]")
    return templated(place, opening if is_faulty else CHATML, PLAIN)


@fault("template.thinking", says="closes a thought")
def a_prompt_without_thinking_for_thoughtful_answers(place: Place, is_faulty: bool) -> Session:
    """The generation prompt of a hybrid model with thinking switched off, and rows with reasoning."""
    return templated(place, CLOSING, THOUGHT if is_faulty else PLAIN)


# -- template.tools

OFFERED = [{**row, "tools": [TOOL]} for row in rows_of("user", "assistant", tool_calls=[CALL])]


@fault("template.tools", says="leaves out tools")
def tools_on_offer_are_not_written(place: Place, is_faulty: bool) -> Session:
    """The model is to call functions that it never reads of."""
    without = QWEN25.replace("{%- if tools %}", "{%- if tools and false %}")
    rows = [
        {"messages": row["messages"][:1] + PLAIN[0]["messages"][1:], "tools": [TOOL]}
        for row in OFFERED
    ]
    return templated(place, without if is_faulty else QWEN25, rows, data__max_length=256)


@fault("template.tools", says="as Python")
def arguments_in_python(place: Place, is_faulty: bool) -> Session:
    """Single quotes: no parser of JSON reads the calls that the model learns to write."""
    python = QWEN25.replace("tool_call.arguments | tojson", "tool_call.arguments | string")
    return templated(place, python if is_faulty else QWEN25, OFFERED, data__max_length=256)


@fault("template.tools", says="leaves out arguments")
def calls_without_arguments(place: Place, is_faulty: bool) -> Session:
    """The name of the function is all that is written."""
    bare = QWEN25.replace("{{- tool_call.arguments | tojson }}", "{{- '{}' }}")
    return templated(place, bare if is_faulty else QWEN25, OFFERED, data__max_length=256)


@fault("template.lossless", says="asked twice", part="quick")
def a_tokenizer_that_draws_its_merges(place: Place, is_faulty: bool) -> Session:
    """It was saved with the dropout of its own training."""
    session = place.session()
    if is_faulty:
        model: Any = session.tokenizer.backend_tokenizer.model
        model.dropout = 0.3
    return session
