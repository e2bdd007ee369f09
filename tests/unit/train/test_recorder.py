"""What a run records: tokens of chosen samples as the step computed them, every rollout, and no more than is asked."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.helpers.chat_runs import PLAIN, chats, events, save_model, sft, write_rows
from tests.helpers.online_runs import keys_of, save_models
from tests.helpers.run_directories import recorded_in
from tests.helpers.tiny_samples import nested_family
from transformers import AutoModelForCausalLM

import taut
from taut.cli import main
from taut.data.packing import pack
from taut.io import tables
from taut.io.tables import read_tables
from taut.run.recorded import Recorded, Row, why_unlearned
from taut.train.recorder import LEVELS, Recorder, _shared, choose
from taut.train.settings import LogConfig, TokenRecordConfig
from taut.train.trainer import StepReport
from taut_tools.recorded import step as show_step


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [row for batch in read_tables(folder) for row in batch.to_pylist()]


SHOWS = """\
import json
class Shows:
    def __init__(self, out):
        self.path = out / "shown.jsonl"
    def __call__(self, event):
        pass
    def samples(self, step, rows):
        with self.path.open("a") as file:
            file.write(json.dumps([step, rows]) + "\\n")
"""


def shows(folder: Path) -> list[str]:
    """``log.sinks`` with one that writes what it is shown to out/shown.jsonl."""
    path = folder / "shows.py"
    path.write_text(SHOWS)
    return [f"{path}:Shows"]


def shown_in(out: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    return [json.loads(line) for line in (out / "shown.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    model = save_model(place / "model")
    rows = write_rows(place / "rows.jsonl", chats(24))
    sft(
        model,
        rows,
        place / "out",
        steps=5,
        **PLAIN,
        **{"log.tokens.every": 2, "log.tokens.samples": 4, "log.sinks": shows(place)},
    )
    return place


def test_chosen_steps_have_their_worst_and_some_other_samples(run: Path) -> None:
    rows, steps = rows_in(run / "out/tokens/rank-00000"), events(run / "out", "step")
    assert [row["step"] for row in rows] == [step for step in (1, 2, 4, 5) for _ in range(4)]
    for step in (1, 2, 4, 5):
        nll = dict(zip(steps[step - 1]["sample_ids"], steps[step - 1]["sample_nll"], strict=True))
        mine = [row for row in rows if row["step"] == step]
        assert {row["sample_id"] for row in mine} <= nll.keys()
        worst = sorted(nll, key=lambda sample_id: -nll[sample_id])[:2]
        assert {row["sample_id"] for row in mine if row["why"] == "worst"} == set(worst)
        for row in mine:
            assert -np.mean(row["logp_N"]) == pytest.approx(nll[row["sample_id"]], rel=1e-4)


def test_logprobs_are_those_of_the_library_for_the_sample_alone(run: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float64)
    vocabulary = pq.read_table(run / "out/tokens/vocabulary.parquet")["bytes"].to_pylist()
    first = [row for row in rows_in(run / "out/tokens/rank-00000") if row["step"] == 1]
    for row in first:
        ids, at = torch.tensor(row["ids_T"]), torch.tensor(row["target_at_N"])
        with torch.no_grad():
            logp = model(ids[None], use_cache=False).logits[0].log_softmax(-1)[at - 1, ids[at]]
        assert row["logp_N"] == pytest.approx(logp.tolist(), abs=1e-5)
        assert row["weight_N"] == [1.0] * len(row["logp_N"])
        text = b"".join(vocabulary[index] for index in row["ids_T"]).decode()
        assert text.startswith("<|im_start|>") and "assistant\n" in text


@pytest.mark.parametrize(
    ("written", "method", "times"),
    [
        ("write_column", None, 1),
        ("_Stream", "append", 1),
        ("_Stream", "sync", 1),
        ("_seal", None, 0),
    ],
)
def test_a_full_disk_costs_the_records_and_not_the_run(
    written: str,
    method: str | None,
    times: int,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = getattr(tables, written) if method else tables
    monkeypatch.setattr(place, method or written, is_full)
    keys = {"log.tokens.every": 1, "checkpoint.every": 1, "check": "off", "contract.prompts": 0}
    out = sft(run / "model", run / "rows.jsonl", tmp_path / "out", steps=2, **PLAIN | keys).out
    told = [event["detail"] for event in events(out, "warning") if event["name"] == "record"]
    assert len(told) == times and all(
        "nothing more is recorded: cannot write" in line and "No space left" in line
        for line in told
    )
    assert len(events(out, "step")) == 2 and (out / "model").is_dir()
    monkeypatch.undo()
    assert {row["step"] for row in rows_in(out / "tokens/rank-00000")} <= {1, 2}


def test_sinks_are_shown_the_texts_of_recorded_samples(run: Path) -> None:
    rows = rows_in(run / "out/tokens/rank-00000")
    told = [(step, row) for step, rows in shown_in(run / "out") for row in rows]
    assert [(step, row["sample_id"]) for step, row in told] == [
        (row["step"], row["sample_id"]) for row in rows
    ]
    for (_, row), recorded in zip(told, rows, strict=True):
        assert row["prompt"].startswith("<|im_start|>") and row["prompt"].endswith("assistant\n")
        assert row["answer"].rstrip().endswith("<|im_end|>") and "assistant" not in row["answer"]
        assert row["logprob"] == pytest.approx(np.mean(recorded["logp_N"]))
        assert row["reward"] is None and row["advantage"] is None


def test_nothing_is_recorded_where_nothing_is_asked_for(run: Path, tmp_path: Path) -> None:
    off = {"log.tokens.samples": 0, "log.rollouts.max_gib": 0}
    sft(run / "model", run / "rows.jsonl", tmp_path / "out", steps=2, **PLAIN, **off)
    assert not (tmp_path / "out/tokens").exists()


def test_a_step_that_is_warned_of_is_recorded_and_the_samples_named_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taut.train.monitors import Spikes

    def warn(self: Spikes, report: StepReport, trainer: Any) -> None:
        if report.step == 3:
            trainer.emit("warning", name="odd", step=3, sample_ids=report.sample_ids[-1:])

    monkeypatch.setattr(Spikes, "__call__", warn)
    keys = {"log.tokens.every": 0, "log.tokens.samples": 2}
    sft(run / "model", run / "rows.jsonl", tmp_path / "out", steps=5, **PLAIN, **keys)
    rows = rows_in(tmp_path / "out/tokens/rank-00000")
    named = events(tmp_path / "out", "step")[2]["sample_ids"][-1]
    assert sorted({row["step"] for row in rows}) == [1, 3, 5]
    assert [row["why"] for row in rows if row["sample_id"] == named and row["step"] == 3] == ["odd"]


def test_every_rollout_is_recorded_and_its_tokens_have_what_trained_them(tmp_path: Path) -> None:
    model = save_models(tmp_path)
    keys = keys_of("grpo", model, tmp_path, steps=4) | {"rollout.epochs": 2, "log.tokens.every": 1}
    out = taut.grpo(**keys, **{"log.sinks": shows(tmp_path)}).out
    rollouts = rows_in(out / "rollouts")
    told = events(out, "rollout")
    assert [row["step"] for row in rollouts] == [
        event["step"] for event in told for _ in range(event["completions"])
    ]
    for event in told:
        mine = [row for row in rollouts if row["step"] == event["step"]]
        rewards = [row["reward"] for row in mine if row["is_kept"] and row["reward"] is not None]
        assert np.mean(rewards) == pytest.approx(event["reward"])
    by_name = {row["sample_id"]: row for row in rollouts}
    seen = 0
    for row in rows_in(out / "tokens/rank-00000"):
        whole, streams = by_name[row["sample_id"]], dict(row["streams"])
        assert row["ids_T"] == whole["ids_T"] and row["target_at_N"] == whole["sampled_at_N"]
        assert streams["advantage_N"] == whole["advantage_N"]
        if row["step"] % 2 == 0:  # the second pass over a rollout: the policy has moved
            ratio = np.exp(np.subtract(row["logp_N"], streams["old_logp_N"]))
            assert streams["ratio_N"] == pytest.approx(ratio.tolist(), rel=1e-4)
            assert set(streams["clipped_N"]) <= {-1.0, 0.0, 1.0}
            seen += 1
    assert seen
    told = shown_in(out)  # rollouts, when they are sampled, and no tokens beside them
    assert [step for step, _ in told] == sorted({row["step"] for row in rollouts})
    for step, shown in told:
        mine = [row for row in rollouts if row["step"] == step][: len(shown)]
        assert [(row["answer"], row["reward"]) for row in shown] == [
            (row["text"], row["reward"]) for row in mine
        ]
        assert shown[0]["prompt"].startswith(("user: ", "system: "))


def test_shared_prefixes_are_named(tmp_path: Path) -> None:
    samples = nested_family(97)
    packed = pack(samples)
    for row, sample_id in enumerate(packed.sample_ids):
        mine = next(sample for sample in samples if sample.id == sample_id)
        others = [sample for sample in samples if sample.id != sample_id]
        num_shared, names = _shared(packed, row)
        common = {
            other.id: int(
                np.argmin([*(a == b for a, b in zip(mine.ids_T, other.ids_T, strict=False)), False])
            )
            for other in others
        }
        assert num_shared <= max(common.values())
        assert all(common[name] >= num_shared for name in names) and bool(names) == bool(num_shared)
    assert any(_shared(packed, row)[0] for row in range(packed.num_samples))


def test_steps_are_recorded_more_seldom_as_space_runs_out() -> None:
    config = LogConfig(tokens=TokenRecordConfig(every=10, max_mib=1))
    recorder, table = Recorder(config), SimpleNamespace(num_bytes=0)
    recorder.out, recorder._tables[recorder._place] = Path("out"), table  # type: ignore[assignment]
    counts = []
    for used in (0, 0.4, 0.6, 0.8, 0.99999, 2):
        table.num_bytes = int(used * 2**20)
        counts.append(sum(recorder._is_due(step, 10**9) for step in range(2, 12_802)))
    assert counts == [1280, 1280, 640, 320, 1, 1]
    assert recorder._level() == LEVELS


def test_samples_are_chosen_alike_wherever_it_is_asked() -> None:
    ids = [f"rows.jsonl:{number}" for number in range(20)]
    nll = {sample_id: float(number % 7) for number, sample_id in enumerate(ids)}
    report = StepReport(4, 1.0, {}, 1, 1, 1, ids, [], nll=nll)
    chosen = choose(report, 6, seed=3)
    assert choose(report, 6, seed=3) == chosen and choose(report, 6, seed=4) != chosen
    assert len({one.sample_id for one in chosen}) == 6
    assert [one.why for one in chosen] == ["worst"] * 3 + ["random"] * 3
    assert len(choose(report, 99, seed=3)) == 20
    without = StepReport(4, 1.0, {}, 1, 1, 1, ids, [])
    assert [one.why for one in choose(without, 2, 0)] == ["random"] * 2
    assert not math.isnan(sum(nll.values())) and recorded_in(Path("nowhere")) == []


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(words)
    return code, "".join(capsys.readouterr())


def test_a_step_is_shown_with_what_was_recorded_of_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run / "out"
    code, said = printed(["show", "--step", "4", str(out)], capsys)
    step = events(out, "step")[3]
    assert code == 0 and f"step 4: loss {step['loss']:.5g}" in said
    assert all(sample_id in said for sample_id in step["sample_ids"])
    assert said.count("least expected: ") == 4 and "(worst)" in said and "(random)" in said
    assert (
        "no tokens were recorded of this step; steps 1, 2, 4, 5 have some"
        in (printed(["show", str(out), "step=3"], capsys)[1])
    )
    assert (
        "has no step 9; expected one of its steps 1 to 5"
        in (printed(["show", str(out), "step=9"], capsys)[1])
    )


def test_rollouts_are_printed_group_by_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    keys = keys_of("grpo", save_models(tmp_path), tmp_path, steps=2, **{"checkpoint.every": 2})
    keys["rewards"] = [*keys["rewards"], {"name": "numeric", "weight": 0}]
    out = str(taut.grpo(**keys).out)
    rows = [row for row in rows_in(Path(out) / "rollouts") if row["step"] == 2]
    code, said = printed(["rollouts", out, "sort=reward", "groups=99"], capsys)
    assert code == 0 and f"step 2: 4 prompts, {len(rows)} answers, mean reward " in said
    assert all(row["prompt_id"] in said for row in rows) and "What is" in said
    replies = {part["name"]: part["reply"] for part in rows[0]["rewards"]}
    assert replies == {"length_target": None, "numeric": "the answer has no number"}
    assert "numeric:" in said
    _, said = printed(["rollouts", out, "--json"], capsys)
    assert [json.loads(line)["ids_T"] for line in said.splitlines()] == [r["ids_T"] for r in rows]
    assert "has no rollouts of step 7" in printed(["rollouts", out, "step=7"], capsys)[1]
    assert "has no rollouts; expected" in printed(["rollouts", str(run / "out")], capsys)[1]
    assert "is not a taut run" in printed(["rollouts", str(tmp_path)], capsys)[1]
    forget_replies(Path(out) / "rollouts")
    taut.resume(out, steps=3)
    told = {
        step: [
            part["reply"] for row in Recorded(Path(out)).rollouts(step) for part in row["rewards"]
        ]
        for step in (1, 2, 3)
    }
    assert len(told[1]) == len(told[2]) == len(told[3])
    assert {*told[1], *told[2]} == {None} and any(told[3])


def forget_replies(folder: Path) -> None:
    """A table as an earlier version wrote it, whose rewards have no reply."""
    for path in folder.iterdir():
        table = pq.read_table(path)
        at = table.schema.get_field_index("rewards")
        part = pa.struct(
            [field for field in table.schema.field(at).type.value_type if field.name != "reply"]
        )
        bare = pa.array(table["rewards"].to_pylist(), pa.list_(part))
        pq.write_table(table.set_column(at, "rewards", bare), path)


def answer(name: str, reward: float | None, advantage: float | None, kind: str = "r") -> Row:
    rewards = [] if not kind else [{"name": kind, "value": reward}]
    advantages = None if advantage is None else [advantage, advantage]
    row = {"sample_id": name, "reward": reward, "rewards": rewards, "advantage_N": advantages}
    return row | {"is_kept": True}


def test_what_is_said_to_be_learned_is_what_was_trained_on() -> None:
    """A critic, a penalty, imitation and distillation learn from groups whose rewards are all equal."""
    equal = [answer("a", 1.0, 0.3), answer("b", 1.0, -0.3)]
    assert why_unlearned(equal, {"a", "b"}) is None
    assert why_unlearned([answer("a", 1.0, 0.0), answer("b", 1.0, 0.0)], {"a", "b"}) == (
        "all rewards are 1"
    )
    imitated = [answer("a", 1.0, None), answer("b", 1.0, None)]
    assert why_unlearned(imitated, {"a"}) is None
    assert why_unlearned(imitated, {"c"}) == "all rewards are 1"
    assert why_unlearned([answer("a", 1.0, None), answer("b", 0.0, None)], {"c"}) == (
        "none of its answers was chosen, or all advantages are 0"
    )
    unjudged = [answer("a", 0.0, None, ""), answer("b", 0.0, None, "")]
    assert why_unlearned(unjudged, {"a", "b"}) is None and why_unlearned(unjudged, None) is None
    assert why_unlearned(equal, None) == "all rewards are 1"
    assert why_unlearned([answer("a", None, None)], None) == "no answer has a reward"


def test_a_step_without_samples_or_with_one_without_targets_is_shown() -> None:
    event = {"step": 3, "sample_ids": [], "loss": 0.0, "grad_norm": 0.0, "num_targets": 0}
    assert show_step._headline(event) == "step 3: skipped, as there was nothing to learn from"
    table = show_step._samples({"sample_ids": ["a", "b", "c"], "sample_nll": ["nan", 0.5, 2.0]})
    assert [[*column.cells] for column in table.columns] == [["2", "0.5", ""], ["c", "b", "a"]]
