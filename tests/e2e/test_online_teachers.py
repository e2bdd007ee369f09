"""Teachers behind servers: a run learns what it learns from the same model in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import (
    column,
    decisions,
    events,
    largest_difference,
    weights,
    write_rows,
)
from tests.helpers.fake_vllm import Body, Fault
from tests.helpers.online_runs import keys_of, questions, save_models, train
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.teacher_models import PROBED, ExactTeacherServer
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM

import taut
from taut.errors import EngineError, TautError

KEYS: dict[str, Any] = {
    "distill__teacher": None,
    "distill__server__backoff": 0.001,
    "distill__server__retries": 1,
    "optim__learning_rate": 3e-3,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def beside(policy: Path, **options: Any) -> ExactTeacherServer:
    """The model beside the policy, served."""
    path = policy.with_name("beside")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    return ExactTeacherServer(model=model, **options)


@pytest.fixture(scope="module")
def server(policy: Path) -> Iterator[ExactTeacherServer]:
    with beside(policy) as server:
        yield server


@pytest.mark.parametrize("divergence", ["reverse", pytest.param("js", marks=pytest.mark.slow)])
def test_all_tokens_of_a_server_are_the_teacher_in_the_process(
    divergence: str, server: ExactTeacherServer, policy: Path, tmp_path: Path
) -> None:
    num_rows = server.model.config.vocab_size
    runs = {
        "process": {"optim__learning_rate": 3e-3},
        "server": {**KEYS, "distill__url": server.url, "distill__top": num_rows},
    }
    for name, some in runs.items():
        place = tmp_path / name
        train(keys_of("gkd", policy, place, distill__divergence=divergence, **some))
    process, served = (tmp_path / name / "gkd" for name in runs)
    assert column(served, "divergence") == pytest.approx(column(process, "divergence"), rel=1e-9)
    assert largest_difference(weights(served / "model"), weights(process / "model")) < 1e-9
    told = events(served, "rollout")[0]
    assert told["teacher/listed"] == pytest.approx(1.0)
    assert told["teacher/kl"] > 0
    assert decisions(served)["distill.url"][0] == server.url


@pytest.mark.slow
def test_without_rewards_a_teacher_behind_a_server_alone_judges(
    server: ExactTeacherServer, policy: Path, tmp_path: Path
) -> None:
    """Policy gradients, a rollout trained on twice: the same run as with the teacher in the process."""
    common = {"rewards": None, "rollout__n": 1, "rollout__epochs": 2, "steps": 4}
    common |= {"optim__learning_rate": 3e-3, "distill__coef": 0.5}
    runs = {
        "process": {"distill__teacher": str(policy.with_name("beside"))},
        "server": {"distill__url": server.url},
    }
    for name, some in runs.items():
        train(keys_of("grpo", policy, tmp_path / name, check="quick", **common, **some))
    process, served = (tmp_path / name / "grpo" for name in runs)
    assert column(served, "loss") == pytest.approx(column(process, "loss"), rel=1e-9)
    assert largest_difference(weights(served / "model"), weights(process / "model")) < 1e-9
    first = events(served, "rollout")[0]
    assert "reward" not in first and first["teacher/kl"] > 0
    assert column(served, "advantage/mean")[0] == pytest.approx(-0.5 * first["teacher/kl"])


@pytest.mark.slow
def test_rows_name_their_teachers(server: ExactTeacherServer, policy: Path, tmp_path: Path) -> None:
    rows = [{**row, "teacher": ("near", "far")[i % 2]} for i, row in enumerate(questions(13))]
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    teachers = {"near": {"teacher": str(policy.with_name("beside"))}, "far": {"url": server.url}}
    given = {**KEYS, "distill__server__backoff": None, "distill__server__retries": None}
    num_rows = server.model.config.vocab_size
    for name, some in {
        "two": {"distill__teachers": teachers, "distill__top": 400, "data__train": data},
        "one": {"distill__url": server.url, "distill__top": 400, "data__train": data},
    }.items():
        train(keys_of("gkd", policy, tmp_path / name, check="quick", **{**given, **some}))
    two, one = (tmp_path / name / "gkd" for name in ("two", "one"))
    assert num_rows > 400
    assert column(two, "divergence") == pytest.approx(column(one, "divergence"), rel=1e-9)
    told = [event for event in events(two, "rollout") if "teacher/near/kl" in event]
    assert told and all(0.5 < event["teacher/near/listed"] <= 1 for event in told)


@pytest.mark.slow
def test_a_moving_teacher_is_in_the_checkpoint(policy: Path, tmp_path: Path) -> None:
    some = {"distill__privileged": "answer", "distill__update_every": 1, "distill__top": 8}
    keys = keys_of(
        "gkd",
        policy,
        tmp_path,
        distill__teacher=None,
        distill__update_mix=0.2,
        optim__learning_rate=3e-3,
        checkpoint__every=1,
        check="quick",
        **some,
    )
    train({**keys, "out": str(tmp_path / "whole")})
    train({**keys, "out": str(tmp_path / "parts"), "steps": 2})
    train({**keys, "out": str(tmp_path / "parts"), "resume": True})
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    assert column(parts, "divergence") == column(whole, "divergence")
    assert largest_difference(weights(whole / "model"), weights(parts / "model")) == 0
    assert not any("teacher" in name for name in weights(whole / "model"))


@pytest.mark.slow
def test_the_lists_are_in_the_checkpoint(
    server: ExactTeacherServer, policy: Path, tmp_path: Path
) -> None:
    """A rollout that is half trained on goes on as it was, and its teacher is not asked again."""
    some = {"distill__url": server.url, "distill__top": 5, "rollout__minibatches": 2, "steps": 4}
    keys = keys_of("gkd", policy, tmp_path, **KEYS, **some, checkpoint__every=1)
    train({**keys, "out": str(tmp_path / "whole")})
    train({**keys, "out": str(tmp_path / "parts"), "steps": 1})
    asked = len(server.requests)
    train({**keys, "out": str(tmp_path / "parts"), "steps": 2, "resume": True})
    assert len(server.requests) == asked + PROBED
    train({**keys, "out": str(tmp_path / "parts"), "resume": True})
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    assert column(parts, "divergence") == column(whole, "divergence")
    assert largest_difference(weights(whole / "model"), weights(parts / "model")) == 0


def test_a_server_with_another_vocabulary_is_refused_before_anything_is_generated(
    policy: Path, tmp_path: Path
) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["What is"])
    with beside(policy, tokenizer=other) as server:
        keys = keys_of("gkd", policy, tmp_path, **KEYS, distill__url=server.url)
        with pytest.raises(
            EngineError,
            match=r"the server has 'What is' for the id .* expected the student's vocab",
        ):
            train(keys)
    assert not Path(keys["out"]).exists()


@pytest.mark.slow
def test_a_teacher_that_goes_away_ends_the_run_which_goes_on(policy: Path, tmp_path: Path) -> None:
    away = {"is": False}

    def fault(body: Body, count: int) -> Fault | None:
        away["is"] = away["is"] or count > 20
        return Fault(hangs_up=True) if away["is"] else None

    with beside(policy, faults=fault) as server:
        keys = keys_of("gkd", policy, tmp_path, **KEYS, distill__url=server.url)
        with pytest.raises(EngineError, match=r"set distill\.server\.timeout or distill\.server"):
            train(keys)
    out = Path(keys["out"])
    done = len(column(out, "step"))
    assert done < 3
    with beside(policy) as server:
        train({**keys, "distill.url": server.url, "resume": True})
    assert column(out, "step") == [1, 2, 3]


def test_some_prompts_have_the_datas_answers(policy: Path, tmp_path: Path) -> None:
    """Which is a function of seed and rollout: a resume and another share of the memory draw the same. What is learned
    of them is what taut distill learns.
    """
    rows = [
        {**row, "messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]}
        for row in questions(13)
    ]
    data = {"data__train": str(write_rows(tmp_path / "rows.jsonl", rows)), "steps": 6}
    keys = keys_of("gkd", policy, tmp_path, **data, distill__lmbda=0.4, checkpoint__every=3)
    train(keys)
    out = Path(keys["out"])
    told = events(out, "rollout")
    taken = [event.get("from_data", 0) for event in told]
    assert [event["completions"] for event in told] == [2 * (4 - num) for num in taken]
    drawn = [np.random.default_rng([0, phase, 4]).random(4) for phase in range(6)]
    assert taken == [int((numbers >= 0.4).sum()) for numbers in drawn]
    assert 4 in taken or 0 < sum(taken) < 24
    train({**keys, "out": str(tmp_path / "parts"), "steps": 3})
    train({**keys, "out": str(tmp_path / "parts"), "resume": True})
    assert column(tmp_path / "parts", "divergence") == column(out, "divergence")


def test_answers_of_the_data_are_learned_as_by_taut_distill(policy: Path, tmp_path: Path) -> None:
    """A rollout without a prompt of its own: the same loss and update, to the last bit."""
    rows = [
        {**row, "messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]}
        for row in questions(4)
    ]
    data = {"data__train": str(write_rows(tmp_path / "rows.jsonl", rows)), "steps": 1}
    seed = next(s for s in range(999) if np.random.default_rng([s, 0, 4]).random(4).min() >= 0.1)
    keys = keys_of("gkd", policy, tmp_path, **data, distill__lmbda=0.1, seed=seed)
    train(keys)
    left_out = ("rollout.", "method", "out")
    fixed = {key: value for key, value in keys.items() if not key.startswith(left_out)}
    del fixed["distill.lmbda"]
    fixed |= {"distill.divergence": "reverse", "out": str(tmp_path / "fixed")}
    taut.distill(**fixed)
    out = Path(keys["out"])
    (told,) = events(out, "rollout")
    assert told["from_data"] == 4 and told["completions"] == 0
    assert column(out, "divergence") == pytest.approx(column(tmp_path / "fixed", "divergence"))
    found = weights(out / "model"), weights(tmp_path / "fixed" / "model")
    assert largest_difference(*found) < 1e-12


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, r"jsonl:1: the row has no answer of its own, and distill\.lmbda=0\.5"),
        (
            {"distill__teacher": None, "distill__privileged": "answer"},
            ErrorCode("distill.lmbda/distill.privileged"),
        ),
    ],
)
def test_without_answers_of_the_data_there_is_no_share_of_them(
    keys: dict[str, Any], says: str, policy: Path, tmp_path: Path
) -> None:
    rows = questions(3)
    rows[1]["messages"].append({"role": "assistant", "content": "2"})
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    given = keys_of("gkd", policy, tmp_path, distill__lmbda=0.5, data__train=data, **keys)
    with refused(says, TautError):
        train(given)
    assert not Path(given["out"]).exists()
