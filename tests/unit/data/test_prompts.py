"""Rows of prompts: what is continued, what it is held to, and one line for what is neither."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from tests.helpers.chat_runs import write_rows
from tests.helpers.tiny_tokenizers import CHATML, TEMPLATES, tiny_tokenizer

from taut.data.render.render import Renderer
from taut.data.rows.prompts import LAST_MESSAGE, PromptRow, load_prompts
from taut.data.rows.schema import Columns
from taut.data.settings import Kind
from taut.errors import ConfigError, DataError, RenderError
from taut.evals.answers import to_reward_input
from taut.rewards.format import Tags

USER = {"role": "user", "content": "the cat"}
ANSWER = {"role": "assistant", "content": "ran"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer())


def load(
    tmp_path: Path, renderer: Renderer, *rows: Mapping[str, Any], **keys: Any
) -> list[PromptRow]:
    return load_prompts(str(write_rows(tmp_path / "p.jsonl", rows)), renderer, **keys)


def text(renderer: Renderer, row: PromptRow) -> str:
    return renderer.template.decode(row.ids_T.tolist())


CHAT = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "prompt", "references", "origin"),
    [
        ({"messages": [USER]}, CHAT, (), None),
        ({"messages": [USER, ANSWER]}, CHAT, ("ran",), LAST_MESSAGE),
        ({"messages": [USER, ANSWER], "answer": 7}, CHAT, ("7",), "answer"),
        ({"prompt": [USER], "completion": [ANSWER]}, CHAT, ("ran",), "completion"),
        ({"prompt": [USER]}, CHAT, (), None),
        ({"conversations": [{"from": "human", "value": "the cat"}]}, CHAT, (), None),
        ({"instruction": "the cat", "output": "ran"}, CHAT, ("ran",), "output"),
        ({"instruction": "the cat", "input": ""}, CHAT, (), None),
        (
            {"prompt": "the cat", "answers": ["a", 2.5, True]},
            "the cat",
            ("a", "2.5", "true"),
            "answers",
        ),
        ({"prompt": "the cat ", "completion": "ran"}, "the cat ", ("ran",), "completion"),
        ({"text": "the cat"}, "the cat", (), None),
    ],
)
def test_every_shape_of_row_is_a_prompt_with_its_references(
    row: dict[str, Any],
    prompt: str,
    references: tuple[str, ...],
    origin: str | None,
    tmp_path: Path,
    renderer: Renderer,
) -> None:
    (found,) = load(tmp_path, renderer, row)
    assert text(renderer, found) == prompt
    assert (found.references, found.reference_from) == (references, origin)
    assert found.columns == row
    assert found.id == found.place == f"{tmp_path / 'p.jsonl'}:1"


BEGUN = {"role": "assistant", "content": "it ran "}
TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
TURNED = CHATML.replace("message['content']", "message['content'].split('</s>')[-1]")
"""A template that leaves out what is before a mark in an answer."""


class TestPromptsThatBeginTheAnswer:
    """A prompt whose last message is an assistant's is continued, where the library would continue it."""

    @pytest.mark.parametrize("name", ["trimmed", *TEMPLATES])
    @pytest.mark.parametrize(
        "more",
        [
            {"answer": "so"},
            {"completion": [{**ANSWER, "content": "so"}]},
            {"answer": "so", "system": "be short"},
        ],
        ids=["alone", "before a completion", "after a system message"],
    )
    def test_the_prompt_ends_with_it(self, more: dict[str, Any], name: str, tmp_path: Path) -> None:
        template = TRIMMED if name == "trimmed" else TEMPLATES[name]
        tokenizer = tiny_tokenizer("chatml" if name == "trimmed" else name)
        row = {"prompt": [USER, BEGUN], **more}
        if "system" in row and name in ("gemma", "mistral"):  # which have no system messages
            row = {**row, "system": ""}
        (found,) = load(tmp_path, Renderer(tokenizer, template), row)
        messages = [{"role": m["role"], "content": m["content"]} for m in row["prompt"]]
        if row.get("system"):
            messages.insert(0, {"role": "system", "content": row["system"]})
        ids = tokenizer.apply_chat_template(
            messages, chat_template=template, continue_final_message=True, return_dict=False
        )
        assert found.ids_T.tolist() == ids
        assert found.references == ("so",)
        assert found.asked == tuple(messages[:-1])
        text = tokenizer.decode(ids)
        assert text.endswith(found.beginning) and found.beginning.strip() == "it ran"

    @pytest.mark.parametrize(
        ("message", "template", "says"),
        [
            (
                {**BEGUN, "content": "so</s>it ran"},
                TURNED,
                "does not write the beginning of an answer",
            ),
            (
                BEGUN,
                CHATML.replace("message['content']", "''"),
                "does not write the beginning of an answer",
            ),
            (
                {**BEGUN, "tool_calls": [{"name": "look"}]},
                CHATML,
                "found a assistant message",
            ),
        ],
    )
    def test_one_that_is_not_written_is_refused(
        self, message: dict[str, Any], template: str, says: str, tmp_path: Path
    ) -> None:
        with pytest.raises(DataError, match=says):
            load(tmp_path, Renderer(tiny_tokenizer(), template), {"prompt": [USER, message]})

    def test_the_prompt_of_judged_answers_may_not(self, tmp_path: Path, renderer: Renderer) -> None:
        row = {"prompt": [USER, BEGUN], "chosen": [ANSWER], "rejected": "a dog"}
        with pytest.raises(DataError, match="a assistant message where the message to be answered"):
            load(tmp_path, renderer, row, columns=Columns(kind="preference"))


JUDGED: list[tuple[Kind, dict[str, Any], str]] = [
    ("preference", {"prompt": [USER], "chosen": [ANSWER], "rejected": "a dog"}, CHAT),
    (
        "preference",
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "a"}]},
        CHAT,
    ),
    ("preference", {"prompt": "the cat", "answers": ["a", "b"], "scores": [1, 2]}, "the cat"),
    ("unpaired", {"messages": [USER, ANSWER], "label": False}, CHAT),
    ("unpaired", {"prompt": "the cat", "completion": "ran", "label": False}, "the cat"),
    ("stepwise", {"prompt": [USER], "completions": ["a", "b"], "labels": [1, 0]}, CHAT),
]


@pytest.mark.parametrize(("kind", "row", "prompt"), JUDGED)
def test_a_judged_row_is_a_prompt_and_none_of_its_answers_is_held_right(
    kind: Kind, row: dict[str, Any], prompt: str, tmp_path: Path, renderer: Renderer
) -> None:
    columns = Columns(kind=kind)
    (found,) = load(tmp_path, renderer, row, columns=columns)
    assert text(renderer, found) == prompt
    assert (found.references, found.reference_from) == ((), None)
    with pytest.raises(DataError, match=r":1: the row has no reference; expected a column with"):
        load(tmp_path, renderer, row, columns=columns, needs_reference=True)
    if "chosen" in row:
        (found,) = load(tmp_path, renderer, row, columns=columns, reference="chosen")
        assert found.references == ("ran",)


def test_whole_texts_have_no_prompt_to_be_told(tmp_path: Path, renderer: Renderer) -> None:
    row = {"chosen": "the cat ran", "rejected": "the cat saw"}
    with pytest.raises(DataError, match=r":1: the prompt cannot be told from its answers"):
        load(tmp_path, renderer, row, columns=Columns(kind="preference"))
    asked = {"messages": [USER], "score": 1}
    with pytest.raises(DataError, match=r":1: the prompt cannot be told from its answers"):
        load(tmp_path, renderer, asked, columns=Columns(kind="scored"))


def test_a_prompt_of_messages_is_what_training_takes_for_context(
    tmp_path: Path, renderer: Renderer
) -> None:
    from taut.data.rows.messages import read_conversation

    (found,) = load(tmp_path, renderer, {"messages": [USER, ANSWER]})
    (sample,) = renderer.render(read_conversation([USER, ANSWER], "row"))
    assert np.array_equal(found.ids_T, sample.ids_T[: sample.target_at_N[0]])


def test_a_named_column_holds_the_references(tmp_path: Path, renderer: Renderer) -> None:
    row = {"question": "the cat", "gold": "ran", "answer": "no"}
    columns = Columns(mapping={"instruction": "question"}, prefix="")
    (found,) = load(tmp_path, renderer, row, columns=columns, reference="gold")
    assert (text(renderer, found), found.references, found.reference_from) == (
        CHAT,
        ("ran",),
        "gold",
    )


def test_ids_of_the_rows_serve_where_each_has_one(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"id": "a", "prompt": "x"}, {"id": 2, "prompt": "y"}]
    assert [row.id for row in load(tmp_path, renderer, *rows)] == ["a", "2"]
    rows = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]
    assert [row.id for row in load(tmp_path, renderer, *rows)] == [
        f"{tmp_path / 'p.jsonl'}:{line}" for line in (1, 2)
    ]


def test_only_so_many_rows_are_read(tmp_path: Path, renderer: Renderer) -> None:
    rows = [{"prompt": "x"}, {"prompt": "y"}, {"broken": 1}]
    assert len(load(tmp_path, renderer, *rows, limit=2)) == 2


def test_a_tokenizer_that_adds_bos_adds_it_to_text_and_once(tmp_path: Path) -> None:
    renderer = Renderer(tiny_tokenizer("llama3", adds_bos=True))
    plain, chat = load(tmp_path, renderer, {"prompt": "the cat"}, {"messages": [USER]})
    bos = renderer.tokenizer.bos_token_id
    assert [row.ids_T[0] for row in (plain, chat)] == [bos, bos]
    assert all(row.ids_T.tolist().count(bos) == 1 for row in (plain, chat))
    with pytest.raises(RenderError, match="two BOS"):
        load(tmp_path, renderer, {"prompt": "<|begin_of_text|>the cat"})


def test_an_end_that_the_tokenizer_puts_after_each_text_is_no_part_of_a_prompt(
    tmp_path: Path,
) -> None:
    from tokenizers import processors

    tokenizer = tiny_tokenizer(None)
    end, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, number)]
    )
    plain, ended = load(
        tmp_path, Renderer(tokenizer), {"text": "the cat"}, {"text": f"the cat{end}"}
    )
    assert number not in plain.ids_T
    assert ended.ids_T.tolist() == [*plain.ids_T.tolist(), number]


def test_csv_rows_are_prompts(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "p.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], ["the cat", "ran"], ["a dog", "sat"]])
    found = load_prompts(str(path), renderer, needs_reference=True)
    assert [row.references for row in found] == [("ran",), ("sat",)]
    assert found[1].place == f"{path}:2"


def test_a_number_that_is_missing_in_arrow_is_no_answer(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "p.parquet"
    columns = {"prompt": ["x", "y"], "answer": [4.0, float("nan")]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(DataError, match=r"p\.parquet:2: answer is nan; expected the right answer"):
        load_prompts(str(path), renderer, needs_reference=True)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"prompt": ""}, {}, r"p\.jsonl:2: prompt is empty"),
        ({"prompt": "  "}, {}, "prompt is empty"),
        ({"prompt": []}, {}, "prompt is empty"),
        ({"messages": [ANSWER]}, {}, "found nothing where the message to be answered"),
        ({"messages": [USER, ANSWER, ANSWER]}, {}, "found a assistant message"),
        ({"messages": [{"role": "system", "content": "x"}]}, {}, "found a system message"),
        ({"question": "x"}, {}, "expected messages, conversations, prompt, instruction, or text"),
        (
            {"prompt": "x", "messages": [USER]},
            {},
            "fit the formats messages and completion; expected one; set format",
        ),
        (
            {"prompt": "x", "gold": 1},
            {"reference": "golden"},
            "no column 'golden'.*prompt, gold; did you mean 'gold'",
        ),
        (
            {"prompt": "x", "gold": {}},
            {"reference": "gold"},
            "gold is an empty object; expected the right answer",
        ),
        ({"prompt": "x", "gold": []}, {"reference": "gold"}, "gold is an empty list"),
        (
            {"prompt": "x", "gold": 1},
            {"needs_reference": True},
            "has no reference.*columns are prompt, gold; name",
        ),
        (
            {"prompt": "x", "answer": " "},
            {"needs_reference": True},
            "answer is ' '; expected the right answer",
        ),
        (
            {"messages": [USER], "tools": [{"name": "f"}]},
            {},
            "tools has 'f', which the chat template does not write",
        ),
    ],
)
def test_what_is_no_prompt_is_one_line_with_its_place(
    row: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path, renderer: Renderer
) -> None:
    good = {"prompt": "x", "golden": 1, "gold": 1, "answer": 1}
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, renderer, good, row, columns=Columns(prefix=""), **keys)
    assert f"{tmp_path / 'p.jsonl'}:2: " in str(caught.value)


def test_a_row_keeps_the_tools_that_its_template_was_given(tmp_path: Path) -> None:
    row = {"messages": [USER], "functions": [{"name": "find"}], "tools": "of another kind"}
    renderer = Renderer(tiny_tokenizer("qwen2.5"))
    columns = Columns(mapping={"tools": "functions"})
    (found,) = load(tmp_path, renderer, row, columns=columns)
    assert found.tools == ({"type": "function", "function": {"name": "find"}},)


def test_a_file_without_rows_and_a_wrong_mapping_are_refused(
    tmp_path: Path, renderer: Renderer
) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load(tmp_path, renderer)
    with pytest.raises(ConfigError, match=r"^columns names 'promt'; .*did you mean 'prompt'"):
        Columns(mapping={"promt": "x"}, prefix="")


def test_a_message_names_the_key_that_gives_another_template(tmp_path: Path) -> None:
    renderer = Renderer(tiny_tokenizer(None), key="template")
    with pytest.raises(
        RenderError, match="no chat template; expected one; give it with template=FILE"
    ):
        load(tmp_path, renderer, {"messages": [USER]})


@pytest.mark.parametrize(
    ("ends", "opened"),
    [
        ("assistant\n<think>\n", "<think>"),
        ("assistant\n<think>", "<think>"),
        ("assistant\n<think>\n\n</think>\n\n", ""),
        ("assistant\n", ""),
        ("assistant\n<reasoning-1>  ", "<reasoning-1>"),
        ("<think> assistant", ""),
    ],
)
def test_a_prompt_says_which_tag_it_opened(tmp_path: Path, ends: str, opened: str) -> None:
    """So that the reward ``format`` counts the tag as begun, in training and in evaluations."""
    tokenizer = tiny_tokenizer()
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", repr(ends)[1:-1])
    (row,) = load(tmp_path, Renderer(tokenizer), {"messages": [USER]})
    assert row.opened == opened
    (plain,) = load(tmp_path, Renderer(tokenizer), {"prompt": f"the cat {ends}"})
    assert plain.opened == opened
    text = "I see.</think><answer>ran</answer>"
    judged = to_reward_input(row, text, num_tokens=9, finish_reason="stop")
    assert Tags()(judged) == float(opened == "<think>")
