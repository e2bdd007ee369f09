"""Loading end to end: samples, cache, report, mixtures, errors, and rows of any JSON at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.tiny_tokenizers import QWEN3, tiny_tokenizer

from taut.data.batching import Rows
from taut.data.dataset import (
    BINS,
    MAX_LISTED,
    Dataset,
    build_renderer,
    load_dataset,
    read_rows,
)
from taut.data.render.images import BATCH_ROWS
from taut.data.render.render import Renderer
from taut.data.settings import BatchConfig, DataConfig, Source
from taut.data.store import cache
from taut.data.store.shards import REQUIRED, LengthCounts, Shard
from taut.errors import ConfigError, DataError, EmptyError, OutputError

CHAT = {
    "messages": [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Thank you!"},
        {"role": "assistant", "content": "You are welcome."},
    ]
}
DOCUMENT = {"text": "Once upon a time there was a small cat, and the cat sat on the mat."}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    cache: Path, *, renderer: Renderer | None = None, limit: int = 512, **options: Any
) -> Dataset:
    config = DataConfig(cache=str(cache), **options)
    return load_dataset(
        config, "train", renderer or build_renderer(config, tiny_tokenizer()), limit
    )


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*"))


def test_samples_from_disk_are_those_rendered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT, DOCUMENT])
    data = load(tmp_path / "c", train=path, renderer=Renderer(tiny_tokenizer(), QWEN3))
    assert [sample.id for sample in data] == [f"{path}:1#1", f"{path}:1#2", f"{path}:2"]
    assert [data.sample_id(index) for index in range(3)] == [sample.id for sample in data]
    sizes = [sample.num_tokens for sample in data]
    assert np.concatenate(list(data.sizes("tokens"))).tolist() == sizes
    assert [data.length(index) for index in range(len(data))] == sizes
    assert data.longer_than(min(sizes), 1) == [int(np.argmax(np.array(sizes) > min(sizes)))]
    targets = [sample.num_targets for sample in data]
    assert np.concatenate(list(data.sizes("targets"))).tolist() == targets
    assert data[-1].target_at_N.tolist() == list(range(1, data[2].num_tokens))
    assert data[0].ids_T.dtype == np.int64
    assert data.report.num_rows == 2
    assert data.report.num_tokens == sum(sizes)
    assert len(data[0:2]) == 2
    with pytest.raises(IndexError):
        data[3]


def test_a_second_load_does_not_tokenize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT, DOCUMENT])
    first = load(tmp_path / "c", train=path)
    tokenizer = tiny_tokenizer()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized again")

    for name in ("__call__", "apply_chat_template", "encode"):
        monkeypatch.setattr(type(tokenizer), name, refuse)
    second = load(tmp_path / "c", train=path, renderer=Renderer(tokenizer))
    assert second.report.is_cached
    assert not first.report.is_cached
    assert second.fingerprint == first.fingerprint
    assert [sample.ids_T.tolist() for sample in second] == [
        sample.ids_T.tolist() for sample in first
    ]
    assert [sample.id for sample in second] == [sample.id for sample in first]
    with pytest.raises(AssertionError, match="tokenized again"):
        load(tmp_path / "c", train=path, renderer=Renderer(tokenizer), targets="all", limit=99)


@pytest.mark.parametrize(
    "change",
    [
        {"min_length": 3},
        {"limit": 511},
        {"too_long": "drop"},
        {"targets": "last"},
        {"ignore_keys": ("x",)},
        {"columns": {"tools": "messages"}, "format": "text"},
    ],
    ids=str,
)
def test_every_option_belongs_to_the_key(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [{**CHAT, **DOCUMENT}])
    load(tmp_path / "c", train=path, format="messages")
    options = {"format": "messages", **change}
    assert not load(tmp_path / "c", train=path, **options).report.is_cached


def test_content_tokenizer_and_template_belong_to_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT])
    load(tmp_path / "c", train=path)
    grown = tiny_tokenizer()
    grown.add_tokens(["<new>"])
    assert not load(tmp_path / "c", train=path, renderer=Renderer(grown)).report.is_cached
    other = Renderer(tiny_tokenizer(), QWEN3)
    assert not load(tmp_path / "c", train=path, renderer=other).report.is_cached
    assert load(tmp_path / "c", train=path).report.is_cached
    write(tmp_path / "a.jsonl", [CHAT, CHAT])
    assert not load(tmp_path / "c", train=path).report.is_cached


def test_damaged_entries_are_made_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT, DOCUMENT])
    expected = [sample.ids_T.tolist() for sample in load(tmp_path / "c", train=path)]

    def flip(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)

    damages = [
        lambda entry: flip(entry / "00000" / "ids.npy"),
        lambda entry: (entry / "00000" / "offsets.npy").write_bytes(b""),
        lambda entry: (entry / "00000" / "line.npy").unlink(),
        lambda entry: (entry / "00000" / "meta.json").write_text('{"num_rows": 1'),
        lambda entry: (entry / "manifest.json").write_text("[]"),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: shutil.rmtree(entry / "00000"),
    ]
    for damage in damages:
        (entry,) = (tmp_path / "c").iterdir()
        damage(entry)
        data = load(tmp_path / "c", train=path)
        assert not data.report.is_cached
        assert "damaged" in data.report.decisions[0]
        assert [sample.ids_T.tolist() for sample in data] == expected
        assert load(tmp_path / "c", train=path).report.is_cached
        assert len(list((tmp_path / "c").iterdir())) == 1


def test_a_faster_process_wins(tmp_path: Path) -> None:
    data = load(tmp_path / "c", train=write(tmp_path / "a.jsonl", [CHAT]))
    (part,) = data.parts
    before = (tmp_path / "c" / part.key).stat().st_ino
    cache.save(tmp_path / "c", part.key, lambda _: iter(part.shards))
    assert (tmp_path / "c" / part.key).stat().st_ino == before
    assert [path.name for path in (tmp_path / "c").iterdir()] == [part.key]


def test_errors_leave_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT] * 300 + [{"messages": []}])
    with pytest.raises(
        DataError, match=r"a.jsonl:301: messages is empty, the only such row of 301"
    ):
        load(tmp_path / "c", train=path)
    assert files(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_empty_rows_are_counted_or_left_out(tmp_path: Path, suffix: str) -> None:
    import pandas as pd

    answers = ["five", None, "six", None]
    frame = pd.DataFrame({"prompt": ["2 + 3?"] * 4, "completion": answers})
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True)
    message = "a.*:2: completion is empty, the first of 2 such rows of 4; .*data.empty=drop$"
    with pytest.raises(EmptyError, match=message):
        load(tmp_path / "c", train=str(path))
    data = load(tmp_path / "c", train=str(path), empty="drop")
    assert (len(data), data.report.num_rows) == (2, 4)
    reasons = [(Path(row.place).name, row.reason) for row in data.report.dropped]
    assert reasons == [(f"a.{suffix}:{n}", "completion is empty") for n in (2, 4)]
    config = DataConfig(train=str(path), empty="drop")
    assert len(list(read_rows(config, "train"))) == 2


def test_what_was_read_in_another_way_is_counted(tmp_path: Path) -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief."}, *CHAT["messages"]]}
    data = load(tmp_path / "c", train=write(tmp_path / "a.jsonl", [CHAT, row]))
    assert data.read_as == {"conversation": 2, "developer": 1}
    assert +data.forms == {"conversation": 2}


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(OutputError, match=r"set data.cache or TAUT_CACHE"):
        load(tmp_path / "c", train=write(tmp_path / "a.jsonl", [CHAT]))
    assert files(tmp_path) == ["a.jsonl", "c"]


@pytest.mark.parametrize("num_frozen", [0, 500_000])
def test_what_the_garbage_collector_was_told_to_leave_alone_stays_so(
    num_frozen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that were frozen before rows are tokenized are not thawed after it; those frozen for it are."""
    told: list[str] = []
    monkeypatch.setattr("gc.get_freeze_count", lambda: num_frozen)
    monkeypatch.setattr("gc.freeze", lambda: told.append("freeze"))
    monkeypatch.setattr("gc.unfreeze", lambda: told.append("unfreeze"))
    load(tmp_path / "c", train=write(tmp_path / "a.jsonl", [CHAT]))
    assert told == ([] if num_frozen else ["freeze", "unfreeze"])


def test_cache_directory_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "e"))
    config = DataConfig(train=write(tmp_path / "a.jsonl", [CHAT]))
    load_dataset(config, "train", Renderer(tiny_tokenizer()), 512)
    assert len(list((tmp_path / "e").iterdir())) == 1


def test_mixture(tmp_path: Path) -> None:
    chats = write(tmp_path / "a.jsonl", [CHAT] * 3)
    texts = write(tmp_path / "b.jsonl", [{"body": DOCUMENT["text"]}] * 2)
    sources = [chats, Source(path=texts, weight=0.5, columns={"text": "body"})]
    data = load(tmp_path / "c", train=sources)
    order = Rows(data).order(BatchConfig(), 0, 4)
    assert (order.counts, order.weights) == ((3, 2), (1.0, 0.5))
    assert data[3].id == f"{texts}:1"
    heavier = [chats, Source(path=texts, weight=2, columns={"text": "body"})]
    other = load(tmp_path / "c", train=heavier)
    assert other.report.is_cached
    assert other.fingerprint != data.fingerprint


def test_a_path_named_twice_gives_samples_of_their_own_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"one": "first words here", "two": "others"}])
    sources = [Source(path=path, columns={"text": name}) for name in ("one", "two")]
    data = load(tmp_path / "c", train=sources, ignore_keys=("one", "two"))
    assert [sample.id for sample in data] == [f"{path}:1", f"{path}(2):1"]


def test_a_weight_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [DOCUMENT] * 4)
    rare = [path, Source(path=path, weight=0.1)]
    with pytest.raises(
        ConfigError,
        match=r"\(2\) has weight 0\.1; expected one that gives at least one of its 4 samples",
    ):
        load(tmp_path / "c", train=rare)
    pairs = [{"prompt": "who\n", "chosen": "a cat", "rejected": "a dog"}] * 2
    rare = [Source(path=write(tmp_path / "pairs.jsonl", pairs), weight=0.2)]
    config = DataConfig(cache=str(tmp_path / "c"), train=rare)
    with pytest.raises(
        ConfigError, match=r"has weight 0\.2; expected one that gives at least one of its 2 rows"
    ):
        load_dataset(config, "train", Renderer(tiny_tokenizer()), 512, kind="preference")
    config = DataConfig(cache=str(tmp_path / "c"), eval=[Source(path=path, weight=2)])
    with pytest.raises(ConfigError, match=r"data\.eval: .* has weight 2; expected none"):
        load_dataset(config, "eval", Renderer(tiny_tokenizer()), 512)


def test_what_was_cut_and_dropped_is_listed(tmp_path: Path) -> None:
    chats = write(tmp_path / "a.jsonl", [CHAT, CHAT, DOCUMENT])
    for _ in range(2):
        data = load(tmp_path / "c", train=chats, too_long="truncate", limit=16)
        assert [incident.place for incident in data.report.dropped] == [f"{chats}:1", f"{chats}:2"]
        assert [incident.place for incident in data.report.cut] == [f"{chats}:3"]
        assert (data.lengths.shortest, data.lengths.longest, len(data)) == (16, 16, 1)
        assert f"2 dropped (first {chats}:1: " in str(data.report)
        described = data.described("train")
        assert described["lengths"] == {"edges": [16, 17], "counts": [1]}
        assert (described["num_rows"], described["num_samples"]) == (3, 1)
        assert (described["num_dropped"], described["num_cut"]) == (2, 1)
        assert [entry["place"] for entry in described["cut"]] == [f"{chats}:3"]


def test_a_set_is_described_in_a_bounded_form(tmp_path: Path) -> None:
    texts = [{"text": "the cat " * number} for number in range(1, 301)]
    path = write(tmp_path / "a.jsonl", texts)
    data = load(tmp_path / "c", train=path, too_long="drop", limit=60)
    described = data.described("train")
    edges, counts = described["lengths"]["edges"], described["lengths"]["counts"]
    assert len(edges) == len(counts) + 1 <= BINS + 1 and sum(counts) == len(data)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        assert count == data.lengths.num_over(low - 1) - data.lengths.num_over(high - 1)
    assert described["num_dropped"] > MAX_LISTED == len(described["dropped"])
    assert described["sources"] == [
        {"path": str(path), "weight": 1.0, "num_rows": 300, "num_samples": len(data)}
    ]


def test_split_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [DOCUMENT])
    data = load(tmp_path / "c", train=path, too_long="split", limit=8)
    eos = tiny_tokenizer().eos_token_id
    assert [sample.id for sample in data][:2] == [f"{path}:1#1", f"{path}:1#2"]
    assert [eos in sample.ids_T for sample in data] == [False] * (len(data) - 1) + [True]


def test_nothing_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT])
    with pytest.raises(DataError, match=r"none of its 1 row is left \(.*:1: .* max_length 4\)"):
        load(tmp_path / "c", train=path, too_long="drop", limit=4)
    with pytest.raises(DataError, match="has no rows"):
        load(tmp_path / "c", train=write(tmp_path / "b.jsonl", []))


def test_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.train is not set"):
        load(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"data.template: cannot read .*none.jinja"):
        load(tmp_path / "c", template=str(tmp_path / "none.jinja"))
    path = write(tmp_path / "a.jsonl", [CHAT])
    with pytest.raises(ConfigError, match="did you mean 'messages'"):
        load(tmp_path / "c", train=path, columns={"mesages": "x"})


def test_a_template_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(QWEN3)
    path = write(tmp_path / "a.jsonl", [CHAT])
    assert len(load(tmp_path / "c", train=path, template=str(tmp_path / "t.jinja"))) == 2


def test_a_row_without_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT, {"messages": CHAT["messages"][:1]}])
    with pytest.raises(DataError, match=r"a.jsonl:2: the row has no targets"):
        load(tmp_path / "c", train=path)
    data = load(tmp_path / "c", train=path, without_targets="drop")
    assert [incident.place for incident in data.report.dropped] == [f"{path}:2"]


def test_data_that_change_while_they_are_tokenized_leave_no_entry(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", [DOCUMENT] * (BATCH_ROWS + 1)))

    class Meddling(Renderer):
        def render_all(self, rows: Any) -> Any:
            os.utime(path, ns=(0, 0))
            return super().render_all(rows)

    with pytest.raises(DataError, match=r"a\.jsonl: the data changed while they were read"):
        load(tmp_path / "c", train=str(path), renderer=Meddling(tiny_tokenizer()))
    assert not (tmp_path / "c").exists()


def test_sources_that_changed_are_named(tmp_path: Path) -> None:
    kept, lost = (write(tmp_path / f"{name}.jsonl", [CHAT]) for name in ("kept", "lost"))
    datasets.Dataset.from_list([CHAT]).save_to_disk(tmp_path / "hf")
    saved = str(tmp_path / "hf")
    for is_cached in (False, True):
        data = load(tmp_path / "c", train=[kept, lost, saved, lost])
        assert data.report.is_cached is is_cached
        assert data.changed_sources() == []
    (arrow,) = Path(saved).glob("*.arrow")
    os.utime(arrow, ns=(0, 0))
    assert data.changed_sources() == [saved]
    Path(lost).unlink()
    assert data.changed_sources() == [lost, saved]


def try_to_load(cache: Path, path: str, renderer: Renderer) -> str:
    """``read``, or the message of the one kind of error that data may cause."""
    try:
        load(cache, train=path, renderer=renderer)
    except DataError as error:
        return str(error)
    return "read"


WORDS = st.sampled_from(
    ["role", "content", "user", "assistant", "tool", "name", "function", "text"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | VALUES},
        optional={
            "content": st.text(max_size=20) | VALUES,
            "tool_calls": st.lists(st.fixed_dictionaries({"name": WORDS, "arguments": VALUES})),
            "train": st.booleans() | VALUES,
        },
    ),
    max_size=4,
)
NAMES = ("messages", "conversations", "prompt", "completion", "instruction", "output", "text")
ROWS = VALUES | st.dictionaries(st.sampled_from([*NAMES, "tools"]), TURNS | VALUES, max_size=3)


@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama3"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(row=ROWS)
def test_any_json_is_read_or_refused_by_line(tmp_path: Path, template: str, row: object) -> None:
    path = write(tmp_path / "fuzz.jsonl", [CHAT, row])
    renderer = Renderer(tiny_tokenizer(template))
    outcome = try_to_load(tmp_path / "c", path, renderer)
    assert outcome == "read" or outcome.startswith(f"{path}:2")
    assert "\n" not in outcome


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(line=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused_by_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b"\n" + line.replace(b"\n", b" ") + b"\n")
    outcome = try_to_load(tmp_path / "c", str(path), Renderer(tiny_tokenizer()))
    assert outcome == "read" or outcome.startswith(f"{path}:2")


def test_what_a_killed_process_left_in_the_cache_is_removed_and_what_is_the_users_is_not(
    tmp_path: Path,
) -> None:
    left = tmp_path / "taut-cache-abcdefgh"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    (left / "new").mkdir()
    (left / "new" / "ids.npy").write_bytes(b"")
    (tmp_path / ".mine").mkdir()
    shard = Shard({name: np.zeros(1) for name in REQUIRED}, 1, ())
    assert cache.load(tmp_path, "f" * 64) == (None, "not in the cache")
    assert [path.name for path in tmp_path.iterdir()] == [".mine"]
    cache.save(tmp_path, "f" * 64, lambda _: iter([shard]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "f" * 64]


def test_counts_of_lengths_say_what_the_lengths_say() -> None:
    random = np.random.default_rng(0)
    for size in (3, 4, 9, 200):
        length_S = random.integers(1, 40, size)
        counts = LengthCounts.joined(map(LengthCounts.of, np.array_split(length_S, 3)))
        found = counts.shortest, counts.median, counts.longest
        assert found == tuple(np.quantile(length_S, [0, 0.5, 1]).astype(int))
        assert counts.num_over(20) == (length_S > 20).sum()
