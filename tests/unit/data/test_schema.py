"""Rows whose answers are judged: every accepted shape, and every refusal with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taut.data.rows.messages import Completion, Conversation, Document
from taut.data.rows.schema import (
    Answers,
    AnyRow,
    Columns,
    OtherKindError,
    Stepwise,
    best_row,
    read_any,
    recognize,
)
from taut.data.settings import Kind
from taut.errors import ConfigError, DataError

ASKED = {"role": "user", "content": "What is 2 plus 3?"}
FIVE, SIX = ({"role": "assistant", "content": text} for text in ("5", "6"))
PAIR = {"chosen": "5", "rejected": "6"}
TURNS = {"chosen": [ASKED, FIVE], "rejected": [ASKED, SIX]}
TEXTS = {"prompt": "2 plus 3 is", **PAIR}
SHAREGPT = [{"from": "human", "value": "What is 2 plus 3?"}]
STEPS = {"completions": ["2 plus 3", "is 5"], "labels": [True, 0.5]}


def read(record: object, kind: Kind = "preference", **options: Any) -> AnyRow:
    return read_any(record, "f:1", Columns(kind=kind, **options))


def answers(record: object, kind: Kind = "preference", **options: Any) -> Answers:
    row = read(record, kind, **options)
    assert isinstance(row, Answers)
    assert row.place == "f:1"
    return row


EXPLICIT: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [ASKED], "chosen": [FIVE], "rejected": [SIX]},
    "one message each": {"prompt": [ASKED], "chosen": FIVE, "rejected": SIX},
    "texts that answer messages": {"prompt": [ASKED], **PAIR},
    "sharegpt": {
        "conversations": SHAREGPT,
        "chosen": {"from": "gpt", "value": "5"},
        "rejected": {"from": "gpt", "value": "6"},
    },
    "sharegpt in JSON": {
        "conversations": '[{"from": "human", "value": "What is 2 plus 3?"}]',
        **PAIR,
    },
    "alpaca": {"instruction": "What is", "input": "2 plus 3?", **PAIR},
    "whole conversations": TURNS,
    "whole, the prompt as text too": {"prompt": ASKED["content"], **TURNS, "messages": []},
    "a text that the user says": {"prompt": ASKED["content"], "chosen": [FIVE], "rejected": [SIX]},
    "nulls": {**TURNS, "prompt": None, "conversations": None, "margin": None, "answers": None},
    "an ignored prompt": {**TURNS, "prompt": "something else"},
    "mapped": {"q": [ASKED], "chosen": FIVE, "bad": SIX, "prompt": "something else"},
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_a_pair_of_conversations(name: str) -> None:
    options: dict[str, Any] = {}
    if name == "an ignored prompt":
        options["ignore_keys"] = ("prompt",)
    if name == "a text that the user says":
        options["mapping"] = {"instruction": "prompt"}
    if name == "mapped":
        options = {"mapping": {"conversations": "q", "rejected": "bad"}}
    row = answers(EXPLICIT[name], **options)
    assert [it.place for it in row.answers] == ["f:1#1", "f:1#2"]
    assert row.values == {"preference": (1.0, 0.0), "margin": (0.0, 0.0)}
    for given, text in zip(row.answers, "56", strict=True):
        assert isinstance(given, Conversation)
        assert given.learned == (1,)
        assert given.messages[1] == {"role": "assistant", "content": text}
        assert given.messages[0]["content"].replace("\n", " ") == "What is 2 plus 3?"
    assert best_row(row) == row.answers[0]


@pytest.mark.parametrize("options", [{}, {"format": "messages"}, {"system": "Be brief."}])
def test_messages_and_a_text_that_is_worse_than_their_last_answer(options: dict[str, Any]) -> None:
    """The row of ms-swift is the pair of whole conversations."""
    asked, five, six = (
        {"role": role, "content": text}
        for role, text in (("user", "2 + 3?"), ("assistant", "5"), ("assistant", "6"))
    )
    row = {"messages": [asked, five], "rejected_response": "6"}
    pair = {"chosen": [asked, five], "rejected": [asked, six]}
    assert answers(row, **options) == answers(pair, **options)
    assert answers(row, "unpaired", **options) == answers(pair, "unpaired", **options)
    for wrong, says in (
        ({**row, "messages": [asked]}, "the better answer"),
        ({**row, "rejected_response": ""}, "rejected_response is empty"),
        ({**row, "chosen": [asked, five]}, "expected one of them"),
    ):
        with pytest.raises(DataError, match=says):
            read(wrong)
    with pytest.raises(DataError, match="rows like these are preference data"):
        read(row, "scored")


def test_a_system_message_moves_weights_with_their_messages() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 2},
    ]
    row = read({"messages": messages}, "sft", system="Be brief.")
    assert isinstance(row, Conversation) and (row.learned, row.weights) == ((2,), {2: 2.0})


def test_a_pair_of_texts() -> None:
    assert answers(TEXTS).answers == (
        Completion("f:1#1", "2 plus 3 is", "5"),
        Completion("f:1#2", "2 plus 3 is", "6"),
    )
    assert answers(PAIR).answers == (Document("f:1#1", "5"), Document("f:1#2", "6"))
    assert answers({**TURNS, **PAIR}, format="text").answers[0] == Document("f:1#1", "5")
    as_json = {name: json.dumps(turns) for name, turns in TURNS.items()}
    assert isinstance(answers(as_json, format="messages").answers[0], Conversation)
    assert isinstance(answers(as_json).answers[0], Document)


def test_what_answers_the_common_messages_is_learned() -> None:
    history = [ASKED, FIVE, ASKED]
    longer = [SIX, ASKED, FIVE]
    row = answers({"chosen": [*history, FIVE], "rejected": [*history, *longer], "system": "Add."})
    good, bad = row.answers
    assert isinstance(good, Conversation)
    assert isinstance(bad, Conversation)
    assert good.messages[0] == {"role": "system", "content": "Add."}
    assert (good.learned, bad.learned) == ((4,), (4, 6))
    row = answers(
        {"prompt": history, "chosen": longer, "rejected": [FIVE], "tools": [{"name": "f"}]}
    )
    assert [it.learned for it in row.answers if isinstance(it, Conversation)] == [(3, 5), (3,)]
    assert all(it.tools for it in row.answers if isinstance(it, Conversation))


@pytest.mark.parametrize(
    ("more", "margin"),
    [
        ({"margin": 2}, 2.0),
        ({"margin": "0.5"}, 0.5),
        ({"chosen_score": 4, "score_rejected": 1.5}, 2.5),
        ({"margin": 1, "chosen_score": 9, "rejected_score": 0}, 1.0),
        ({"chosen_score": 9}, 0.0),
    ],
)
def test_margins(more: dict[str, Any], margin: float) -> None:
    assert answers({**TEXTS, **more}).values["margin"] == (margin, 0.0)


@pytest.mark.parametrize("name", ["answers", "responses", "completions"])
def test_a_list_of_answers(name: str) -> None:
    row = answers({"prompt": [ASKED], name: ["5", [SIX], FIVE], "scores": [1, -3, 0.5]})
    assert row.values == {"preference": (1.0, -3.0, 0.5), "margin": (1.0, -3.0, 0.5)}
    assert [it.messages[-1]["content"] for it in row.answers if isinstance(it, Conversation)] == [
        *("5", "6", "5")
    ]
    row = answers({"prompt": "a", name: '["b", "c"]', "ranks": "[2, 1]"})
    assert row.values == {"preference": (-2.0, -1.0), "margin": (0.0, 0.0)}
    assert best_row(row) == Completion("f:1#2", "a", "c")


def test_unpaired() -> None:
    row = answers({"messages": [ASKED, SIX, ASKED, FIVE], "label": True}, "unpaired")
    (only,) = row.answers
    assert isinstance(only, Conversation)
    assert (only.learned, only.place, row.values) == ((3,), "f:1", {"label": (1.0,)})
    row = answers({"prompt": "a", "completion": "b", "label": "False"}, "unpaired")
    assert row.answers == (Completion("f:1", "a", "b"),)
    assert row.values == {"label": (0.0,)}
    row = answers(
        {"q": [ASKED], "a": [FIVE, ASKED, SIX], "good": False},
        "unpaired",
        mapping={"prompt": "q", "completion": "a", "label": "good"},
    )
    assert isinstance(row.answers[0], Conversation)
    assert row.answers[0].learned == (3,)
    row = answers(TURNS, "unpaired")
    assert row.values == {"label": (1.0, 0.0)}
    assert not row.is_compared
    assert [it.place for it in row.answers] == ["f:1#1", "f:1#2"]


def test_scored() -> None:
    row = answers(
        {"conversations": [*SHAREGPT, {"from": "gpt", "value": "5"}], "score": -2}, "scored"
    )
    assert row.values == {"score": (-2.0,)}
    assert answers({"text": "a b", "score": "1e3"}, "scored").answers == (Document("f:1", "a b"),)
    assert best_row(row) == row.answers[0]
    assert best_row(row.answers[0]) == row.answers[0]


def test_stepwise() -> None:
    row = read({"prompt": [ASKED], **STEPS}, "stepwise")
    assert isinstance(row, Stepwise)
    assert isinstance(row.answer, Conversation)
    assert row.answer.messages[1]["content"] == "2 plus 3\nis 5"
    assert (row.steps, row.labels) == (((0, 8), (9, 13)), (1.0, 0.5))
    steps = {"completions": [" a", "b \n"], "labels": [0, 1]}
    row = read({"prompt": "Q", **steps}, "stepwise", step_separator="\n\n")
    assert isinstance(row, Stepwise)
    assert row.answer == Completion("f:1", "Q", "\n\n a\n\nb \n")
    assert row.steps == ((3, 4), (6, 7))
    assert best_row(row) == row.answer
    row = read({"prompt": "Q\n", **steps}, "stepwise")
    assert isinstance(row, Stepwise)
    assert row.answer == Completion("f:1", "Q\n", " a\nb \n")
    row = read({"instruction": "Add.", "input": "2 3", **STEPS}, "stepwise")
    assert isinstance(row, Stepwise)
    assert isinstance(row.answer, Conversation)
    assert row.answer.messages[0]["content"] == "Add.\n2 3"


LISTS = {"prompt": "a", "answers": ["b", "c"], "scores": [1, 2]}
LABELED = {"prompt": "a", "completion": "b", "label": True}
REFUSED: list[tuple[Kind, object, str]] = [
    ("preference", [1], "the row is a list of 1; expected an object"),
    ("preference", {"prompt": "a", "choosen": "b", "rejected": "c"}, "did you mean 'choosen'"),
    ("preference", {"prompt": "a", "completion": "b"}, r"expected chosen and rejected, or answers"),
    ("preference", {"chosen": "b", "rejected": None}, "rejected is empty"),
    ("preference", {**TEXTS, "instruction": "x"}, "prompt and instruction may each be the prompt"),
    ("preference", {**TEXTS, **LISTS}, "has chosen with rejected and answers with scores"),
    ("preference", {**TEXTS, "margin": True}, "margin is True; expected a number"),
    ("preference", {**TEXTS, "margin": "much"}, "margin is text but not JSON"),
    ("preference", {**TEXTS, "margin": 10**400}, "margin is .*; expected a finite number"),
    (
        "preference",
        {**TEXTS, "chosen_score": 1, "score_chosen": 1},
        "chosen_score and score_chosen",
    ),
    ("preference", {**TEXTS, "system": "s"}, "system comes with plain texts"),
    ("preference", {**TEXTS, "tools": [1]}, "tools comes with plain texts"),
    ("preference", {**TEXTS, "images": ["a.png"]}, "the row has images; expected text only"),
    ("preference", {**TEXTS, "chosen": ""}, "chosen is empty"),
    ("preference", {**TEXTS, "chosen": 5}, "chosen is 5 and rejected is '6'; expected texts only"),
    ("preference", {**TEXTS, "chosen": FIVE}, "chosen is an object .*; expected texts only"),
    ("preference", {**TEXTS, "prompt": 5}, "prompt is 5; expected a list of messages"),
    ("preference", {**TEXTS, "prompt": []}, "prompt is empty; expected a list of messages"),
    ("preference", {"prompt": [ASKED], "chosen": [], "rejected": "6"}, "chosen is empty"),
    ("preference", {"prompt": [ASKED], "chosen": 5, "rejected": "6"}, "chosen is 5; expected the"),
    (
        "preference",
        {"prompt": [ASKED], **TURNS},
        "chosen begins with a user message; expected what answers prompt",
    ),
    (
        "preference",
        {"prompt": [ASKED], "chosen": [{"role": "assistent", "content": "5"}], "rejected": "6"},
        r"prompt\+chosen\[1\].role is 'assistent'.* did you mean 'assistant'",
    ),
    ("preference", {"conversations": [{"from": "x"}], **PAIR}, r"conversations\[0\].from is 'x'"),
    ("preference", {"prompt": "Why?", **TURNS}, "the answers begin with other messages"),
    (
        "preference",
        {"chosen": [ASKED, FIVE], "rejected": [ASKED, FIVE, ASKED, SIX]},
        "have 2 leading messages in common, and chosen ends there",
    ),
    (
        "preference",
        {"chosen": [ASKED, FIVE], "rejected": [{**ASKED, "content": "x"}, SIX]},
        "have no leading messages in common, and chosen goes on with a message of the user",
    ),
    ("preference", {"chosen": [ASKED, FIVE], "rejected": "6"}, "or lists of messages only"),
    ("preference", {"chosen": [ASKED], "rejected": [ASKED]}, "have 1 leading .* chosen ends there"),
    ("preference", {"chosen": [], "rejected": []}, "chosen is empty"),
    (
        "preference",
        {**LISTS, "responses": ["d"]},
        "the row has answers and responses; expected one",
    ),
    ("preference", {**LISTS, "ranks": [1, 2]}, "the row has scores and ranks; expected one"),
    ("preference", {"prompt": "a", "scores": [1]}, "has none of answers, responses, completions"),
    ("preference", {**LISTS, "answers": "b"}, "answers is text but not JSON"),
    ("preference", {**LISTS, "answers": 5}, "answers is 5; expected a list"),
    ("preference", {**LISTS, "scores": [1]}, "answers has 2 and scores 1; expected as many"),
    ("preference", {**LISTS, "scores": [1, None]}, r"scores\[1\] is null; expected a number"),
    ("preference", {"prompt": "a", "answers": ["b"], "scores": [1]}, "at least two"),
    ("preference", {**LISTS, "answers": ["b", " "]}, r"answers\[1\] is empty"),
    ("unpaired", {"prompt": "a", "completion": "b"}, "expected a label, or chosen and rejected"),
    ("unpaired", {**LABELED, "label": 1}, "label is 1; expected true"),
    ("unpaired", {**LABELED, "label": "good"}, "label is 'good'; expected true"),
    ("unpaired", {"text": "a", "label": True}, "the row is a text without a prompt"),
    (
        "unpaired",
        {"prompt": "a", "label": True},
        "the row is an object with keys 'prompt'; expected",
    ),
    ("scored", {"prompt": "a", "completion": "b"}, r"expected a score \(scored data\)"),
    ("scored", {"text": "a", "score": float("nan")}, "score is nan; expected a finite number"),
    ("scored", {"text": "a", "score": None}, "expected a score"),
    ("stepwise", {**STEPS}, "expected prompt, completions and labels"),
    ("stepwise", {"prompt": "a", "labels": [1]}, r"completions = "),
    ("stepwise", {"prompt": "a", **STEPS, "labels": [1]}, "2 steps and labels has 1; expected one"),
    ("stepwise", {"prompt": "a", "completions": [], "labels": []}, "0 steps and labels has 0"),
    ("stepwise", {"prompt": "a", **STEPS, "labels": [1, 2]}, r"labels\[1\] is 2; expected true"),
    ("stepwise", {"prompt": "a", **STEPS, "completions": ["a", ""]}, r"completions\[1\] is empty"),
    ("stepwise", {"prompt": "a", **STEPS, "completions": ["a", 5]}, r"completions\[1\] is 5"),
    ("stepwise", {"prompt": "a", **STEPS, "system": "s"}, "system comes with plain texts"),
]


@pytest.mark.parametrize(("kind", "record", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_by_place(kind: Kind, record: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"^f:1: .*{message}") as raised:
        read(record, kind)
    assert len(str(raised.value).splitlines()) == 1


def test_formats_and_columns_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"without conversations; expected it \(format sharegpt\)"):
        read(TEXTS, format="sharegpt")
    with pytest.raises(ConfigError, match=r"names 'chosn'; .* did you mean 'chosen'"):
        Columns(mapping={"chosn": "a"}, kind="preference")
    with pytest.raises(ConfigError, match="names 'chosen'; expected one of messages"):
        Columns(mapping={"chosen": "a"})
    with pytest.raises(DataError, match=r"data.columns.chosen is 'good', .* did you mean 'goood'"):
        read({"prompt": "a", "goood": "b"}, mapping={"chosen": "good"})


def test_rows_of_sft_are_read_as_ever() -> None:
    assert read({"prompt": "a", "completion": "b"}, "sft") == Completion("f:1", "a", "b")
    with pytest.raises(DataError, match="expected messages, conversations"):
        read(TURNS, "sft")


def test_which_columns_are_read() -> None:
    def unread(record: object, kind: Kind) -> list[str]:
        return list(recognize(record, "f:1", Columns(kind=kind)).unread)

    assert unread({**TURNS, "messages": [], "margin": 1, "id": 1}, "preference") == [
        "messages",
        "id",
    ]
    assert unread({"prompt": "a", **STEPS, "id": 1}, "stepwise") == ["id"]
    assert unread({**LABELED, "margin": 1}, "unpaired") == ["margin"]
    assert unread({**TURNS, "margin": 1}, "unpaired") == ["margin"]
    assert unread({"text": "a", "score": 1, "label": 1}, "scored") == ["label"]


@pytest.mark.parametrize(
    ("record", "kind", "other"),
    [
        ({"messages": [ASKED, FIVE]}, "preference", "sft"),
        ({"messages": [ASKED, FIVE], "label": True}, "preference", "unpaired"),
        ({"messages": [ASKED, FIVE], "score": 1}, "preference", "scored"),
        (TEXTS, "sft", "preference"),
        (TEXTS, "scored", "preference"),
        ({"prompt": "2", **STEPS}, "sft", "stepwise"),
    ],
)
def test_rows_of_another_kind_say_which(record: object, kind: Kind, other: Kind) -> None:
    with pytest.raises(OtherKindError, match=f"rows like these are {other} data") as caught:
        read(record, kind)
    assert caught.value.kind == other


def test_a_label_of_rows_that_nothing_trains_on_is_no_hint() -> None:
    with pytest.raises(DataError) as caught:
        read({"sentence": "a", "label": 1}, "sft")
    assert "rows like these" not in str(caught.value)
