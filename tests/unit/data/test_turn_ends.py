"""Where a turn ends, what an answer is, and whether all is written, for templates of the shapes met in practice."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import CHATML, tiny_tokenizer
from tokenizers import AddedToken

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.messages import read_conversation
from taut.errors import RenderError

MARKS = [
    *(
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|observation|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    *(
        "<|start|>",
        "<|message|>",
        "<|close|>",
        "<|assistant_end|>",
        "<|tools_suffix|>",
        "<think>",
        "</think>",
    ),
]
BY_ROLE = "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"


def of(body: str, prompt: str, head: str = "") -> str:
    """A template that writes ``body`` for each message m, and ``prompt`` where it is asked to."""
    asked = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    return f"{head}{{% for m in messages %}}{body}{{% endfor %}}{asked}"


CALLS = "{{ m.tool_calls | tojson if m.tool_calls else '' }}"
TEMPLATES = {
    "line breaks are added tokens": of(
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n", "<start_of_turn>assistant\n"
    ),
    "a header always follows": of("<|start|>{{ m.role }}<|message|>\n\n{{ m.content }}<|end|>", "")
    + "{{ '<|start|>assistant<|message|>\n\n' }}",
    "the content is closed before the turn": of(
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|close|><|end|>", ""
    )
    + "<|start|>assistant<|message|>",
    "eos after the end": of("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n")
    + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
    "the end changes in history": of(
        "<|start|>{{ m.role }}<|message|>{{ m.content }}"
        + CALLS
        + "{{ '<|call|>' if m.tool_calls else "
        "('<|return|>' if loop.last and m.role == 'assistant' else '<|end|>') }}",
        "<|start|>assistant",
    ),
    "the next header": of(BY_ROLE + "\n{{ m.content }}" + CALLS, "<|assistant|>\n"),
    "a late end": of(
        "{{ '<|assistant_end|>' if m.role == 'user' and not loop.first else '' }}<|{{ m.role }}|>{{ m.content }}",
        "<|assistant|>",
    ),
    "an end of calls": of(
        "{{ '<|assistant_end|>' if m.role == 'user' and not loop.first else '' }}"
        "<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
        + CALLS
        + "<|tools_suffix|>{% endif %}",
        "<|assistant|>",
    ),
}
ENDS = {
    "line breaks are added tokens": "<end_of_turn>",
    "a header always follows": "<|end|>",
    "the content is closed before the turn": "<|end|>",
    "eos after the end": "<|end|> <|endoftext|>",
    "the end changes in history": "<|return|> <|call|>",
    "the next header": "<|user|> <|observation|>",
    "a late end": "<|assistant_end|>",
    "an end of calls": "<|assistant_end|> <|tools_suffix|>",
}
INSIDE = ("<|close|>", "<|message|>")
EOS = {"eos after the end": "<|endoftext|>"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
USER = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris.\nIt is Paris."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "warm"}
NOTHING: list[Any] = []


def renderer(template: str, eos: str = "<|im_end|>", named: tuple[str, ...] = ()) -> Renderer:
    """With a tokenizer that has "\\n" among its added tokens, and the stop set of ``named`` ids."""
    tokenizer = tiny_tokenizer("chatml", eos=eos)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("\n", "\n\n")]
    )
    made = Renderer(tokenizer, template)
    ids = {tokenizer.convert_tokens_to_ids(name): "generation_config.json" for name in named}
    return made.stopping_at(derive_stop_set(made, ids).ids)


def stops_of(made: Renderer) -> str:
    ids = derive_stop_set(made).turn_ends
    return " ".join(made.tokenizer.convert_ids_to_tokens(list(ids)))


def learned(made: Renderer, *messages: dict[str, Any], tools: list[Any] = NOTHING) -> list[str]:
    """The targets of each sample, as text."""
    samples = made.render(read_conversation(list(messages), "f:1", tools))
    return [made.tokenizer.decode(sample.ids_T[sample.target_at_N]) for sample in samples]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_is_what_closes_the_turn(name: str) -> None:
    made = renderer(TEMPLATES[name], EOS.get(name, "<|im_end|>"), tuple(ENDS[name].split()))
    ends = ENDS[name].split()
    wanted = [end for end in ends if end != EOS.get(name)]
    assert stops_of(made).split()[: len(wanted)] == wanted
    (first,) = learned(made, USER, ANSWER)
    assert first.removeprefix("<|message|>").startswith(ANSWER["content"])
    assert first.endswith(ends[0])
    assert sum(first.count(mark) for mark in MARKS if mark not in INSIDE) + first.count("<end") == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_of_a_conversation_ends(name: str) -> None:
    made = renderer(TEMPLATES[name], EOS.get(name, "<|im_end|>"), tuple(ENDS[name].split()))
    text = "".join(learned(made, USER, ANSWER, USER, ANSWER))
    assert text.count(ENDS[name].split()[0]) == 2
    assert text.count("It is Paris.") == 2


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("the end changes in history", "<|call|>"),
        ("the next header", "<|observation|>"),
        ("an end of calls", "<|tools_suffix|>"),
    ],
)
def test_a_call_ends_with_its_own_token(name: str, end: str) -> None:
    made = renderer(TEMPLATES[name], named=tuple(ENDS[name].split()))
    assert learned(made, USER, CALLING)[0].endswith(end)
    texts = learned(made, USER, CALLING, RESULT, ANSWER)
    whole = "".join(texts)
    assert whole.index(end) < whole.index("It is Paris.") < whole.index(ENDS[name].split()[0])


def test_what_no_file_names_is_said() -> None:
    made = renderer(TEMPLATES["eos after the end"], "<|endoftext|>")
    reasons = list(derive_stop_set(made).reasons.values())
    assert "neither eos nor generation_config.json names" in reasons[0]
    named = {made.tokenizer.convert_tokens_to_ids("<|end|>"): "generation_config.json"}
    assert "names" not in next(iter(derive_stop_set(made, named).reasons.values()))


def test_white_space_that_files_name_is_left_out() -> None:
    made = renderer(TEMPLATES["line breaks are added tokens"])
    (line_break,) = made.template.ids_of_part("\n")
    stops = derive_stop_set(made, {line_break: "generation_config.json"})
    assert line_break not in stops.ids and "white space" in stops.left_out[line_break]


# -- prompts that do not begin their row

OPENING = of(
    "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n",
    "<|im_start|>assistant\n<think>\n",
)
"""The prompt opens a thought, and no thought is ever written (R1-Distill, QwQ)."""
SWITCHED = of(
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}",
)
SYSTEM_LAST = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ system + ' ' if loop.last and system else '' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
THOUGHT = {"role": "assistant", "content": "Paris.", "reasoning_content": "I know it."}
SYSTEM = {"role": "system", "content": "Answer as a pirate."}


def whole(made: Renderer, *messages: dict[str, Any]) -> list[str]:
    samples = made.render(read_conversation(list(messages), "f:1"))
    return [made.tokenizer.decode(sample.ids_T) for sample in samples]


def test_a_thought_that_the_template_takes_out_follows_the_prompt_that_opens_one() -> None:
    made = renderer(OPENING)
    expected = "I know it.\n</think>\n\nParis.<|im_end|>"
    in_content = {"role": "assistant", "content": "<think>\nI know it.\n</think>\n\nParis."}
    for turn in (THOUGHT, in_content):
        assert learned(made, USER, turn) == [expected]
    first, second = whole(made, USER, THOUGHT, USER, THOUGHT)
    assert "<think>\nI know it." in first and second.count("I know it.") == 1
    assert learned(made, USER, ANSWER) == ["</think>\n\nParis.\nIt is Paris.<|im_end|>"]


def test_the_prompt_of_a_turn_is_the_one_for_its_kind() -> None:
    made = renderer(SWITCHED)
    assert learned(made, USER, THOUGHT, USER, ANSWER) == [
        "I know it.\n</think>\n\nParis.<|im_end|>",
        "Paris.\nIt is Paris.<|im_end|>",
    ]
    second = whole(made, USER, THOUGHT, USER, ANSWER)[1]
    assert "<think>\n\n</think>\n\nParis.\nIt is Paris." in second
    with pytest.raises(
        RenderError, match=r"data.chat_template_kwargs = \{ enable_thinking = false \}"
    ):
        learned(made, USER, ANSWER)
    off = Renderer(made.tokenizer, SWITCHED, variables={"enable_thinking": False})
    assert learned(off, USER, ANSWER) == ["Paris.\nIt is Paris.<|im_end|>"]


def test_a_thought_after_a_prompt_that_closes_one_is_refused_with_what_opens_it() -> None:
    effort = "{% set thinks = effort is defined and effort == 'high' %}"
    made = renderer(
        effort
        + of(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think:own>{{ m.reasoning_content or '' }}"
            "</think:own>{% endif %}{{ m.content }}<|im_end|>\n",
            "<|im_start|>assistant\n<think:own>{% if not thinks %}</think:own>{% endif %}",
        )
    )
    with pytest.raises(
        RenderError,
        match=r"messages\[1\]: the prompt closes a thought .*data\.chat_template_kwargs",
    ):
        learned(made, USER, THOUGHT)
    assert learned(made, USER, ANSWER) == ["Paris.\nIt is Paris.<|im_end|>"]
    high = Renderer(made.tokenizer, made.template.template, variables={"effort": "high"})
    assert learned(high, USER, THOUGHT) == ["I know it.</think:own>Paris.<|im_end|>"]


def test_a_prompt_with_another_header_is_refused() -> None:
    for body, prompt in (
        ("<|start|>{{ m.role }}\n", "<|start|>model\n"),
        ("<|{{ m.role }}|>", "<|start|>"),
        ("<|start|>{{ m.role }} \n", "<|start|>assistant\n"),
    ):
        made = renderer(of(body + "{{ m.content }}<|end|>", prompt))
        with pytest.raises(RenderError, match="not a token prefix"):
            learned(made, USER, ANSWER)


def test_words_that_stand_in_the_prompt_alone_are_learned_after() -> None:
    made = renderer(SYSTEM_LAST, "</s>")
    texts = whole(made, SYSTEM, USER, ANSWER, USER, ANSWER)
    assert len(texts) == 2 and all("Answer as a pirate." in text for text in texts)
    assert learned(made, SYSTEM, USER, ANSWER)[0].strip() == "Paris.\nIt is Paris.</s>"


def test_an_answer_that_begins_with_white_space_follows_the_prompt_as_it_is() -> None:
    made = renderer(CHATML)
    said = {"role": "assistant", "content": "\nParis."}
    (sample,) = made.render(read_conversation([USER, said], "f:1"))
    prompt = made.prompt_ids([USER])
    assert sample.ids_T[: prompt.size].tolist() == prompt.tolist()
    assert made.tokenizer.decode(sample.ids_T[prompt.size :]) == "\nParis.<|im_end|>\n"


# -- is everything written?

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": {}},
}
LISTED = "{{ tools | tojson if tools else '' }}"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "place"),
    [
        (CHATML, (USER, THOUGHT), (), "reasoning_content has 'I know it.'"),
        (
            CHATML,
            ({**USER, "content": "I know it. Do you?"}, THOUGHT),
            (),
            "reasoning_content has 'I know it.'",
        ),
        (LISTED + CHATML, (USER, CALLING), (TOOL,), r"messages\[1\].tool_calls has 'weather'"),
        (CHATML, (USER, ANSWER), (TOOL,), "tools has 'weather'"),
        (
            LISTED.replace("tools | tojson", "tools[0].function.name") + CHATML,
            (USER, ANSWER),
            (TOOL,),
            "tools has 'Of a city'",
        ),
        (
            CHATML.replace("message['content']", "(message['content'] if loop.first else 'ok')"),
            (SYSTEM, USER, ANSWER),
            (),
            r"messages\[1\] \(user\) has",
        ),
    ],
)
def test_what_the_template_leaves_out_is_refused_in_every_row(
    template: str, messages: tuple[Any, ...], tools: tuple[Any, ...], place: str
) -> None:
    tokenizer = tiny_tokenizer("chatml")
    made = Renderer(tokenizer, template)
    for _ in range(2):  # the second row of a shape takes the answer of the first
        with pytest.raises(RenderError, match=place):
            made.render(read_conversation(list(messages), "f:1", list(tools)))
    assert learned(Renderer(tokenizer, CHATML), USER, ANSWER)
