"""Targets, spans and refusals of the renderer."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import CHATML, MISTRAL, TEMPLATES, tiny_tokenizer

from taut.data.render.render import Renderer
from taut.data.rows.messages import Completion, Document, read_conversation
from taut.data.settings import Targets
from taut.errors import RenderError
from taut.types import Sample

HISTORY = [
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "2 plus 3 is 5."},
    {"role": "user", "content": "Thank you!"},
    {"role": "assistant", "content": "You are welcome."},
]


def pieces(tokenizer: Any, sample: Sample) -> list[str]:
    """The text of each run of neighboring targets."""
    runs: list[list[int]] = []
    last = -2
    for at in sample.target_at_N.tolist():
        if at != last + 1:
            runs.append([])
        runs[-1].append(int(sample.ids_T[at]))
        last = at
    return [tokenizer.decode(run) for run in runs]


def render(
    messages: list[Any],
    template: str = "chatml",
    targets: Targets = "assistant",
    text: str | None = None,
    **options: Any,
) -> tuple[list[str], list[Sample]]:
    tokenizer = tiny_tokenizer(template)
    samples = Renderer(tokenizer, text, targets).render(
        read_conversation(messages, "f:1", **options)
    )
    return [piece for sample in samples for piece in pieces(tokenizer, sample)], samples


ENDS = {
    "chatml": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_targets_end_with_the_end_token_and_nothing_after(name: str) -> None:
    learned, samples = render(HISTORY, name)
    end = ENDS[name]
    space = " " if name == "mistral" else ""
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else space
    assert learned == [f"{think}2 plus 3 is 5.{end}", f"{think}You are welcome.{end}"]
    assert all((sample.weight_N == 1.0).all() for sample in samples)
    assert Renderer(tiny_tokenizer(name)).stop_ids == (
        tiny_tokenizer(name).convert_tokens_to_ids(end),
    )


def test_a_template_that_keeps_history_gives_one_sample() -> None:
    assert [sample.id for sample in render(HISTORY)[1]] == ["f:1"]


def test_thinking_stripped_from_history_gives_one_sample_per_turn() -> None:
    thoughtful = [dict(message) for message in HISTORY]
    thoughtful[1]["reasoning_content"] = "add them"
    thoughtful[3]["content"] = "<think>\npolite\n</think>\n\nYou are welcome."
    learned, samples = render(thoughtful, "qwen3")
    assert [sample.id for sample in samples] == ["f:1#1", "f:1#2"]
    assert learned == [
        "<think>\nadd them\n</think>\n\n2 plus 3 is 5.<|im_end|>",
        "<think>\npolite\n</think>\n\nYou are welcome.<|im_end|>",
    ]
    assert "add them" not in tiny_tokenizer("qwen3").decode(samples[1].ids_T)


def test_last_and_all() -> None:
    assert render(HISTORY, targets="last")[0] == ["You are welcome.<|im_end|>"]
    sample = render(HISTORY, targets="all")[1][0]
    assert sample.target_at_N.tolist() == list(range(1, sample.num_tokens))


def test_train_false() -> None:
    marked = [dict(message) for message in HISTORY]
    marked[1]["train"] = False
    assert render(marked)[0] == ["You are welcome.<|im_end|>"]
    learned, samples = render(marked, targets="all")
    assert samples[0].num_targets < samples[0].num_tokens - 1
    assert not any("2 plus 3 is 5." in piece for piece in learned)
    marked[3]["train"] = False
    assert render(marked)[1][0].num_targets == 0
    assert render(marked, targets="last")[1][0].num_targets == 0


def test_a_completion_in_messages_learns_only_the_completion() -> None:
    assert render(HISTORY, first_learned=3)[0] == ["You are welcome.<|im_end|>"]


def test_completion_as_text() -> None:
    tokenizer = tiny_tokenizer("llama3", adds_bos=True)
    (sample,) = Renderer(tokenizer).render(Completion("f:1", "What is 2 plus 3?", " It is 5."))
    assert sample.ids_T[0] == tokenizer.bos_token_id
    assert pieces(tokenizer, sample) == [" It is 5.<|eot_id|>"]
    assert tokenizer.decode(sample.ids_T[1:]) == "What is 2 plus 3? It is 5.<|eot_id|>"


def test_a_merge_across_the_boundary_is_refused_and_shown() -> None:
    renderer = Renderer(tiny_tokenizer())
    with pytest.raises(
        RenderError, match=r"token 4 is ' the' in the prompt and ' there' in the row"
    ):
        renderer.render(Completion("f:1", "The cat sat on the", "re"))


def test_documents_learn_all_but_the_first_token() -> None:
    tokenizer = tiny_tokenizer(None)
    (sample,) = Renderer(tokenizer).render(Document("f:1", "Once upon a time"))
    assert sample.ids_T[-1] == tokenizer.eos_token_id
    assert sample.target_at_N.tolist() == list(range(1, sample.num_tokens))


def test_no_eos_no_document() -> None:
    tokenizer = tiny_tokenizer(None)
    tokenizer.eos_token = None
    for row in (Document("f:1", "Once"), Completion("f:1", "Once", " upon")):
        with pytest.raises(RenderError, match="eos"):
            Renderer(tokenizer).render(row)


NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
FORCED_THINKING = CHATML.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n'")


def test_a_template_without_end_token_is_refused() -> None:
    for template in (NO_END, NO_END.replace("'\n'", "'<|im_eot|>\n'")):
        with pytest.raises(RenderError, match=r"never learn to stop.*data.template=FILE"):
            _ = Renderer(tiny_tokenizer(), template).stop_ids
        with pytest.raises(RenderError):
            render(HISTORY, text=template)


def test_a_tool_call_marker_is_not_an_end_token() -> None:
    unended = CHATML.replace(
        "+ '<|im_end|>\\n'", "+ ('' if '<tool_call>' in message['content'] else '<|im_end|>\\n')"
    )
    messages = [*HISTORY[:3], {"role": "assistant", "content": "<tool_call>x</tool_call>"}]
    with pytest.raises(
        RenderError, match=r"messages\[3\]: the chat template writes no token that ends this turn"
    ):
        render(messages, text=unended)


def test_a_generation_prompt_that_is_no_prefix_is_refused() -> None:
    with pytest.raises(
        RenderError, match=r"^f:1: messages\[1\]: .* is '<think>' in the prompt and '2' in"
    ):
        render(HISTORY, text=FORCED_THINKING)
    tokenizer = tiny_tokenizer()
    assert Renderer(tokenizer, FORCED_THINKING).stop_ids == Renderer(tokenizer).stop_ids


def test_an_end_token_inside_a_turn_is_refused() -> None:
    stopping = [HISTORY[0], {"role": "assistant", "content": "2 plus<|im_end|> 3 is 5."}]
    with pytest.raises(RenderError, match=r"^f:1: messages\[1\]: '<\|im_end\|>' ends an answer"):
        render(stopping)


def test_two_bos_are_refused() -> None:
    with pytest.raises(RenderError, match="two BOS"):
        render(HISTORY, "mistral", text=MISTRAL.replace("{{ bos_token }}", "{{ bos_token }}<s>"))


def test_what_the_template_passes_over_is_refused() -> None:
    call = {"function": {"name": "weather", "arguments": {}}}
    calling = [HISTORY[0], {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(RenderError, match="tool_calls has 'weather'"):
        render(calling)
    with pytest.raises(RenderError, match="tools has 'weather'"):
        render(HISTORY, tools=[call["function"]])
    thinking = [HISTORY[0], {**HISTORY[1], "reasoning_content": "hm"}]
    with pytest.raises(RenderError, match="reasoning_content has 'hm'"):
        render(thinking)


def test_what_the_template_refuses_names_the_row() -> None:
    with pytest.raises(RenderError, match=r"^f:1: the chat template .*System role not supported"):
        render([{"role": "system", "content": "Be brief."}, *HISTORY], "gemma")
    with pytest.raises(RenderError, match=r"the row is one assistant message"):
        render(HISTORY[1:2])


def test_an_assistant_s_opening_is_context() -> None:
    row = read_conversation(HISTORY[1:], "f:1")
    assert (row.learned, row.excluded, row.notes) == ((2,), (), ("opening",))
    for targets in ("assistant", "last"):
        (sample,) = render(HISTORY[1:], targets=targets)[1]
        text = tiny_tokenizer("chatml").decode(sample.ids_T[sample.target_at_N])
        assert text.startswith("You are welcome.") and "5" not in text
    (whole,) = render(HISTORY[1:], targets="all")[1]
    assert whole.num_targets == whole.num_tokens - 1


def test_no_template() -> None:
    renderer = Renderer(tiny_tokenizer(None))
    with pytest.raises(RenderError, match=r"no chat template.*data.template=FILE"):
        renderer.render(read_conversation(HISTORY, "f:1"))
    assert renderer.stop_ids == (tiny_tokenizer(None).eos_token_id,)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RenderError, match="surrogate"):
        render([{"role": "user", "content": "a\ud800"}, HISTORY[1]])


def test_identity_follows_tokenizer_template_and_targets() -> None:
    tokenizer = tiny_tokenizer()
    renderer = Renderer(tokenizer)
    identity = renderer.identity()
    renderer.render(read_conversation(HISTORY, "f:1"))
    tokenizer(["a", "b c d"], padding=True)
    grown = tiny_tokenizer()
    grown.add_tokens(["<new>"])
    others = {
        Renderer(tiny_tokenizer(), None, "last").identity(),
        Renderer(tiny_tokenizer(), CHATML + " ").identity(),
        Renderer(tiny_tokenizer(eos="<|endoftext|>")).identity(),
        Renderer(grown).identity(),
    }
    assert renderer.identity() == identity == Renderer(tiny_tokenizer()).identity()
    assert len(others) == 4
    assert identity not in others


@pytest.mark.parametrize("day", [datetime.date(2026, 1, 5), datetime.date(2024, 12, 31)])
def test_a_template_is_told_the_day_it_is_given(day: datetime.date) -> None:
    tokenizer = tiny_tokenizer()
    formats = ["%d %b %Y", "%A %-d %B", "%Y-%m-%d", "100%%", "week %U"]
    asked = "|".join("{{ strftime_now('" + text + "') }}" for text in formats)
    renderer = Renderer(tokenizer, asked + "\n" + str(tokenizer.chat_template))
    today = renderer.identity()
    renderer.template.day = day
    text = renderer.template.apply([{"role": "user", "content": "hi"}], (), "row").text
    assert text.split("\n")[0] == "|".join(day.strftime(text) for text in formats)
    assert renderer.identity() != today
    plain = Renderer(tokenizer)
    before = plain.identity()
    plain.template.day = day
    assert plain.identity() == before, "a template that does not ask is not changed by the day"
