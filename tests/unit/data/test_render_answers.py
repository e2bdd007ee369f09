"""Answers that are judged, as samples: ids, targets, values, places to read, what is left, and what the cache keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import CHATML, TEMPLATES, tiny_tokenizer

from taut.data.batching import Rows
from taut.data.dataset import Dataset, build_renderer, load_dataset, read_rows
from taut.data.packing import common_prefix, pack
from taut.data.render.render import Renderer
from taut.data.rows.schema import Answers, best_row
from taut.data.settings import BatchConfig, DataConfig, Kind, Source
from taut.errors import ConfigError, DataError, RenderError
from taut.types import Sample

ASKED = {"role": "user", "content": "What is 2 plus 3?"}
THANKS = {"role": "user", "content": "Thank you!"}
FIVE = {"role": "assistant", "content": "2 plus 3 is 5."}
SIX = {"role": "assistant", "content": "It is 6, I think."}
PAIR = {"prompt": [ASKED], "chosen": [FIVE], "rejected": [SIX]}
TEXTS = {"chosen": "What is 2 plus 3? It is 5.", "rejected": "What is 2 plus 3? It is 6, no, 7."}
LIST = {"prompt": [ASKED], "answers": ["5", "It is 5.", "6"], "scores": [2, 3, 1]}
STEPS = {
    "prompt": [ASKED],
    "completions": ["Take 2.", "Add 3 to it.", "That is 5"],
    "labels": [1, 0.5, 0],
}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    tmp_path: Path,
    rows: list[Any],
    kind: Kind = "preference",
    *,
    template: str | None = "chatml",
    limit: int = 512,
    file: str | None = None,
    **options: Any,
) -> Dataset:
    path = write(tmp_path / "a.jsonl", rows)
    config = DataConfig(train=path, cache=str(tmp_path / "c"), template=file, **options)
    renderer = build_renderer(config, tiny_tokenizer(template))
    return load_dataset(config, "train", renderer, limit, kind=kind)


def learned(sample: Sample, template: str | None = "chatml") -> str:
    return str(tiny_tokenizer(template).decode(sample.ids_T[sample.target_at_N]))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("targets", ["assistant", "last"])
def test_an_answer_is_the_sample_of_its_conversation_up_to_the_last_target(
    template: str, targets: Any, tmp_path: Path
) -> None:
    history = [ASKED, SIX, THANKS]
    strips = template == "qwen3" and targets == "assistant"  # then turns of one answer are samples
    long = [FIVE] if strips else [FIVE, THANKS, SIX]
    row = {"prompt": history, "chosen": long, "rejected": [SIX]}
    chosen, rejected = load(tmp_path, [row], template=template, targets=targets)
    renderer = Renderer(tiny_tokenizer(template), targets=targets)
    for sample, turns in ((chosen, long), (rejected, [SIX])):
        as_sft = {"prompt": history, "completion": turns}
        (expected,) = load(tmp_path, [as_sft], "sft", template=template, targets=targets)
        assert sample.target_at_N.tolist() == expected.target_at_N.tolist()
        assert sample.num_tokens == expected.target_at_N[-1] + 1
        assert sample.ids_T.tolist() == expected.ids_T[: sample.num_tokens].tolist()
        assert sample.ids_T[-1] in renderer.stop_ids
    prompt = renderer.prompt_ids(history)
    assert common_prefix(chosen, rejected) >= prompt.size
    packed = pack([replace(sample, group=0) for sample in (rejected, chosen)])
    assert packed.sample_ids[int(packed.better_P)] == chosen.id
    assert packed.num_tokens <= packed.num_tokens_unshared - prompt.size


def test_ids_values_and_rows(tmp_path: Path) -> None:
    data = load(tmp_path, [{**PAIR, "margin": 0.25}, LIST, TEXTS])
    names = [
        f"{tmp_path}/a.jsonl:{name}" for name in ("1#1", "1#2", "2#1", "2#2", "2#3", "3#1", "3#2")
    ]
    assert [sample.id for sample in data] == names
    assert [sample.values["preference"] for sample in data] == [1, 0, 2, 3, 1, 1, 0]
    assert [sample.values["margin"] for sample in data] == [0.25, 0, 2, 3, 1, 0, 0]
    assert rows_of(data) == [range(2), range(2, 5), range(5, 7)]
    assert [data.row_of(index) for index in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert data.report.num_rows == 3


@pytest.mark.parametrize("first", ["messages", "text"])
def test_implicit_prompts_are_found(first: str, tmp_path: Path) -> None:
    if first == "messages":
        row = {
            "chosen": [ASKED, SIX, THANKS, FIVE],
            "rejected": [ASKED, SIX, THANKS, SIX, THANKS, FIVE],
        }
        good, bad = load(tmp_path, [row])
        assert learned(good) == "2 plus 3 is 5.<|im_end|>"
        assert learned(bad) == "It is 6, I think.<|im_end|>2 plus 3 is 5.<|im_end|>"
    else:
        good, bad = load(tmp_path, [TEXTS], template=None)
        start = common_prefix(good, bad)
        tokenizer = tiny_tokenizer(None)
        assert tokenizer.decode(good.ids_T[:start]).startswith("What is 2 plus 3? It is")
        for sample in (good, bad):
            assert sample.target_at_N.tolist() == list(range(start, sample.num_tokens))
            assert sample.ids_T[-1] == tokenizer.eos_token_id


def test_a_text_that_begins_another_ends_in_eos(tmp_path: Path) -> None:
    longer = TEXTS["chosen"] + " Or 6."
    short, long = load(tmp_path, [{"chosen": TEXTS["chosen"], "rejected": longer}], template=None)
    assert short.target_at_N.tolist() == [short.num_tokens - 1]
    assert long.target_at_N[0] == short.num_tokens - 1


def test_texts_without_a_common_beginning(tmp_path: Path) -> None:
    for chosen, rejected in (("What?", "Once."), (" What", " 5")):
        with pytest.raises(RenderError, match=r"a.jsonl:1: .* have no beginning in common, and"):
            load(tmp_path, [{"q": "Why?", "chosen": chosen, "rejected": rejected}], template=None)
    with pytest.raises(RenderError, match=r"a.jsonl:1#1: .* ends an answer and is inside this one"):
        load(tmp_path, [{"chosen": "a b<|im_end|>c", "rejected": "a d"}])


def test_an_answer_is_one_sample(tmp_path: Path) -> None:
    thoughtful = {**FIVE, "reasoning_content": "add them"}
    row = {"prompt": [ASKED], "chosen": [thoughtful, THANKS, thoughtful], "rejected": [SIX]}
    with pytest.raises(RenderError, match=r"a.jsonl:1#1: .* makes 2 samples; expected one"):
        load(tmp_path, [row], template="qwen3")
    data = load(tmp_path, [row], template="qwen3", targets="last")
    assert learned(data[0], "qwen3").startswith("<think>\nadd them")


def test_unpaired_and_scored(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASKED, SIX, THANKS, FIVE], "label": True},
        PAIR,
        {**TEXTS, "label": False},
    ]
    rows[2] = {"prompt": "2 plus 3 is", "completion": " 6.", "label": False}
    data = load(tmp_path, rows, "unpaired")
    assert [sample.id.rpartition(":")[2] for sample in data] == ["1", "2#1", "2#2", "3"]
    assert [dict(sample.values) for sample in data] == [{"label": it} for it in (1, 1, 0, 0)]
    assert [learned(sample) for sample in data] == [
        *("2 plus 3 is 5.<|im_end|>", "2 plus 3 is 5.<|im_end|>"),
        *("It is 6, I think.<|im_end|>", " 6.<|im_end|>"),
    ]
    assert rows_of(data) == [range(1), range(1, 3), range(3, 4)]
    scored = load(
        tmp_path,
        [{"messages": [ASKED, FIVE], "score": -0.5}, {"text": "a b", "score": 2}],
        "scored",
    )
    assert [dict(sample.values) for sample in scored] == [{"score": -0.5}, {"score": 2.0}]
    assert [sample.read_at_R for sample in scored] == [None, None]


@pytest.mark.parametrize("template", TEMPLATES)
def test_steps_are_read_at_their_last_token(template: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(template)
    (sample,) = load(tmp_path, [STEPS], "stepwise", template=template)
    assert sample.read_at_R is not None
    assert sample.read_values["label"].tolist() == [1, 0.5, 0]
    ends = [str(tokenizer.decode(sample.ids_T[: at + 1])).rstrip() for at in sample.read_at_R]
    assert [end[-len(step) :] for end, step in zip(ends, STEPS["completions"], strict=True)] == [
        *STEPS["completions"]
    ]
    assert pack([sample]).read_values["label"].tolist() == [1, 0.5, 0]


def test_steps_of_a_text(tmp_path: Path) -> None:
    row = {
        "prompt": "Add 2 and 3",
        "completions": [" été", "so \n", "5 ü"],
        "labels": [True, False, 1],
    }
    (sample,) = load(tmp_path, [row], "stepwise", template=None, step_separator="\n\n")
    tokenizer = tiny_tokenizer(None)
    assert tokenizer.decode(sample.ids_T[:-1]) == "Add 2 and 3\n\n été\n\nso \n\n\n5 ü"
    assert sample.read_at_R is not None
    before = [tokenizer.decode(sample.ids_T[: at + 1]) for at in sample.read_at_R]
    assert [text[-1] for text in before] == ["é", "o", "ü"]


def test_steps_that_cannot_be_read_apart(tmp_path: Path) -> None:
    merged = {"prompt": [ASKED], "completions": ["The c", "at sat"], "labels": [1, 0]}
    with pytest.raises(
        RenderError, match=r"a.jsonl:1: one token, .*, holds the end of completions\[0\]"
    ):
        load(tmp_path, [merged], "stepwise", step_separator="")
    shouting = tmp_path / "t.jinja"
    shouting.write_text(CHATML.replace("message['content']", "message['content']|upper"))
    with pytest.raises(
        RenderError, match=r"a.jsonl:1: messages\[0\] \(user\) has .* does not write"
    ):
        load(tmp_path, [STEPS], "stepwise", file=str(shouting))


@pytest.mark.parametrize(
    ("row", "kind", "fault"),
    [
        (
            {**PAIR, "rejected": [FIVE]},
            "preference",
            "answers 1 and 2 are the same, token for token",
        ),
        ({"chosen": "a b", "rejected": "a b"}, "preference", "answers 1 and 2 are the same"),
        (
            {"chosen": [ASKED, FIVE], "rejected": [ASKED, FIVE]},
            "preference",
            "answers 1 and 2 are the same",
        ),
        ({**LIST, "scores": [1, 1, 1]}, "preference", "no answer is better than another"),
        ({**LIST, "answers": ["a", "b", "a"]}, "preference", "answers 1 and 3 are the same"),
        ({**PAIR, "rejected": [FIVE]}, "unpaired", "answers 1 and 2 are the same"),
    ],
)
def test_rows_that_teach_nothing(
    row: dict[str, Any], kind: Kind, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"a.jsonl:2: {fault}.* set data.without_targets=drop"):
        load(tmp_path, [PAIR, row], kind)
    data = load(tmp_path, [PAIR, row], kind, without_targets="drop")
    assert [incident.place for incident in data.report.dropped] == [f"{tmp_path}/a.jsonl:2"]
    assert fault in data.report.dropped[0].reason
    assert len(data) == 2


def test_equals_in_a_list_are_no_pair(tmp_path: Path) -> None:
    data = load(tmp_path, [{**LIST, "answers": ["a", "a", "b"], "scores": [1, 1, 0]}])
    packed = pack([replace(sample, group=4) for sample in data])
    assert packed.num_pairs == 2


def rows_of(data: Dataset) -> list[range]:
    """The samples of each row."""
    return [data.row(index) for index in range(data.num_groups)]


def longest(data: Dataset, index: int) -> int:
    return data.length(index)


def test_a_row_that_loses_an_answer(tmp_path: Path) -> None:
    whole = load(tmp_path, [PAIR, LIST])
    limit = longest(whole, 0) - 1
    assert longest(whole, 1) > limit > longest(whole, 3)
    with pytest.raises(DataError, match=r"a.jsonl:1#1: .* tokens, max_length"):
        load(tmp_path, [PAIR, LIST], limit=limit)
    data = load(tmp_path, [PAIR, LIST], limit=limit, too_long="drop")
    (incident,) = data.report.dropped
    assert incident.place == f"{tmp_path}/a.jsonl:1"
    assert incident.reason.startswith("no answer is left: answer 1 was dropped")
    assert incident.targets_lost == sum(sample.num_targets for sample in whole[:2])
    assert rows_of(data) == [range(3)]
    data = load(tmp_path, [LIST], limit=longest(whole, 3) - 1, too_long="drop")
    assert [sample.id[-3:] for sample in data] == ["1#1", "1#3"]
    assert [incident.place[-3:] for incident in data.report.dropped] == ["1#2"]
    assert rows_of(data) == [range(2)]


def test_a_pair_that_is_cut(tmp_path: Path) -> None:
    start = ["2 plus 3 is"]
    pair = {"prompt": [ASKED], "chosen": f"{start[0]} 5.", "rejected": f"{start[0]} 6."}
    whole = load(tmp_path, [pair, PAIR])
    data = load(tmp_path, [pair, PAIR], limit=longest(whole, 0) - 1, too_long="truncate")
    assert len(data) == 4
    assert [incident.place[-3:] for incident in data.report.cut][:2] == ["1#1", "1#2"]
    data = load(tmp_path, [pair, PAIR], limit=longest(whole, 0) - 3, too_long="truncate")
    assert rows_of(data) == [range(2)]
    (incident,) = data.report.dropped
    assert "answers 1 and 2 are the same, token for token: answer 1 was cut" in incident.reason
    assert [sample.values["preference"] for sample in data] == [1, 0]


def test_steps_that_are_cut(tmp_path: Path) -> None:
    (whole,) = load(tmp_path, [STEPS], "stepwise")
    assert whole.read_at_R is not None
    first, second, _ = whole.read_at_R.tolist()
    (cut,) = load(tmp_path, [STEPS], "stepwise", limit=second + 1, too_long="truncate")
    assert cut.read_at_R is not None
    assert cut.read_at_R.tolist() == [first, second]
    assert cut.read_values["label"].tolist() == [1, 0.5]
    with pytest.raises(DataError, match="no step left"):
        load(tmp_path, [STEPS], "stepwise", limit=first, too_long="truncate")


CASES: list[tuple[Kind, list[Any]]] = [
    ("preference", [PAIR, LIST]),
    ("unpaired", [PAIR, {"messages": [ASKED, FIVE], "label": True}]),
    ("scored", [{"messages": [ASKED, FIVE], "score": 1}]),
    ("stepwise", [STEPS, STEPS]),
]


def told(sample: Sample) -> tuple[Any, ...]:
    """All of a sample."""
    at_R = None if sample.read_at_R is None else sample.read_at_R.tolist()
    read_values = {name: value_R.tolist() for name, value_R in sample.read_values.items()}
    values = dict(sample.values)
    return (
        sample.id,
        sample.ids_T.tolist(),
        sample.target_at_N.tolist(),
        values,
        at_R,
        read_values,
    )


@pytest.mark.parametrize(("kind", "rows"), CASES, ids=[kind for kind, _ in CASES])
def test_the_cache_gives_back_what_was_made(kind: Kind, rows: list[Any], tmp_path: Path) -> None:
    first = load(tmp_path, rows, kind)
    expected = [told(sample) for sample in first]
    (shard,) = (tmp_path / "c").glob("*/00000")
    extra = [path for path in shard.iterdir() if path.name.startswith(("value.", "read"))]
    assert extra
    for damaged in [None, *extra]:
        if damaged is not None:
            raw = bytearray(damaged.read_bytes())
            raw[-1] ^= 1
            damaged.write_bytes(raw)
        again = load(tmp_path, rows, kind)
        assert again.report.is_cached is (damaged is None)
        assert (damaged is not None) == ("damaged" in again.report.decisions[0])
        assert [told(sample) for sample in again] == expected
        assert again.fingerprint == first.fingerprint
    assert load(tmp_path, rows, kind).report.is_cached


def test_the_kind_belongs_to_the_key(tmp_path: Path) -> None:
    rows = [{**PAIR, "completion": [FIVE], "label": True, "score": 1}]
    prints = {
        kind: load(tmp_path, rows, kind).fingerprint
        for kind in ("preference", "unpaired", "scored")
    }
    prints["sft"] = load(tmp_path, rows, "sft").fingerprint
    assert len(set(prints.values())) == 4
    steps = {
        load(tmp_path, [STEPS], "stepwise", step_separator=it).fingerprint for it in ("\n", "\n\n")
    }
    assert len(steps) == 2


def test_a_mixture(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [PAIR, LIST]) for name in "ab"]
    sources = [paths[0], Source(path=paths[1], weight=2)]
    config = DataConfig(train=sources, cache=str(tmp_path / "c"))
    data = load_dataset(config, "train", Renderer(tiny_tokenizer()), 512, kind="preference")
    assert rows_of(data) == [range(2), range(2, 5), range(5, 7), range(7, 10)]
    assert [data.row_of(index) for index in (4, 5, 6, 9)] == [1, 2, 2, 3]
    order = Rows(data, are_answers=True).order(BatchConfig(), 0, 4)
    assert (order.counts, order.weights, order.epoch_size) == ((2, 2), (1, 2), 6)
    assert [sample.values["preference"] for sample in data][5:7] == [1, 0]
    of_rows = [sum(data[index].num_tokens for index in row) for row in rows_of(data)]
    assert Rows(data, are_answers=True).lengths().tolist() == of_rows
    assert Rows(data).lengths().tolist() == [sample.num_tokens for sample in data]
    assert data[5].id == f"{paths[1]}:1#1"


def test_rows_of_sft_have_offsets_too(tmp_path: Path) -> None:
    text = {"text": "Once upon a time there was a small cat."}
    data = load(tmp_path, [text, {"text": "Once"}, text], "sft", limit=9, too_long="split")
    lines = [int(sample.id.rpartition(":")[2].partition("#")[0]) for sample in data]
    second, third = lines.index(2), lines.index(3)
    assert rows_of(data) == [range(second), range(second, third), range(third, len(lines))]
    assert lines.count(1) > 1


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"targets": "all"}, "preference", "data.targets=all would learn the prompts"),
        ({"too_long": "split"}, "unpaired", "data.too_long=split would take the answers"),
        ({"step_separator": "x"}, "preference", "expected it for stepwise data only"),
        ({"step_separator": "x"}, "sft", "expected it for stepwise data only"),
    ],
)
def test_options_that_a_kind_has_no_use_for(
    options: dict[str, Any], kind: Kind, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, [PAIR], kind, **options)


def test_rows_themselves(tmp_path: Path) -> None:
    config = DataConfig(train=write(tmp_path / "a.jsonl", [PAIR, LIST]))
    rows = list(read_rows(config, "train", "preference"))
    assert all(isinstance(row, Answers) for row in rows)
    texts = [sample for row in rows for sample in Renderer(tiny_tokenizer()).render(best_row(row))]
    assert [learned(sample) for sample in texts] == [
        "2 plus 3 is 5.<|im_end|>",
        "It is 5.<|im_end|>",
    ]
    with pytest.raises(DataError, match="expected messages"):
        list(read_rows(config, "train"))
