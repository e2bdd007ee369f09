"""How checks are asked: what follows from a failure, what is left as it was, before a training, on several ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checks.planting import Place
from tests.helpers.chat_runs import (
    QUIET,
    chats,
    events,
    save_model,
    sft,
    weights,
    words_of,
    write_rows,
)
from tests.helpers.forked_processes import run

from taut.checks import CHECKS, Check
from taut.checks.examine import Examination, examine
from taut.checks.registry import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.cli import main
from taut.commands.check import as_json
from taut.errors import CheckFailed

LATER = "reference.equals_policy"
"""A check that a method of the future may bring."""


def asking(give: Callable[[], Finding]) -> Callable[[Session], Finding]:
    """A question with a fixed answer."""

    def ask(session: Session) -> Finding:
        """Is the reference the policy at step 0?"""
        return give()

    return ask


def sound() -> Finding:
    return passed("logprobs are equal", 0.0, "nats", ["the reference is a copy"])


def faulty() -> Finding:
    return failed(
        "logprobs differ by 2 nats",
        measured=(2.0, "nats"),
        evidence=["train.jsonl:1, token 3"],
        remedy="load the reference from the model that training starts with",
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def only(place: Place, checks: dict[str, Check]) -> dict[str, Finding]:
    """What some checks answer where there are no others."""
    place.patch.setattr("taut.checks.examine.CHECKS", checks)
    return {one.name: one.finding for one in examine(place.session(), "full").results}


# -- what follows from what


def test_what_comes_after_a_failure_is_skipped_for_the_first_cause(place: Place) -> None:
    found = only(
        place,
        {
            "a.one": Check(asking(faulty)),
            "a.two": Check(asking(sound), after=("a.one",)),
            "a.three": Check(asking(sound), after=("a.two",)),
            "a.four": Check(asking(sound)),
        },
    )
    assert [finding.outcome for finding in found.values()] == [
        "failed",
        "skipped",
        "skipped",
        "passed",
    ]
    assert found["a.two"].says == found["a.three"].says == "a.one failed"


def test_what_comes_after_one_that_has_no_meaning_here_is_asked(place: Place) -> None:
    found = only(
        place,
        {
            "a.one": Check(asking(lambda: skipped("nothing is packed"))),
            "a.two": Check(asking(sound), after=("a.one",)),
        },
    )
    assert found["a.two"].outcome == "passed"


def test_a_model_that_cannot_be_loaded_fails_once(place: Place) -> None:
    directory = place.model()
    (directory / "model.safetensors").unlink()
    found = {a.name: a.finding for a in examine(place.session(directory), "full").results}
    assert [name for name, one in found.items() if one.outcome == "failed"] == ["model.loads"]
    assert found["attention.packed"].outcome == "skipped"
    assert found["run.in_force"] == skipped("model.loads failed")
    assert "weights" in found["model.loads"].says
    assert found["model.loads"].remedy


def test_data_that_cannot_be_read_fail_once_and_the_model_is_looked_at(place: Place) -> None:
    session = place.session(data=place.directory / "nothing.jsonl")
    found = {a.name: a.finding for a in examine(session, "quick").results}
    bad = [name for name, one in found.items() if one.outcome == "failed"]
    assert len(bad) == 1 and bad[0].startswith("data.")
    assert "nothing.jsonl" in found[bad[0]].says
    assert all(one.remedy for one in found.values() if one.outcome == "failed")


# -- what is left out by name


def test_a_check_is_left_out_by_name_and_the_report_says_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes after it is asked: it has not failed."""
    place.patch.setattr(
        "taut.checks.examine.CHECKS",
        {
            "a.one": Check(asking(faulty)),
            "a.two": Check(asking(sound), after=("a.one",)),
            "a.three": Check(asking(faulty), "full"),
        },
    )
    words = [f"model={place.model()}", f"data.train={place.data()}", *words_of(QUIET)]
    assert main(["check", *words]) == 1
    capsys.readouterr()
    assert main(["check", *words, 'checks.skip=["a.one", "a.three"]']) == 0
    said = capsys.readouterr().out
    assert "left out by name (checks.skip): a.one\n" in said
    assert "\n1 passed in " in said, "what is left out is named in its own line"
    assert main(["check", *words, 'checks.skip=["a.one"]', "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["checks"]
    assert [(one["name"], one["outcome"]) for one in asked] == [
        ("a.one", "skipped"),
        ("a.two", "passed"),
    ]
    assert asked[0]["says"] == "left out by name (checks.skip)"


def test_a_part_that_cannot_be_made_is_a_failure_though_its_own_check_is_left_out(
    place: Place,
) -> None:
    directory = place.model()
    (directory / "model.safetensors").unlink()
    session = place.session(directory, checks__skip=["model.loads"])
    found = {a.name: a.finding for a in examine(session).results}
    assert found["model.loads"] == skipped("left out by name (checks.skip)")
    failures = [one for one in found.values() if one.outcome == "failed"]
    assert "weights" in failures[0].says and failures[0].remedy


def test_a_name_that_no_check_has_is_refused_with_the_nearest(
    model: Path, train: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {**QUIET, "model": model, "data.train": train, "checks.skip": ["reward.gold"]}
    out = {"out": place.directory / "out", "steps": 1, "check": "off"}
    for words in (["check", *words_of(keys)], ["sft", *words_of({**keys, **out})]):
        assert main(words) == 2
        assert (
            "'reward.gold', and there is none; expected names such as rewards.gold; did you "
            in (said := capsys.readouterr().err)
        )
        assert said.rstrip().endswith("did you mean rewards.gold?")
    assert not (place.directory / "out").exists()


def test_a_check_that_is_left_out_does_not_stop_a_training_and_is_recorded(
    model: Path, train: Path, place: Place
) -> None:
    place.patch.setitem(CHECKS, LATER, Check(asking(faulty)))
    out = place.directory / "out"
    sft(model, train, out, steps=1, checks__skip=[LATER])
    found = {event["name"]: event for event in events(out, "check")}
    assert (found[LATER]["outcome"], found[LATER]["left_out"]) == ("skipped", True)
    assert found["run.steps"]["left_out"] is False
    resolved = json.loads((out / "resolved.json").read_text())
    assert resolved["config"]["checks"]["skip"] == [LATER]


# -- nothing is left changed


def state_of(session: Session) -> dict[str, Any]:
    """All of a session that a check might leave changed, copied."""
    scorer = session.scorer
    optimizer = session.trainer.optimizer.state_dict()["state"]
    return {
        "weights": {name: value.clone() for name, value in scorer.state_dict().items()},
        "moments": {(i, k): v.clone() for i, some in optimizer.items() for k, v in some.items()},
        "gradients": {name: p.grad for name, p in scorer.named_parameters()},
        "trained": {name: p.requires_grad for name, p in scorer.named_parameters()},
        "modes": {name: module.training for name, module in scorer.named_modules()},
        "hooks": {name: len(m._forward_hooks) for name, m in scorer.named_modules()},
        "attention": session.model.config._attn_implementation,
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
        "gradient mode": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "budget": (session.trainer.budget, session.trainer.policy, session.trainer.done),
    }


def same(left: Any, right: Any) -> bool:
    """Equal bit for bit, however deep."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("part", [pytest.param("quick", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        pytest.param("qwen2", {"dtype": "float32"}, marks=pytest.mark.slow),
        ("llama", {"dtype": "bfloat16", "lora__rank": 2, "lora__dropout": 0.1}),
        pytest.param(
            "gemma2",
            {"dtype": "float32", "freeze": ["*.mlp.*"], "activation_checkpointing": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nothing_is_left_changed(
    place: Place, architecture: str, keys: dict[str, Any], part: Any
) -> None:
    session = place.session(place.model(architecture), **keys)
    assert session.built is not None  # building draws, as it does in training
    before = state_of(session)
    found = examine(session, part)
    assert not found.failures, found.failures
    after = state_of(session)
    assert [name for name in before if not same(before[name], after[name])] == []


# -- the registry takes the checks of methods to come


def test_a_check_of_a_later_method_is_asked_reported_and_in_the_json(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.patch.setitem(CHECKS, LATER, Check(asking(faulty), after=("model.trains",)))
    words = [f"model={place.model()}", f"data.train={place.data()}", *words_of(QUIET)]
    assert main(["check", *words]) == 1
    said = capsys.readouterr().out
    for part in ("reference.equals_pol", "2 nats", "Is the reference the policy", "token 3", "->"):
        assert part in said
    assert main(["check", *words, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["checks"][-1] == {
        "name": LATER,
        "question": "Is the reference the policy at step 0?",
        "outcome": "failed",
        "says": "logprobs differ by 2 nats",
        "number": 2.0,
        "unit": "nats",
        "evidence": ["train.jsonl:1, token 3"],
        "remedy": "load the reference from the model that training starts with",
        "code": "",
        "notes": [],
        "seconds": read["checks"][-1]["seconds"],
        "cause": None,
    }


def test_a_number_that_is_not_finite_is_written(place: Place) -> None:
    endless = failed("it is endless", measured=(float("inf"), ""), remedy="end it")
    place.patch.setattr("taut.checks.examine.CHECKS", {"a.one": Check(asking(lambda: endless))})
    found = examine(place.session())
    assert found.results[0].as_fields()["number"] == "inf"
    assert json.loads(json.dumps(as_json(found, {}), allow_nan=False))["outcome"] == "failed"


# -- before a training


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", chats(10))


def test_a_failed_check_stops_the_run_before_anything_is_written(
    model: Path, train: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.patch.setitem(CHECKS, LATER, Check(asking(faulty)))
    out = place.directory / "out"
    with pytest.raises(CheckFailed, match=f"^{LATER}: logprobs differ .*token 3.*; load the ref"):
        sft(model, train, out, steps=2)
    keys = {**QUIET, "model": model, "data.train": train, "out": out, "steps": 2}
    assert main(["sft", *words_of(keys)]) == 1
    assert capsys.readouterr().err.startswith(f"taut: error: {LATER}: logprobs differ")
    assert not out.exists()


def test_a_failed_check_leaves_the_run_that_is_gone_on_with_as_it_was(
    model: Path, train: Path, place: Place
) -> None:
    out = place.directory / "out"
    sft(model, train, out, steps=2, checkpoint__every=2)
    before = (out / "events.jsonl").read_bytes()
    place.patch.setitem(CHECKS, LATER, Check(asking(faulty)))
    with pytest.raises(CheckFailed, match="logprobs differ"):
        sft(model, train, out, steps=4, checkpoint__every=2, resume=True)
    assert (out / "events.jsonl").read_bytes() == before


def test_checks_that_were_turned_off_are_recorded(model: Path, train: Path, tmp_path: Path) -> None:
    sft(model, train, tmp_path / "out", steps=1, check="off")
    first = events(tmp_path / "out", "check")[0]
    assert (first["name"], first["outcome"], first["detail"]) == ("all", "skipped", "check=off")


def test_each_answer_is_an_event(model: Path, train: Path, place: Place) -> None:
    place.patch.setitem(CHECKS, LATER, Check(asking(sound)))
    sft(model, train, place.directory / "out", steps=1)
    found = {event["name"]: event for event in events(place.directory / "out", "check")}
    quick = [name for name, check in CHECKS.items() if check.part == "quick"]
    assert set(quick) <= set(found)
    wanted = {
        "outcome": "passed",
        "value": 0.0,
        "unit": "nats",
        "detail": "logprobs are equal",
        "notes": ["the reference is a copy"],
    }
    assert {key: found[LATER][key] for key in wanted} == wanted


def test_a_run_is_the_same_bit_for_bit_with_checks_resumed_and_without(
    model: Path, train: Path, tmp_path: Path
) -> None:
    keys = {"checkpoint__every": 2, "lora__rank": 2, "lora__dropout": 0.1}
    without, resumed = tmp_path / "without", tmp_path / "resumed"
    sft(model, train, without, steps=4, check="off", **keys)
    sft(model, train, resumed, steps=2, **keys)
    sft(model, train, resumed, steps=4, resume=True, **keys)
    told = ("step", "loss", "grad_norm", "sample_ids")
    steps = [[[e[k] for k in told] for e in events(out, "step")] for out in (without, resumed)]
    assert steps[0] == steps[1]
    assert same(weights(without / "model"), weights(resumed / "model"))


# -- several ranks

ON_ONE_RANK = """\
import os, sys
from taut import cli
from taut.checks import CHECKS, Check
from taut.checks.registry import failed, passed
def ask(session):
    "Is all well on this rank?"
    if os.environ["RANK"] == os.environ.get("FAULTY"):
        return failed("rank 1 is not well", remedy="mend it")
    return passed("well")
CHECKS["a.rank"] = Check(ask)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_ranks_give_one_finding(model: Path, train: Path, tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(ON_ONE_RANK)
    words = words_of({**QUIET, "model": model, "data.train": train, "out": out, "steps": 1})
    done = run(program, "sft", *words, num_ranks=2, FAULTY="1")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("taut: error")]
    assert told == ["taut: error: a.rank: rank 1 is not well; mend it"]
    assert not out.exists()
    done = run(program, "sft", *words, num_ranks=2, FAULTY="none")
    assert done.returncode == 0, done.stderr
    asked = [event["name"] for event in events(out, "check")]
    assert [asked.count(name) for name in ("a.rank", "attention.packed", "run.steps")] == [1, 1, 1]


SHIFTED = """\
import os, sys
from taut import cli
from taut.models.cpu import faster_layers
install = faster_layers.install
def shifted(model):
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    if os.environ["RANK"] == os.environ["FAULTY"] and hasattr(weight, "to_local"):
        weight.data.to_local().copy_(weight.data.to_local().roll(1, 0))
    install(model)
faster_layers.install = shifted
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_shard_with_other_numbers_is_found(model: Path, train: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHIFTED)
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 1}
    done = run(program, "sft", *words_of(keys), num_ranks=2, FAULTY="1")
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("taut: error")]
    assert "model.weights: 1 of 26 tensors on rank 1 are not those of the checkpoint" in told
    done = run(program, "sft", *words_of(keys), num_ranks=2, FAULTY="none")
    assert done.returncode == 0, done.stderr


def test_the_examination_counts(place: Place) -> None:
    place.patch.setattr(
        "taut.checks.examine.CHECKS",
        {"a.one": Check(asking(sound)), "a.two": Check(asking(faulty), "full")},
    )
    session = place.session()
    quick, full = examine(session), examine(session, "full")
    assert isinstance(quick, Examination)
    assert [one.name for one in quick.results] == ["a.one"]
    assert (full.count("passed"), full.count("failed"), full.count("skipped")) == (1, 1, 0)
    assert [one.name for one in full.failures] == ["a.two"]
    assert [one.name for one in examine(session, "full", only={"a.two"}).results] == ["a.two"]
