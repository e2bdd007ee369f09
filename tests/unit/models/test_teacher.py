"""The divergence inside the chunked head against plain autograd over [N, V]: values and every gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn

from taut.data.packing import ALONE, PackPolicy, pack
from taut.models import scorer as score
from taut.models.architecture import HeadSpec, Rows
from taut.models.attention_backends import PREFIX
from taut.models.precision import compute_context
from taut.models.scorer import Chunks, Scorer, TeacherScores, score_hidden
from taut.models.teacher import (
    LikeliestTokens,
    ListedTeacher,
    ModelTeacher,
    WholeDistribution,
    likeliest,
)
from taut.types import TOP_IDS, TOP_LOGP, Divergence, Packed, Scores, Wants

N, D, DT, V = 23, 8, 5, 17
LIMIT = 1e-9
SHARE_ALL = PackPolicy(share_prefixes=True, min_saved_tokens=1)

HOW = {
    "forward": Divergence("forward"),
    "reverse": Divergence("reverse"),
    "js": Divergence("js", beta=0.3),
    "forward, warm": Divergence("forward", temperature=2.5),
    "reverse, cold": Divergence("reverse", temperature=0.7),
    "js, warm": Divergence("js", beta=0.9, temperature=2.5),
}
SPECS = {
    "plain": {},
    "bias": {"has_bias": True},
    "softcap": {"softcap": 3.0},
    "all of them": {"has_bias": True, "softcap": 3.0, "scale": 1.7, "has_rows": True},
}
LISTED = {
    "bucket": Divergence("forward"),
    "bucket, reverse": Divergence("reverse"),
    "bucket, js": Divergence("js", beta=0.3),
    "renormalize": Divergence("forward", tail="renormalize"),
    "renormalize, warm": Divergence("forward", temperature=2.5, tail="renormalize"),
}


@pytest.fixture(params=[4, 256], ids=["chunks of 4", "one chunk"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "MIN_CHUNK_ROWS", request.param)
    monkeypatch.setattr(score, "CHUNK_ELEMENTS", request.param * V)


def make(
    width: int = D,
    num_rows: int = V,
    seed: int = 0,
    has_bias: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    has_rows: bool = False,
) -> tuple[Tensor, HeadSpec]:
    """Hidden states and a head."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bias = nn.Parameter(draw(num_rows)) if has_bias else None
    weight = nn.Parameter(draw(num_rows, width), requires_grad=not has_rows)
    rows = Rows(torch.tensor([16, 3]), nn.Parameter(draw(2, width))) if has_rows else None
    return draw(N, width).requires_grad_(), HeadSpec(weight, bias, softcap, scale, rows)


TARGET = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))
LINEAR = torch.stack([torch.linspace(-2, 1, N), torch.linspace(1, 3, N)]).double()


def whole(
    hidden: Tensor, spec: HeadSpec, how: Divergence, num_rows: int | None = None
) -> WholeDistribution:
    with torch.no_grad():
        chunks = Chunks(hidden, spec.weight, spec.bias, None, spec)
        return WholeDistribution(how, chunks, num_rows)


def plain(s_logits: Tensor, t_logits: Tensor, how: Divergence) -> Tensor:
    """From probabilities, by the definition."""
    s, t = ((z / how.temperature).softmax(-1) for z in (s_logits, t_logits.detach()))
    if how.kind == "forward":
        return (t * (t / s).log()).sum(1)
    if how.kind == "reverse":
        return (s * (s / t).log()).sum(1)
    m = how.beta * t + (1 - how.beta) * s
    return how.beta * (t * (t / m).log()).sum(1) + (1 - how.beta) * (s * (s / m).log()).sum(1)


def logp_of(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, TARGET[:, None])[:, 0]


def leaves(hidden: Tensor, spec: HeadSpec) -> list[Tensor]:
    trained = spec.weight if spec.rows is None else spec.rows.weight_RD
    return [hidden, trained] + ([] if spec.bias is None else [spec.bias])


def require_equal(
    compared: TeacherScores,
    student: tuple[Tensor, HeadSpec],
    divergence_N: Tensor,
    linear_2N: Tensor,
) -> None:
    """Values with and without coefficients, and every gradient."""
    hidden, spec = student
    logp_N = logp_of(spec.logits(hidden))
    total = (linear_2N[0] * logp_N).sum() + (linear_2N[1] * divergence_N).sum()
    found = score_hidden(hidden, TARGET, spec, linear_2N, teacher=compared)
    looked = score_hidden(hidden, TARGET, spec, None, teacher=compared)
    assert found.linear_sum is not None
    for scores in (found, looked):
        torch.testing.assert_close(scores.divergence_N, divergence_N, rtol=0, atol=1e-12)
        torch.testing.assert_close(scores.logp_N, logp_N, rtol=0, atol=1e-12)
    assert looked.linear_sum is None
    assert not found.divergence_N.requires_grad  # type: ignore[union-attr]
    torch.testing.assert_close(found.linear_sum, total, rtol=0, atol=1e-12)
    grads = [
        torch.autograd.grad(3 * it, leaves(hidden, spec), retain_graph=True)
        for it in (found.linear_sum, total)
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("has_logp", [True, False], ids=["with logp", "alone"])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("how", HOW)
def test_it_equals_plain_autograd(how: str, kind: str, has_logp: bool) -> None:
    student, teacher = make(**SPECS[kind]), make(DT, seed=1, softcap=2.0)  # type: ignore[arg-type]
    divergence_N = plain(student[1].logits(student[0]), teacher[1].logits(teacher[0]), HOW[how])
    linear_2N = LINEAR * torch.tensor([[float(has_logp)], [1.0]])
    require_equal(whole(*teacher, HOW[how]), student, divergence_N, linear_2N)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("sizes", [(17, 24), (24, 17), (24, 31)])
@pytest.mark.parametrize("how", ["forward", "js, warm"])
def test_rows_that_one_vocabulary_has_alone_are_left_out(how: str, sizes: tuple[int, int]) -> None:
    student, teacher = make(num_rows=sizes[0]), make(DT, num_rows=sizes[1], seed=1)
    cut = [spec.logits(hidden)[:, :V] for hidden, spec in (student, teacher)]
    divergence_N = plain(*cut, HOW[how])
    for linear_2N in (LINEAR, LINEAR * torch.tensor([[0.0], [1.0]])):
        require_equal(whole(*teacher, HOW[how], V), student, divergence_N, linear_2N)


@pytest.mark.parametrize("how", [*HOW.values(), *LISTED.values()], ids=[*HOW, *LISTED])
def test_gradcheck(how: Divergence) -> None:
    student, teacher = make(**SPECS["all of them"]), make(DT, seed=1)  # type: ignore[arg-type]
    hidden, spec = student
    compared = whole(*teacher, how)
    if how in LISTED.values():
        compared = LikeliestTokens(how, *likeliest(*teacher, 4, V))

    def through(h: Tensor, w: Tensor, b: Tensor) -> Tensor | None:
        assert spec.rows is not None
        given = replace(spec, bias=b, rows=Rows(spec.rows.index_R, w))  # type: ignore[arg-type]
        return score_hidden(h, TARGET, given, LINEAR, teacher=compared).linear_sum

    assert torch.autograd.gradcheck(through, tuple(leaves(hidden, spec)))


@pytest.mark.parametrize("how", HOW)
def test_a_teacher_that_says_the_same_teaches_nothing(how: str) -> None:
    hidden, spec = make(**SPECS["bias"])  # type: ignore[arg-type]
    linear_2N = LINEAR * torch.tensor([[0.0], [1.0]])
    scores = score_hidden(hidden, TARGET, spec, linear_2N, teacher=whole(hidden, spec, HOW[how]))
    assert scores.linear_sum is not None
    assert float(scores.divergence_N.abs().max()) < 1e-14  # type: ignore[union-attr]
    for grad in torch.autograd.grad(scores.linear_sum, leaves(hidden, spec)):
        assert float(grad.abs().max()) < 1e-14


def test_the_ends_of_js_are_forward_and_reverse() -> None:
    student, teacher = make(scale=0.3), make(DT, seed=1, scale=0.3)

    def divergence(how: Divergence) -> Tensor:
        found = score_hidden(
            *student[:1], TARGET, student[1], teacher=whole(*teacher, how)
        ).divergence_N
        assert found is not None
        return found

    near = 1e-7
    forward = divergence(Divergence("js", beta=near)) / near
    reverse = divergence(Divergence("js", beta=1 - near)) / near
    torch.testing.assert_close(forward, divergence(Divergence("forward")), rtol=1e-4, atol=0)
    torch.testing.assert_close(reverse, divergence(Divergence("reverse")), rtol=1e-4, atol=0)
    most = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)  # the entropy of the mixture's shares
    assert float(divergence(Divergence("js", beta=0.3)).max()) <= most


@pytest.mark.parametrize("how", [*HOW.values(), *LISTED.values()], ids=[*HOW, *LISTED])
def test_extreme_logits_stay_finite(how: Divergence) -> None:
    (hidden, spec), (theirs, head) = make(), make(DT, seed=1)
    spec, head = (HeadSpec(nn.Parameter(it.weight.detach().float())) for it in (spec, head))
    huge, other = ((h.detach() * 1e6).float() for h in (hidden, theirs))
    huge.requires_grad_()
    compared = whole(other, head, how)
    if how in LISTED.values():
        compared = LikeliestTokens(how, *likeliest(other, head, 4, V))
    scores = score_hidden(huge, TARGET, spec, LINEAR, teacher=compared)
    assert scores.linear_sum is not None
    scores.linear_sum.backward()  # type: ignore[no-untyped-call]
    assert all(
        torch.isfinite(it).all() for it in (scores.divergence_N, huge.grad, spec.weight.grad)
    )  # type: ignore[arg-type]
    assert how.kind == "js" or float(scores.divergence_N.max()) > 1e5  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_what_has_no_probability_counts_nothing(kind: str) -> None:
    """Both models rule the same tokens out altogether."""
    how = Divergence(kind)  # type: ignore[arg-type]
    found = []
    for num_rows in (V, V - 4):
        made = [make(width, seed=seed, has_bias=True) for width, seed in ((D, 0), (DT, 1))]
        heads = []
        for _, spec in made:
            assert spec.bias is not None
            bias = spec.bias.detach().clone()
            bias[V - 4 :] = -math.inf
            weight = spec.weight.detach()[:num_rows]
            heads.append(HeadSpec(nn.Parameter(weight), nn.Parameter(bias[:num_rows])))
        (hidden, _), (theirs, _) = made
        target = TARGET.clamp(max=V - 5)
        scores = score_hidden(
            hidden, target, heads[0], LINEAR, teacher=whole(theirs, heads[1], how)
        )
        assert scores.linear_sum is not None
        found.append((scores.divergence_N, torch.autograd.grad(scores.linear_sum, hidden)[0]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("how", LISTED)
def test_a_list_equals_plain_autograd(how: str) -> None:
    student, teacher = make(**SPECS["all of them"]), make(DT, seed=1)  # type: ignore[arg-type]
    ids, logp = likeliest(*teacher, 4, V)
    temperature = LISTED[how].temperature
    s = (student[1].logits(student[0]) / temperature).log_softmax(-1)
    t = teacher[1].logits(teacher[0]).detach().log_softmax(-1)
    listed = s.gather(1, ids)
    if LISTED[how].tail == "bucket":
        p, q = (
            torch.cat([v, 1 - v.sum(1, keepdim=True)], dim=1)
            for v in (t.gather(1, ids).exp(), listed.exp())
        )
        divergence_N = plain(q.log(), p.log(), LISTED[how])
        assert (divergence_N <= plain(s, t, LISTED[how])).all()
    else:
        p = (t.gather(1, ids) / temperature).softmax(-1)
        divergence_N = (p * (p.log() - listed)).sum(1)
    require_equal(LikeliestTokens(LISTED[how], ids, logp), student, divergence_N, LINEAR)


def test_a_bucket_by_hand() -> None:
    """The student gives each of four tokens 1/4; the teacher lists the second with 1/2. Of (listed, rest) the student
    has (1/4, 3/4), the teacher (1/2, 1/2), half of both (3/8, 5/8):

        reverse   1/4 ln(1/2) + 3/4 ln(3/2)                                                         = 0.130812
        js        1/2 (1/2 ln(4/3) + 1/2 ln(4/5)) + 1/2 (1/4 ln(2/3) + 3/4 ln(6/5))                 = 0.033822

    The gradient of reverse: 1/4 (ln(1/2) - 0.130812) = -0.205990 of the listed token's logit, and a third of
    3/4 (ln(3/2) - 0.130812) = 0.205990 of each other one's.
    """
    s = torch.full((1, 4), 0.25, dtype=torch.float64).log()
    listed = torch.tensor([[1]]), torch.tensor([[0.5]], dtype=torch.float64).log()
    value, grad = LikeliestTokens(Divergence("reverse"), *listed).compare(slice(0, 1), s)
    assert value.tolist() == pytest.approx([0.130812], abs=1e-6)
    assert grad[0].tolist() == pytest.approx([0.068663, -0.205990, 0.068663, 0.068663], abs=1e-6)
    value, _ = LikeliestTokens(Divergence("js", 0.5), *listed).compare(slice(0, 1), s)
    assert value.tolist() == pytest.approx([0.033822], abs=1e-6)


@pytest.mark.parametrize("how", LISTED)
def test_a_list_of_all_tokens_is_the_whole_distribution(how: str) -> None:
    (hidden, spec), teacher = make(), make(DT, seed=1)
    listed = LikeliestTokens(LISTED[how], *likeliest(*teacher, V, V))
    found = []
    for compared in (listed, whole(*teacher, LISTED[how])):
        scores = score_hidden(hidden, TARGET, spec, LINEAR, teacher=compared)
        assert scores.linear_sum is not None
        grads = torch.autograd.grad(scores.linear_sum, leaves(hidden, spec))
        found.append((scores.logp_N, scores.divergence_N, grads))
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("chunked")
def test_the_likeliest_tokens_are_the_plain_ones() -> None:
    hidden, spec = make(**SPECS["all of them"])  # type: ignore[arg-type]
    ids, logp = likeliest(hidden, spec, 3, 9)
    expected = spec.logits(hidden).log_softmax(-1)[:, :9].topk(3, dim=1)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(logp, expected.values, rtol=0, atol=1e-12)


LAYOUTS = {
    "alone": lambda samples: [pack([sample], ALONE) for sample in samples],
    "packed": lambda samples: [pack(samples, ALONE)],
    "shared": lambda samples: [pack(samples, SHARE_ALL)],
    "split": lambda samples: [pack(samples[::2], SHARE_ALL), pack(samples[1::2], ALONE)],
}


def taught(listed: bool) -> Scorer:
    """A student, and a teacher of another architecture and width."""
    student, model = tiny_model("gemma2"), tiny_model("qwen3", seed=3, hidden_size=24)
    for it in (student, model):
        it.set_attn_implementation(PREFIX + "reference")
    return Scorer(student, ListedTeacher() if listed else ModelTeacher(model))


def listed_samples(scorer: Scorer) -> list:  # type: ignore[type-arg]
    """Samples that bring three tokens for each target."""
    draw = np.random.default_rng(0)
    found = []
    for sample in nested_family(97):
        ids = np.stack([draw.permutation(97)[:3] for _ in range(sample.num_targets)])
        logp = np.log(draw.dirichlet(np.ones(4), sample.num_targets)[:, :3])
        streams = {TOP_IDS: ids.astype(np.float64), TOP_LOGP: logp}
        found.append(replace(sample, streams=streams))
    return found


def measured(scorer: Scorer, layouts: list[Packed], how: Divergence) -> tuple[float, list[Tensor]]:
    scorer.zero_grad()
    total = 0.0
    for packed in layouts:
        linear_2N = torch.stack([-0.5 * packed.weight_N, packed.weight_N])
        with compute_context(torch.float64, torch.device("cpu")):
            scores: Scores = scorer(packed, linear_2N, Wants(divergence=how))
        assert scores.linear_sum is not None
        scores.linear_sum.backward()  # type: ignore[no-untyped-call]
        total += float(scores.linear_sum.detach())
    return total, [p.grad.clone() for p in scorer.parameters() if p.grad is not None]


@pytest.mark.parametrize("listed", [False, True], ids=["model", "list"])
def test_every_layout_gives_the_same(listed: bool) -> None:
    scorer, how = taught(listed), Divergence("forward" if listed else "js")
    samples = listed_samples(scorer) if listed else nested_family(97)
    results = [measured(scorer, layout(samples), how) for layout in LAYOUTS.values()]
    assert results[0][0] > 1
    for left, right in pairwise(results):
        assert left[0] == pytest.approx(right[0], rel=LIMIT)
        worst = [(a - b).norm() / b.norm() for a, b in zip(left[1], right[1], strict=True)]
        assert float(max(worst)) < LIMIT


def test_the_teacher_is_no_part_of_the_student() -> None:
    scorer = taught(listed=False)
    before = set(scorer.state_dict())
    assert before == set(Scorer(scorer.model).state_dict())
    teacher = scorer.teacher
    assert isinstance(teacher, ModelTeacher)
    scorer.train()
    assert not teacher.scorer.training
    packed = pack(nested_family(97), SHARE_ALL)
    measured(scorer, [packed], Divergence("reverse"))
    assert all(p.grad is None and not p.requires_grad for p in teacher.scorer.parameters())
    with torch.no_grad():
        asked = scorer(packed, wants=Wants(divergence=Divergence("reverse")))
        plainly = scorer(packed)
    torch.testing.assert_close(asked.logp_N, plainly.logp_N, rtol=0, atol=0)
    assert plainly.divergence_N is None


def test_a_student_comes_near_its_teacher() -> None:
    scorer = taught(listed=False)
    packed = pack(nested_family(97), SHARE_ALL)
    wants = Wants(divergence=Divergence("forward"))
    optimizer = torch.optim.Adam(scorer.parameters(), lr=5e-3)
    seen = []
    for _ in range(40):
        linear_2N = torch.stack([torch.zeros_like(packed.weight_N), packed.weight_N])
        scores = scorer(packed, linear_2N / packed.weight_N.sum(), wants)
        scores.linear_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(scores.divergence_N.mean()))
    assert seen[-1] < 0.2 * seen[0]


def test_a_microbatch_without_targets_has_gradients_of_zero() -> None:
    (hidden, spec), (theirs, head) = make(has_bias=True), make(DT, seed=1)
    compared = whole(theirs[:0], head, HOW["js"])
    scores = score_hidden(hidden[:0], TARGET[:0], spec, LINEAR[:, :0], teacher=compared)
    assert scores.linear_sum is not None
    scores.linear_sum.backward()  # type: ignore[no-untyped-call]
    for leaf in leaves(hidden, spec):
        assert leaf.grad is not None
        assert not leaf.grad.any()
