"""``data.apply_chat_template``: prompts and completions that are plain text, with the chat template and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, events, save_model, sft, write_rows
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.commands.reading import columns_of, source_of
from taut.commands.settings import Generate
from taut.config import Decision, from_mapping
from taut.data.dataset import Dataset, build_renderer, load_dataset
from taut.data.rows.messages import Completion, Conversation, Document
from taut.data.rows.prompts import load_prompts
from taut.data.rows.schema import Answers, Columns, Stepwise, read_any, recognize
from taut.data.settings import DataConfig, Kind
from taut.errors import DataError
from taut.methods.method import RunConfig
from taut.run.inputs import load_inputs
from taut.train import distributed

PLAIN = {"prompt": "2 + 3 =", "completion": " 5"}
ASKED = {"role": "user", "content": "2 + 3 ="}
CHAT = {"messages": [ASKED, {"role": "assistant", "content": " 5"}]}
DOCUMENT = {"text": "the cat sat on the mat"}


def load(directory: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> Dataset:
    path = str(write_rows(directory / "train.jsonl", rows))
    config = DataConfig(train=path, cache=str(directory / "cache"), **options)
    return load_dataset(config, "train", build_renderer(config, tiny_tokenizer()), 200)


def test_plain_text_is_rendered_as_the_same_messages_are(tmp_path: Path) -> None:
    plain, chat, document = load(tmp_path, [PLAIN, CHAT, DOCUMENT], apply_chat_template=True)
    assert plain.ids_T.tolist() == chat.ids_T.tolist()
    assert plain.target_at_N.tolist() == chat.target_at_N.tolist()
    (alone,) = load(tmp_path, [DOCUMENT])
    assert document.ids_T.tolist() == alone.ids_T.tolist()


@pytest.mark.parametrize("asked", [None, False])
def test_by_default_it_is_used_as_it_is(asked: bool | None, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    (sample,) = load(tmp_path, [PLAIN], apply_chat_template=asked)
    assert sample.ids_T.tolist() == [*tokenizer("2 + 3 = 5").input_ids, tokenizer.eos_token_id]


def test_text_without_white_space_between_prompt_and_answer_is_refused_with_a_remedy_that_works(
    tmp_path: Path,
) -> None:
    joined = {"prompt": "a big house", "completion": "saw the cat"}
    with pytest.raises(DataError, match="move the white space between them to the answer"):
        load(tmp_path, [joined])
    (sample,) = load(tmp_path, [joined | {"completion": " saw the cat"}])
    assert sample.target_at_N.size


def test_the_cache_tells_the_two_apart(tmp_path: Path) -> None:
    without, rendered = (
        load(tmp_path, [PLAIN], apply_chat_template=asked) for asked in (False, True)
    )
    assert without.fingerprint != rendered.fingerprint
    assert without.report.num_tokens != rendered.report.num_tokens
    assert load(tmp_path, [PLAIN]).fingerprint == without.fingerprint


def test_the_forms_of_rows_are_counted_and_cached(tmp_path: Path) -> None:
    rows = [PLAIN, CHAT, CHAT, DOCUMENT]
    wanted = {"completion": 1, "conversation": 2, "document": 1}
    assert load(tmp_path, rows).forms == wanted
    again = load(tmp_path, rows)
    assert again.report.is_cached and again.forms == wanted


def test_a_cache_entry_of_an_older_version_is_made_again(tmp_path: Path) -> None:
    load(tmp_path, [PLAIN])
    (shard,) = (tmp_path / "cache").glob("*/00000")  # its files were in the entry's directory
    (shard.parent / "manifest.json").unlink()
    for path in shard.iterdir():
        path.rename(shard.parent / path.name)
    again = load(tmp_path, [PLAIN])
    assert "an older version" in again.report.decisions[0]
    assert again.forms == {"completion": 1}
    assert load(tmp_path, [PLAIN]).report.is_cached


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("preference", {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6"}),
        ("preference", {"prompt": "2 + 3 =", "answers": [" 5", " 6"], "scores": [1, 0]}),
        ("unpaired", {**PLAIN, "label": True}),
        ("unpaired", {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6"}),
        ("scored", {**PLAIN, "score": 0.5}),
        ("stepwise", {"prompt": "2 + 3 =", "completions": [" 5"], "labels": [True]}),
    ],
)
def test_judged_answers_too(kind: Kind, row: dict[str, Any]) -> None:
    read = read_any(row, "f:1", Columns(kind=kind, apply_chat_template=True))
    assert isinstance(read, Answers | Stepwise)
    answer = read.answer if isinstance(read, Stepwise) else read.answers[0]
    assert isinstance(answer, Conversation)
    assert list(answer.messages) == [ASKED, {"role": "assistant", "content": " 5"}]
    assert answer.learned == (1,)
    without = read_any(row, "f:1", Columns(kind=kind))
    assert isinstance(without, Answers | Stepwise)
    plain = without.answer if isinstance(without, Stepwise) else without.answers[0]
    assert isinstance(plain, Completion)


def test_whole_texts_have_no_user(tmp_path: Path) -> None:
    row = {"chosen": "2 + 3 = 5", "rejected": "2 + 3 = 6"}
    with pytest.raises(DataError, match=r"cannot tell what the user says.*column prompt"):
        read_any(row, "f:1", Columns(kind="preference", apply_chat_template=True))


@pytest.mark.parametrize("row", [{"prompt": "2 + 3 ="}, {"text": "2 + 3 ="}, PLAIN])
def test_prompts_to_answer_too(row: dict[str, Any], tmp_path: Path) -> None:
    renderer = build_renderer(DataConfig(), tiny_tokenizer())
    path = str(write_rows(tmp_path / "prompts.jsonl", [row]))
    (plain,) = load_prompts(path, renderer, Columns())
    assert plain.prompt == "2 + 3 ="
    (rendered,) = load_prompts(path, renderer, Columns(apply_chat_template=True))
    assert rendered.prompt == (ASKED,)
    assert rendered.ids_T.tolist() == renderer.prompt_ids([ASKED]).tolist()
    assert rendered.references == plain.references
    config = Generate(model="m", prompts=path, out="o", apply_chat_template=True)
    assert columns_of(config, config.images, source_of(path)).apply_chat_template


def test_tools_beside_a_plain_prompt_are_read_where_it_is_rendered() -> None:
    row = {**PLAIN, "tools": [{"name": "weather"}]}
    assert set(recognize(row, "f:1", Columns()).unread) == {"tools"}
    assert not recognize(row, "f:1", Columns(apply_chat_template=True)).unread


def decision(directory: Path, rows: Sequence[Mapping[str, Any]], **keys: Any) -> Decision | None:
    """What a run says at its start of plain text."""
    fixed = {"model": str(save_model(directory / "model")), "steps": 1}
    data = {"data.train": str(write_rows(directory / "train.jsonl", rows))}
    run = from_mapping(RunConfig, {**QUIET, **fixed, **data, **keys})
    found = load_inputs(run, distributed.start("cpu")).decisions
    return next((one for one in found if one.name == "data.apply_chat_template"), None)


def test_rows_of_another_kind_name_the_methods_that_train_on_them(tmp_path: Path) -> None:
    row = {"prompt": "2 plus 3 is", "chosen": "5", "rejected": "6"}
    with pytest.raises(DataError, match=r"rows like these are preference data, for .*taut dpo, "):
        decision(tmp_path, [row])


@pytest.mark.parametrize(
    ("rows", "asked", "value", "reason"),
    [
        ([PLAIN, PLAIN, DOCUMENT], None, "false", "plain text in 2 rows is used as it is, without"),
        ([PLAIN], None, "false", "data.apply_chat_template=true renders it as messages"),
        ([PLAIN], False, "false", "without the chat template; set"),
        ([PLAIN], True, "true", "set; plain text becomes a user and an assistant message"),
    ],
)
def test_a_run_says_how_it_renders_plain_text(
    rows: list[dict[str, Any]], asked: bool | None, value: str, reason: str, tmp_path: Path
) -> None:
    keys = {} if asked is None else {"data.apply_chat_template": asked}
    found = decision(tmp_path, rows, **keys)
    assert found is not None
    assert (found.value, reason in found.reason) == (value, True), found


def test_nothing_is_said_where_there_is_no_plain_prompt(tmp_path: Path) -> None:
    assert decision(tmp_path, [CHAT, DOCUMENT]) is None


def test_the_decision_is_in_the_log_and_a_warning_does_not_stop_the_run(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [PLAIN] * 3)
    out = tmp_path / "out"
    sft(save_model(tmp_path / "model"), train, out, steps=1)
    (start,) = events(out, "start")
    assert ["data.apply_chat_template", "false"] in [one[:2] for one in start["decisions"]]
    found = {event["name"]: event for event in events(out, "check")}["template.plain"]
    assert found["outcome"] == "warning"
    assert "data.apply_chat_template=true" in found["remedy"]
    assert found["evidence"] == ["train.jsonl:1: '2 + 3 = 5'", "train.jsonl:2: '2 + 3 = 5'"]


def test_a_document_is_never_rendered() -> None:
    row = read_any(DOCUMENT, "f:1", Columns(apply_chat_template=True))
    assert isinstance(row, Document)
