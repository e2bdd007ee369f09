"""Teachers of rollouts: by row, with privileged information, and added to the advantages of policy gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import save_model, write_rows
from tests.helpers.online_runs import keys_of, make, questions, save_models
from tests.unit.rl.test_advantages import assign, groups_of, paths, policy, said
from transformers import AutoModelForCausalLM

from taut.data.packing import ALONE, pack
from taut.errors import DataError
from taut.models.attention_backends import PREFIX
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.rl.online import Online, made_up_trajectory
from taut.rl.rollout import Group, ModelScores, sample_of, score_trees
from taut.rl.teachers import ModelTeacher
from taut.run.setup import Built
from taut.types import TEACHER_LOGP, TOP_IDS, TOP_LOGP, Sample

HINTS = [
    {**row, "hint": f"it is {row['answer']}", "teacher": "ab"[i % 2]}
    for i, row in enumerate(questions(13))
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    save_models(place)
    save_model(place / "other", "gemma2", dtype=torch.float64, seed=5)
    write_rows(place / "hints.jsonl", HINTS)
    return place


def built(place: Path, method: str = "gkd", **keys: Any) -> Built:
    given = {"data__train": str(place / "hints.jsonl"), "distill__teacher": None, **keys}
    return make(keys_of(method, place / "policy", place / "data", **given))[0]


def groups(made: Built, num: int = 3) -> list[Group]:
    """Two answers to each of the first prompts."""
    source = made.trainer.source
    assert isinstance(source, Online)
    draw = np.random.default_rng(0)
    found = []
    for row in source.prompts.prompt_rows[:num]:
        answers = [draw.integers(0, 400, 3 + i) for i in range(2)]
        found.append(
            Group(tuple(made_up_trajectory(row, i, a, 0.0) for i, a in enumerate(answers)))
        )
    return found


def scored(made: Built, of: list[Group]) -> tuple[ModelScores, dict[str, float]]:
    source = made.trainer.source
    assert isinstance(source, Online)
    scores: ModelScores = {}
    return scores, source.add_teacher_scores(scores, of, 1)


def plainly(path: Path, sample: Sample, top: int) -> dict[str, np.ndarray[Any, Any]]:
    """One sample alone, through a model as it is on disk."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.set_attn_implementation(PREFIX + "reference")
    packed = pack([sample], ALONE)
    with torch.no_grad(), compute_context(torch.float64, torch.device("cpu")):
        logp = Scorer(model).target_logits(packed).log_softmax(-1)
    own = logp.gather(1, packed.target_N[:, None])[:, 0]
    best = logp.topk(top)
    return {TEACHER_LOGP: own.numpy(), TOP_IDS: best.indices.numpy(), TOP_LOGP: best.values.numpy()}


def require_same(found: Any, wanted: Any) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-11, err_msg=name)


def test_each_row_is_scored_by_the_teacher_that_it_names(place: Path) -> None:
    teachers = {"a": {"teacher": str(place / "beside")}, "b": {"teacher": str(place / "other")}}
    made = built(place, distill__teachers=teachers, distill__top=4)
    asked = groups(made)
    scores, metrics = scored(made, asked)
    for group in asked:
        path = place / {"a": "beside", "b": "other"}[group.row.columns["teacher"]]
        for trajectory in group.trajectories:
            require_same(scores[trajectory.name], plainly(path, sample_of(trajectory), 4))
    assert metrics["teacher/a/tokens"] == 2 * (3 + 4) and metrics["teacher/b/tokens"] == 3 + 4
    gaps = [-scores[t.name][TEACHER_LOGP] for t in asked[1].trajectories]  # the engine's are 0
    assert metrics["teacher/b/kl"] == pytest.approx(np.concatenate(gaps).mean())
    assert 0 < metrics["teacher/a/listed"] < 1


def test_a_row_without_its_teacher_is_named(place: Path) -> None:
    made = built(place, distill__teachers={"a": {"teacher": str(place / "beside")}})
    with pytest.raises(DataError, match=r"jsonl:2: teacher is 'b'; expected .* one of a; correct"):
        scored(made, groups(made))


@pytest.mark.parametrize("weights", ["start", "now"])
def test_privileged_information_is_seen_by_the_teacher_alone(weights: str, place: Path) -> None:
    """Each completion as by the model alone on the longer prompt: its hint follows the question."""
    made = built(place, distill__privileged="hint", distill__weights=weights, distill__top=3)
    asked = groups(made)
    with torch.no_grad():  # an update of the policy
        for parameter in made.scorer.model.parameters():
            parameter += 0.01 if weights == "start" else 0.0
    scores, _ = scored(made, asked)
    tokenizer = made.inputs.tokenizer
    for group in asked:
        row = group.row
        question = row.prompt[-1]["content"]  # type: ignore[index]
        text = f"{question} For your information: {row.columns['hint']}"
        said_to = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(
            said_to, add_generation_prompt=True, return_dict=False
        )
        for trajectory in group.trajectories:
            answer = trajectory.ids_T[row.ids_T.size :]
            ids_T = np.concatenate([prompt, answer])
            at_N = np.arange(len(prompt), ids_T.size)
            alone = Sample("alone", ids_T, at_N, np.ones(at_N.size))
            require_same(scores[trajectory.name], plainly(place / "policy", alone, 3))


def test_completions_of_a_prompt_share_its_privileged_tokens(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(place, distill__privileged="hint", distill__top=3, batch__min_saved_tokens=1)
    asked, sizes = groups(made, 1), []
    real = ModelTeacher.streams

    def streams(self: ModelTeacher, packed: Any) -> Any:
        sizes.append((packed.num_tokens, packed.num_tokens_unshared))
        return real(self, packed)

    monkeypatch.setattr(ModelTeacher, "streams", streams)
    scored(made, asked)
    (told,) = sizes
    assert told[1] - told[0] > asked[0].row.ids_T.size  # the longer prompt, once


def test_a_moving_teacher_follows_the_policy(place: Path) -> None:
    """Halfway at each step: after one update of +0.02, it is at +0.01."""
    made = built(
        place, distill__privileged="hint", distill__update_every=1, distill__update_mix=0.5
    )
    copy = made.models.self_teacher
    assert copy is not None and copy in made.trainer.roles
    before = [tensor.clone() for tensor in copy.tensors()]
    with torch.no_grad():
        for parameter in made.trainer.trained:
            parameter += 0.02
    copy.follow(1)
    for old, new in zip(before, copy.tensors(), strict=True):
        torch.testing.assert_close(new, old + 0.01, rtol=0, atol=1e-12)
    assert any("self_teacher" in name for name in made.scorer.state_dict())


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"hint": None}, r"jsonl:2: hint is null; expected a text"),
        ({"hint": ["a", "b"]}, r"jsonl:2: hint is a list of 2; expected a text"),
        ({"hint": "very " * 400}, r"jsonl:2: the prompt with hint and a completion may take"),
    ],
)
def test_rows_that_no_teacher_can_be_told(
    row: dict[str, Any], says: str, place: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "wrong.jsonl", [HINTS[0], {**HINTS[1], **row}])
    data = {"data__train": str(tmp_path / "wrong.jsonl"), "batch__samples_per_step": 1}
    made = built(place, distill__privileged="hint", **data)
    with pytest.raises(DataError, match=says):
        scored(made, groups(made, 2))


def test_a_teacher_adds_to_the_advantage_of_each_token() -> None:
    """Two answers, worth 1 and 0: by the mean of their group 1/2 and -1/2. The teacher gives every token -1.0 where the
    policy gave -1.2, so at a coefficient of 2 each token of both gets 2 (-1.0 + 1.2) = 0.4 more: 0.9 and -0.1.
    """
    every = paths([[1.0, 0.0]])
    made = policy(distill_coef=2.0)
    assert made.wants.logp and made.is_taught and not made.is_plain
    given = assign(made, every, said(every, old_logp_N=-1.2, teacher_logp_N=-1.0))
    for name, value in zip([path.name for path in every], (0.9, -0.1), strict=True):
        np.testing.assert_allclose(given.advantages[name], value)
    alike = paths([[1.0, 1.0]])
    given = assign(made, alike, said(alike, old_logp_N=-1.2, teacher_logp_N=-1.0))
    assert given.samples[0].has_signal  # the teacher judges where rewards do not
    assert len(made.scored(groups_of(alike))) == 1


def test_the_mean_gradient_is_that_of_the_reverse_divergence() -> None:
    """Over all V tokens that may be sampled after a prefix, weighted by pi: sum pi (log pi - log teacher) grad log pi
    is the gradient of KL(pi || teacher), whose other part, sum pi grad log pi, is 0.
    """
    draw = torch.Generator().manual_seed(0)
    z, t = (torch.randn(7, generator=draw, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    s, teacher = z.log_softmax(-1), t.log_softmax(-1)
    (exact,) = torch.autograd.grad((s.exp() * (s - teacher)).sum(), z, retain_graph=True)
    advantage = (teacher - s).detach()
    (found,) = torch.autograd.grad(-(s.detach().exp() * advantage * s).sum(), z)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_grpo_is_taught_at_the_temperature_of_its_rollout(place: Path) -> None:
    """Streams of the first step: coef times the teacher's logprob less the policy's, both at temperature 0.7."""
    made = built(
        place,
        "grpo",
        rewards=None,
        distill__teacher=str(place / "beside"),
        distill__coef=0.5,
        rollout__temperature=0.7,
    )
    source = made.trainer.source
    assert isinstance(source, Online) and not made.run.is_judged  # type: ignore[attr-defined]
    asked = groups(made)
    scores = score_trees(made.trainer, source.credit.bare(asked), source.credit.wants, (), 1)
    source.add_teacher_scores(scores, asked, 1)
    samples, _ = source.credit.assign(asked, scores)

    def logp(path: Path, sample: Sample) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        model.set_attn_implementation(PREFIX + "reference")
        packed = pack([sample], ALONE)
        with torch.no_grad(), compute_context(torch.float64, torch.device("cpu")):
            every = (Scorer(model).target_logits(packed) / 0.7).log_softmax(-1)
        return every.gather(1, packed.target_N[:, None])[:, 0].numpy()

    for train_sample in samples:
        for sample in train_sample.tree.samples:
            plain = replace(sample, streams={})
            wanted = 0.5 * (logp(place / "beside", plain) - logp(place / "policy", plain))
            np.testing.assert_allclose(sample.streams["advantage_N"], wanted, rtol=0, atol=1e-11)
