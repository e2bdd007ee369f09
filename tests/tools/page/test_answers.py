"""The answers of the page: what a run recorded, of each kind of run and at any moment; never a path of a question."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.helpers.page_runs import (
    HOSTILE,
    leave_open,
    resume,
    rollout_row,
    rollout_writer,
    start,
    step,
    token_row,
    token_writer,
    warning,
    write_run,
)

from taut.errors import DataError, OutputError
from taut.io import tables
from taut.io.tables import TableReader
from taut.run.recorded import Recorded
from taut_tools.page.answers import MOST_NAMES, MOST_PLACES, Answers, Unknown, find_runs

END = {
    "kind": "end",
    "time": 300.0,
    "outcome": "finished",
    "step": 3,
    "stop": {"asked": 4, "ended": 3},
}


def ask(out: Path, question: str) -> Any:
    """The answer about the run in ``out``, as JSON has it."""
    answer = Answers({"a": out}).answer(question)
    return json.loads(json.dumps(answer, allow_nan=False))


def test_a_run_with_very_many_curves_is_shown(tmp_path: Path) -> None:
    many = {f"metric_{number:05}": 0.5 for number in range(20_000)}
    out = write_run(tmp_path / "a", [start(), {**step(1), **many}])
    began = time.process_time()
    answer = ask(out, "run/a/overview")
    assert time.process_time() - began < 5
    assert len(answer["curves"]) == MOST_NAMES and "train/loss" in answer["headline"]
    assert answer["num_unlisted"] >= 20_000 - MOST_NAMES
    assert ask(out, "run/a/curves?names=train/metric_19999")["series"]["train/metric_19999"]


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    measured = {
        "exact_match": 0.6,
        "exact_match_low": 0.4,
        "exact_match_high": 0.8,
        "num_prompts": 9,
    }
    check = {
        "kind": "check",
        "time": 1.0,
        "name": "data.repeats",
        "outcome": "warning",
        "detail": "d",
    }
    out = write_run(
        tmp_path_factory.mktemp("sft") / "out",
        [
            start(dropped=[f"a.jsonl:{n}: it is empty: no text" for n in range(300)]),
            {**check, "evidence": ["a.jsonl:1 = a.jsonl:2"], "remedy": "look", "value": 3},
            {**check, "name": "loss.finite", "outcome": "failed"},
            *(step(n) for n in range(1, 4)),
            warning(2, sample_ids=["a.jsonl:4", "a.jsonl:3"]),
            {"kind": "eval", "time": 1.0, "step": 3, "loss": 1.5, **measured},
            {"kind": "best", "time": 1.0, "step": 3, "name": "exact_match", "value": 0.6},
            END,
        ],
    )
    with_tokens = token_writer(out)
    with_tokens.append([token_row(1, "a.jsonl:2"), token_row(1, "a.jsonl:3", "random")])
    with_tokens.append([token_row(3, "a.jsonl:2", "grad_norm_spike", entropy_N=[0.5] * 4)])
    with_tokens.close()
    other = token_writer(out, rank=1)
    other.append([token_row(2, "a.jsonl:4")])
    leave_open(other)
    return out


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = write_run(tmp_path_factory.mktemp("grpo") / "out", [start(), step(1)], method="grpo")
    calls = [{"function": {"name": "calculator", "arguments": '{"sum": "2+2"}'}}]
    said = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": HOSTILE[:-1]},
    ]
    turns = {"num_turns": 2, "num_calls": 1, "sampled_at_N": [5, 7], "messages": json.dumps(said)}
    part = {"name": "judge", "value": None, "error": "no answer", "reason": None}
    odd = {"error": "the tool failed", "rewards": [part], "finish_reason": "error"}
    writer = rollout_writer(out)
    for number in (1, 2, 4):
        writer.append(
            [
                rollout_row(number, 0, 0, 1.0, **turns, logp_N=[-1.0, -2.0]),
                rollout_row(number, 0, 1, 0.0),
                rollout_row(number, number, 0, 0.5, is_kept=False),
                rollout_row(number, number, 1, 0.5, is_kept=False),
                rollout_row(number, 9, 0, None, **odd, prompt=json.dumps("2 + 2 =")),
            ]
        )
    leave_open(writer)
    return out


def test_the_overview_says_where_a_run_stands(sft: Path) -> None:
    found = ask(sft, "run/a/overview")
    assert (found["step"], found["num_steps"], found["started"], found["method"]) == (
        3,
        9,
        100.0,
        "sft",
    )
    assert (
        found["state"] == "stopped" and found["end"]["outcome"] == "finished"
    )  # model/ is not there
    assert found["decisions"][0]["reason"] == "the device is cpu"
    assert found["headline"][:3] == ["train/loss", "eval/loss", "eval/exact_match"]
    assert set(found["headline"]) <= set(found["curves"])
    assert {"step": 3, "name": "exact_match", "value": 0.6, "low": 0.4, "high": 0.8} in found[
        "evals"
    ]
    assert {entry["name"] for entry in found["evals"]} == {"loss", "exact_match"}
    assert found["best"]["value"] == 0.6
    assert found["alarms"] == [
        {
            "step": 2,
            "name": "grad_norm_spike",
            "detail": "d",
            "sample_ids": ["a.jsonl:4", "a.jsonl:3"],
            "time": 102.5,
        }
    ]
    assert "dropped" not in found["start"]


def test_checks_come_with_failures_first(sft: Path) -> None:
    groups = ask(sft, "run/a/checks")["groups"]
    assert [group["outcome"] for group in groups] == ["failed", "warning", "passed", "skipped"]
    assert groups[0]["checks"][0]["name"] == "loss.finite"
    assert groups[1]["checks"][0]["evidence"] == ["a.jsonl:1 = a.jsonl:2"]


def test_curves_are_those_asked_for(sft: Path) -> None:
    found = ask(sft, "run/a/curves?names=train%2Floss,eval%2Floss&points=10")
    assert found["series"] == {
        "train/loss": {"mean": [3.0, 1.5, 1.0]},
        "eval/loss": {"mean": [None, None, 1.5]},
    }
    assert ask(sft, "run/a/curves?names=train/loss&from=2&to=2")["step"] == [2]
    with pytest.raises(Unknown, match="no curve 'train/none'"):
        ask(sft, "run/a/curves?names=train/none")
    with pytest.raises(Unknown, match="expected an integer"):
        ask(sft, "run/a/curves?points=many")


def test_samples_of_a_step_and_the_tokens_of_one(sft: Path) -> None:
    assert ask(sft, "run/a/steps") == {"steps": [1, 2, 3], "rollouts": [], "last": 3}
    of_step = ask(sft, "run/a/samples?step=1")
    assert of_step["samples"] == [
        {"id": "a.jsonl:2", "nll": 2.0, "is_recorded": True, "why": "worst"},
        {"id": "a.jsonl:3", "nll": 0.5, "is_recorded": True, "why": "random"},
    ]
    assert (of_step["loss"], of_step["num_targets"]) == (3.0, 4)
    assert ask(sft, "run/a/samples")["step"] == 3
    found = ask(sft, "run/a/sample?step=1&id=a.jsonl%3A2")
    pieces = ["<|user|>", " the", " cat", "<|end|>", "<|bot|>", " ", "é", "<b>", "<|end|>"]
    assert found["pieces"] == pieces
    assert found["loss"] == [0.5, "nan", 2.0, pytest.approx(0.1)] and found["target_at"] == [
        5,
        6,
        7,
        8,
    ]
    assert found["streams"] == {"advantage_N": [1.0, -1.0, 0.0, 2.0]} and found["entropy"] is None
    assert (found["steps"], found["num_shared"], found["shared_with"]) == ([1, 3], 4, ["b.jsonl:1"])
    assert ask(sft, "run/a/sample?step=3&id=a.jsonl%3A2")["entropy"] == [0.5] * 4
    assert ask(sft, "run/a/sample?step=2&id=a.jsonl%3A4")["why"] == "worst"  # of another rank
    for question, said in {
        "samples?step=7": "no step 7; expected one of its steps 1 to 3",
        "sample?step=2&id=a.jsonl%3A2": "no tokens of 'a.jsonl:2' at step 2",
        "rollouts": "no record of this",
        "secrets": "expected runs, compare or run/NAME/overview",
    }.items():
        with pytest.raises(Unknown, match=said):
            ask(sft, f"run/a/{question}")


def test_rollouts_by_group_with_why_nothing_is_learned(grpo: Path) -> None:
    assert ask(grpo, "run/a/steps")["rollouts"] == [1, 2, 4]
    groups = ask(grpo, "run/a/rollouts?step=2")["groups"]
    assert [(g["group"], g["rewards"], g["mean"]) for g in groups] == [
        (0, [1.0, 0.0], 0.5),
        (2, [0.5, 0.5], 0.5),
        (9, [None], None),
    ]
    assert [g["why_nothing"] for g in groups] == [
        None,
        "all rewards are 0.5",
        "no answer has a reward",
    ]
    assert groups[0]["prompt"] == "user: What is 0?" and groups[0]["num_tokens"] == [2, 3]
    assert groups[1]["is_kept"] is False and groups[2]["finish"] == ["error"]


def test_a_group_has_its_conversations_and_tokens(grpo: Path) -> None:
    found = ask(grpo, "run/a/group?step=2&group=0")
    assert found["prompt"] == [{"role": "user", "content": "What is 0?"}] and not found["is_text"]
    first, second = found["answers"]
    assert [message["role"] for message in first["messages"]] == ["assistant", "tool", "assistant"]
    assert first["messages"][0]["tool_calls"][0]["function"]["name"] == "calculator"
    assert first["messages"][2]["content"] == HOSTILE[:-1]
    assert (first["pieces"], first["sampled_at"]) == ([" ", "é", "<|end|>"], [0, 2])
    assert (second["sampled_at"], second["version"], second["advantage"]) == (
        [0, 1, 2],
        [1] * 3,
        [0.5] * 3,
    )
    assert (first["num_turns"], first["num_calls"], found["references"]) == (2, 1, ["0"])
    odd = ask(grpo, "run/a/group?step=4&group=9")
    assert odd["is_text"] and odd["prompt"] == [{"role": "user", "content": "2 + 2 ="}]
    assert odd["answers"][0]["error"] == "the tool failed"
    assert odd["answers"][0]["parts"] == [
        {"name": "judge", "value": None, "error": "no answer", "reason": None, "reply": None}
    ]
    with pytest.raises(Unknown, match="no group 7 at step 4"):
        ask(grpo, "run/a/group?step=4&group=7")


def test_an_answer_names_the_step_that_has_its_tokens_as_trained(tmp_path: Path) -> None:
    """Two steps train on a rollout, and tokens are recorded of some of them."""
    out = write_run(tmp_path / "out", [start(), *(step(n) for n in range(1, 6))], method="grpo")
    rollouts, tokens = rollout_writer(out), token_writer(out)
    for number in (1, 3, 5):
        rollouts.append([rollout_row(number, 0, index, 1.0) for index in range(2)])
    tokens.append([token_row(1, "q0#0 of rollout 1")])
    tokens.append([token_row(4, f"q0#{index} of rollout 3") for index in range(2)])
    leave_open(rollouts)
    leave_open(tokens)

    def recorded_at(number: int) -> list[int | None]:
        answers = ask(out, f"run/a/group?step={number}&group=0")["answers"]
        return [one["recorded_at"] for one in answers]

    assert [recorded_at(number) for number in (1, 3, 5)] == [[1, None], [4, 4], [None, None]]
    assert ask(out, f"run/a/sample?step=4&id={quote('q0#0 of rollout 3', safe='')}")["step"] == 4


def test_the_run_that_was_written_last_is_read_ahead(tmp_path: Path) -> None:
    outs = {name: write_run(tmp_path / name, [start(), step(1)]) for name in "ab"}
    os.utime(outs["b"] / "events.jsonl", (0, 0))
    answers, events = Answers(outs), outs["a"] / "events.jsonl"
    answers.read_ahead()
    events.write_bytes(b"?" * (events.stat().st_size - 1) + b"\n")  # read once, not looked at again
    assert answers.answer("run/a/curves?names=train/loss")["step"] == [1]
    (outs["b"] / "events.jsonl").write_text("?\n")
    with pytest.raises(DataError):
        answers.answer("run/b/overview")
    Answers({"a": outs["a"]}).read_ahead()  # who asks is told, not this
    Answers({}).read_ahead()


def test_a_prompt_over_the_steps(grpo: Path) -> None:
    found = ask(grpo, "run/a/prompt?id=q0")
    assert [(at["step"], at["group"], at["mean"]) for at in found["steps"]] == [
        (1, 0, 0.5),
        (2, 0, 0.5),
        (4, 0, 0.5),
    ]
    assert [answer["reward"] for answer in found["steps"][2]["answers"]] == [1.0, 0.0]
    assert [at["step"] for at in ask(grpo, "run/a/prompt?id=q4")["steps"]] == [4]
    with pytest.raises(Unknown, match="no rollouts of the prompt 'x'"):
        ask(grpo, "run/a/prompt?id=x")


def test_data_name_the_lines_that_were_left_out(sft: Path) -> None:
    found = ask(sft, "run/a/data")
    (train,) = found["sets"]
    assert train["num_dropped"] == 300 and len(train["dropped"]) == MOST_PLACES
    assert train["dropped"][7] == {"place": "a.jsonl:7", "reason": "it is empty: no text"}
    assert found["duplicates"]["value"] == 3


def test_a_model_s_contract_and_golden_prompts(sft: Path, tmp_path: Path) -> None:
    out = shutil.copytree(sft, tmp_path / "out")
    assert ask(out, "run/a/model")["contract"] == {}
    golden = {"prompt": {"id": "1", "ids": [1], "messages": None, "text": "2+2="}, "ids": [5]}
    rest = {"logp": [-0.1], "margin": [2.0], "finish_reason": "stop", "answer": HOSTILE}
    (out / "model").mkdir()
    path = out / "model/contract.json"
    path.write_text(json.dumps({"versions": {"taut": "0.1.0"}, "goldens": [{**golden, **rest}]}))
    found = ask(out, "run/a/model")
    assert found["contract"] == {"versions": {"taut": "0.1.0"}}
    assert found["goldens"][0]["prompt"] == "2+2=" and found["goldens"][0]["text"] == HOSTILE
    assert found["stop"] == {"asked": 4, "ended": 3}
    path.write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*contract\.json"):
        ask(out, "run/a/model")


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    events = [
        start(),
        *(step(n) for n in range(1, 5)),
        warning(4),
        start(),
        resume(2),
        step(3, loss=7.0),
    ]
    out = write_run(tmp_path / "out", events)
    found = ask(out, "run/a/overview")
    assert found["alarms"] == [] and found["resumes"][0]["from_step"] == 2
    assert found["state"] == "died" and found["step"] == 3
    assert ask(out, "run/a/curves?names=train/loss")["series"]["train/loss"]["mean"] == [
        3.0,
        1.5,
        7.0,
    ]
    assert ask(out, "run/a/samples?step=3")["loss"] == 7.0
    with pytest.raises(Unknown, match="no step 4"):
        ask(out, "run/a/samples?step=4")


def test_what_is_being_written_is_seen_as_it_grows(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", [start(), step(1)], method="grpo")
    answers = Answers({"a": out}, is_live=True)
    assert answers.answer("run/a/steps") == {"steps": [], "rollouts": [], "last": 1}
    writer, path = rollout_writer(out, seal_bytes=30_000), out / "events.jsonl"
    for number in range(1, 12):
        writer.append([rollout_row(number, g, 0, 1.0) for g in range(3)])
        assert answers.answer("run/a/steps")["rollouts"] == list(range(1, number + 1))
        assert len(answers.answer(f"run/a/rollouts?step={number}")["groups"]) == 3
    assert {part.suffix for part in (out / "rollouts").iterdir()} == {".arrows", ".parquet"}
    assert len(answers.answer("run/a/prompt?id=q1")["steps"]) == 11
    (stream,) = (out / "rollouts").glob("*.arrows")
    whole = stream.read_bytes()
    leave_open(writer)
    stream.write_bytes(whole + whole[-100:])  # a batch that is half written
    with path.open("a") as file:
        file.write(json.dumps(step(2))[:40])
    assert answers.answer("run/a/steps") == {"steps": [], "rollouts": list(range(1, 12)), "last": 1}


def test_damage_is_one_line(grpo: Path, tmp_path: Path) -> None:
    out = shutil.copytree(grpo, tmp_path / "out")
    (stream,) = (out / "rollouts").iterdir()
    TableReader(out / "rollouts")
    tables.seal_parts(out / "rollouts")
    sealed = stream.with_suffix(".parquet")
    sealed.write_bytes(sealed.read_bytes()[:-50])
    with pytest.raises(
        DataError, match=r"cannot read .*000001\.parquet.*remove the file to do without its rows"
    ):
        ask(out, "run/a/steps")
    assert ask(out, "run/a/overview")["step"] == 1  # the rest is there
    pq.write_table(pa.table({"step": [1]}).replace_schema_metadata({b"taut_table": b"7"}), sealed)
    with pytest.raises(DataError, match="is a table of version 7; expected version 1"):
        ask(out, "run/a/rollouts?step=1")
    sealed.unlink()
    writer = token_writer(out)
    writer.append([token_row(1, "a")])
    writer.close()
    (out / "tokens/vocabulary.parquet").unlink()
    with pytest.raises(DataError, match=r"cannot read .*vocabulary\.parquet"):
        ask(out, "run/a/sample?step=1&id=a")
    (out / "resolved.json").write_text("[]")
    assert ask(out, "runs")["runs"][0]["state"] == "damaged"
    found = ask(out, "run/a/overview")
    assert found["state"] == "damaged" and "it is no JSON object" in found["reason"]
    with pytest.raises(OutputError, match="is damaged: it is no JSON object"):
        ask(out, "run/a/steps")


def test_a_column_that_an_older_table_lacks_is_left_out(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", [start(), step(1)])
    (out / "rollouts").mkdir()
    table = pa.table({"step": pa.array([1], pa.int32()), "prompt_id": ["q"]})
    pq.write_table(table.replace_schema_metadata(tables.FORMAT), out / "rollouts/000001.parquet")
    assert Recorded(out).rollouts(1, ["prompt_id", "reply"]) == [{"step": 1, "prompt_id": "q"}]


def test_a_token_that_the_tokenizer_lacks_has_no_text(sft: Path) -> None:
    assert Recorded(sft).pieces([0, 99, 5, 6]) == ["<|user|>", "\ufffd", " ", "é"]


def test_runs_have_names_that_stay(tmp_path: Path) -> None:
    outs = [write_run(tmp_path / name, [start()]) for name in ("x/a", "x/deep/b", "y/a")]
    a, b, other = (out.resolve() for out in outs)
    assert find_runs([tmp_path / "x"]) == {"a": a, "deep/b": b}
    assert find_runs([outs[0]]) == {"a": a}
    both = find_runs([outs[0], outs[2]])
    assert list(both.values()) == [a, other] and len(both) == 2
    answers = Answers(find_runs([tmp_path / "x"]))
    assert answers.answer(f"run/{quote('deep/b', safe='')}/overview")["name"] == "deep/b"
    for name in ("..", "../y/a", str(other), "%2e%2e", ""):
        with pytest.raises(Unknown):
            answers.answer(f"run/{quote(name, safe='')}/overview")


def test_runs_are_compared(tmp_path: Path) -> None:
    def measured(value: float) -> dict[str, Any]:
        spread = {"exact_match_low": value - 0.1, "exact_match_high": value + 0.1}
        return {"kind": "eval", "time": 1.0, "step": 1, "exact_match": value, **spread}

    outs = {}
    for name, value in {"a,1": 0.5, "b": 0.7}.items():
        config = {"optim": {"learning_rate": value}, "data": {"train": f"{name}.jsonl"}}
        events = [start(num_trained=int(value * 10)), step(1), measured(value)]
        outs[name] = write_run(tmp_path / name, events, config=config, data=name)
        writer = rollout_writer(outs[name])
        writer.append([rollout_row(1, g, i, value * g + i) for g in (0, 1) for i in (0, 1)])
        writer.close()
    found = Answers(outs).answer("compare?runs=a%2C1,b")
    differences = {(one["kind"], one["key"]): one["values"] for one in found["differences"]}
    assert differences == {
        ("configuration", "optim.learning_rate"): [0.5, 0.7],
        ("data", "data.train"): ["a,1.jsonl", "b.jsonl"],
        ("data", "digest of the samples"): ["a,1", "b"],
        ("model", "parameters that train"): [5, 7],
    }
    (entry,) = found["evals"]
    assert entry["difference"] == pytest.approx(0.2)
    assert (entry["low"], entry["high"]) == pytest.approx((0.2 - 0.1 * 2**0.5, 0.2 + 0.1 * 2**0.5))
    assert "train/loss" in found["curves"]
    assert found["prompts"] == [
        {"prompt_id": "q1", "steps": [1], "rewards": [[1.0], [1.2]]},
        {"prompt_id": "q0", "steps": [1], "rewards": [[0.5], [0.5]]},
    ]
    with pytest.raises(Unknown, match="found 1 runs to compare; expected 2 to 8"):
        Answers(outs).answer("compare?runs=b")
