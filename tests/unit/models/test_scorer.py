"""The chunked head against the plain one: values and every gradient, both ways through it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn

from taut.attention.layout import Call, Layout
from taut.data.packing import ALONE, PackPolicy, pack
from taut.models import attention_backends, scorer
from taut.models.architecture import HeadSpec, Rows, head
from taut.models.attention_backends import PREFIX
from taut.models.scorer import CHUNK_ELEMENTS, Scorer, chunk_elements, score_hidden
from taut.types import Scores, Wants

N, D, V = 23, 8, 17

SPECS = {
    "plain": {},
    "bias": {"has_bias": True},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.6},
    "rows": {"has_rows": True},
    "temperature": {"softcap": 3.0, "temperature": 0.7},
    "all of them": {
        "has_bias": True,
        "softcap": 3.0,
        "scale": 1.7,
        "has_rows": True,
        "temperature": 1.3,
    },
}


@pytest.fixture(params=[4, 256], ids=["chunks of 4", "one chunk"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scorer, "MIN_CHUNK_ROWS", request.param)
    monkeypatch.setattr(scorer, "CHUNK_ELEMENTS", request.param * V)
    return int(request.param)


def make(
    dtype: torch.dtype = torch.float64,
    has_bias: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    has_rows: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, HeadSpec]:
    """Hidden states, targets and a head."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = draw(N, D).requires_grad_()
    target = torch.randint(0, V, (N,), generator=generator)
    bias = nn.Parameter(draw(V)) if has_bias else None
    weight = nn.Parameter(draw(V, D), requires_grad=not has_rows)
    rows = Rows(torch.tensor([16, 3]), nn.Parameter(draw(2, D))) if has_rows else None
    return hidden, target, HeadSpec(weight, bias, softcap, scale, rows, temperature)


def plain(hidden: Tensor, target: Tensor, spec: HeadSpec) -> Scores:
    """Through [N, V] and autograd."""
    every = spec.logits(hidden).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
    return Scores(every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(1))


def leaves(hidden: Tensor, spec: HeadSpec) -> list[Tensor]:
    trained = spec.weight if spec.rows is None else spec.rows.weight_RD
    return [hidden, trained] + ([] if spec.bias is None else [spec.bias])


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", SPECS)
def test_scores_and_gradients_equal_the_plain_head(kind: str) -> None:
    hidden, target, spec = make(**SPECS[kind])  # type: ignore[arg-type]
    up = torch.linspace(-1, 2, N, dtype=torch.float64)
    across = torch.linspace(1, -2, N, dtype=torch.float64)
    results = []
    for way in (plain, lambda *args: score_hidden(*args, with_entropy=True)):
        logp, entropy, *_ = way(hidden, target, spec)
        total = (up * logp).sum() + (across * entropy).sum()
        results.append((logp, entropy, torch.autograd.grad(total, leaves(hidden, spec))))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", SPECS)
def test_predicted_tokens_leave_the_scores_as_they_are(kind: str) -> None:
    hidden, target, spec = make(**SPECS[kind])  # type: ignore[arg-type]
    found = score_hidden(hidden, target, spec, with_predicted=True)
    assert found.predicted_N is not None
    assert found.predicted_N.tolist() == spec.logits(hidden).argmax(-1).tolist()
    assert torch.equal(found.logp_N, score_hidden(hidden, target, spec).logp_N)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", SPECS)
def test_the_linear_way_equals_the_plain_head(kind: str) -> None:
    hidden, target, spec = make(**SPECS[kind])  # type: ignore[arg-type]
    linear = torch.linspace(-2, 1, N, dtype=torch.float64)
    expected = plain(hidden, target, spec)
    total = (linear * expected.logp_N).sum()
    found = score_hidden(hidden, target, spec, linear)
    assert found.linear_sum is not None
    torch.testing.assert_close(found.linear_sum, total, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.logp_N, expected.logp_N, rtol=0, atol=1e-12)
    assert not found.logp_N.requires_grad
    grads = [torch.autograd.grad(3 * t, leaves(hidden, spec)) for t in (found.linear_sum, total)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", ["bias", "all of them"])
def test_gradcheck(kind: str) -> None:
    hidden, target, spec = make(**SPECS[kind])  # type: ignore[arg-type]
    linear = torch.linspace(-2, 1, N, dtype=torch.float64)

    def through(h: Tensor, w: Tensor, b: Tensor) -> HeadSpec:
        if spec.rows is None:
            return replace(spec, weight=w, bias=b)  # type: ignore[arg-type]
        return replace(spec, bias=b, rows=Rows(spec.rows.index_R, w))  # type: ignore[arg-type]

    def general(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return score_hidden(h, target, through(h, w, b), with_entropy=True)[:2]  # type: ignore[return-value]

    def linearly(h: Tensor, w: Tensor, b: Tensor) -> Tensor | None:
        return score_hidden(h, target, through(h, w, b), linear).linear_sum

    inputs = tuple(leaves(hidden, spec))
    assert torch.autograd.gradcheck(general, inputs)
    assert torch.autograd.gradcheck(linearly, inputs)


def test_entropy_is_absent_unless_asked_for() -> None:
    hidden, target, spec = make()
    assert score_hidden(hidden, target, spec).entropy_N is None
    assert score_hidden(hidden, target, spec, torch.ones(N)).entropy_N is None


@pytest.mark.parametrize("is_linear", [True, False])
def test_a_microbatch_without_targets_has_gradients_of_zero(is_linear: bool) -> None:
    hidden, target, spec = make(has_bias=True)
    scores = score_hidden(hidden[:0], target[:0], spec, torch.ones(0) if is_linear else None)
    total = scores.linear_sum if is_linear else scores.logp_N.sum()
    assert total is not None
    total.backward()  # type: ignore[no-untyped-call]
    for leaf in leaves(hidden, spec):
        assert leaf.grad is not None
        assert not leaf.grad.any()


@pytest.mark.parametrize("is_linear", [True, False])
def test_a_frozen_head_gets_no_gradient_and_costs_none(
    is_linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, target, spec = make(has_bias=True)
    expected = torch.autograd.grad(plain(hidden, target, spec).logp_N.sum(), hidden)[0]
    assert spec.bias is not None
    spec.weight.requires_grad_(False)
    spec.bias.requires_grad_(False)
    made: list[scorer.Sums] = []
    initialize = scorer.Sums.__init__

    def record(self: scorer.Sums, *args: object) -> None:
        initialize(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(scorer.Sums, "__init__", record)
    scores = score_hidden(hidden, target, spec, torch.ones(N) if is_linear else None)
    total = scores.linear_sum if is_linear else scores.logp_N.sum()
    assert total is not None
    total.backward()  # type: ignore[no-untyped-call]
    assert spec.weight.grad is None
    assert spec.bias.grad is None
    assert [(s.weight, s.bias) for s in made] == [(None, None)]
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_extreme_logits_stay_finite(is_linear: bool, softcap: float | None) -> None:
    hidden, target, spec = make(torch.float32, softcap=softcap)
    huge = (hidden.detach() * 1e6).requires_grad_()
    linear = torch.ones(N) if is_linear else None
    scores = score_hidden(huge, target, spec, linear, with_entropy=not is_linear)
    total = scores.linear_sum
    if scores.entropy_N is not None:
        assert torch.isfinite(scores.entropy_N).all()
        total = scores.logp_N.sum() + scores.entropy_N.sum()
    assert total is not None
    total.backward()  # type: ignore[no-untyped-call]
    assert all(torch.isfinite(t).all() for t in (scores.logp_N, huge.grad, spec.weight.grad))  # type: ignore[arg-type]
    assert float(scores.logp_N.detach().min()) < -20


@pytest.mark.parametrize("is_linear", [True, False])
def test_under_autocast_it_is_as_near_the_truth_as_plain_autocast(
    is_linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "CHUNK_ELEMENTS", 256 * 64)
    generator = torch.Generator().manual_seed(0)
    exact_hidden = torch.randn(600, 32, generator=generator, dtype=torch.float64)
    exact_weight = torch.randn(64, 32, generator=generator, dtype=torch.float64) * 0.2
    target = torch.randint(0, 64, (600,), generator=generator)

    def run(way: str, dtype: torch.dtype) -> list[Tensor]:
        hidden = exact_hidden.detach().clone().to(dtype).requires_grad_()
        weight = nn.Parameter(exact_weight.to(dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float64):
            if way == "plain":
                logp = (
                    (hidden @ weight.T).to(dtype).log_softmax(-1).gather(1, target[:, None])[:, 0]
                )
                total: Tensor | None = logp.sum()
            else:
                scores = score_hidden(
                    hidden, target, HeadSpec(weight), torch.ones(600) if is_linear else None
                )
                logp, total = scores.logp_N, scores.linear_sum if is_linear else scores.logp_N.sum()
        assert total is not None
        total.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert weight.grad is not None
        return [logp.detach().double(), hidden.grad.double(), weight.grad.double()]

    truth, ours, theirs = (
        run("plain", torch.float64),
        run("ours", torch.float32),
        run("plain", torch.float32),
    )
    for exact, mine, other in zip(truth, ours, theirs, strict=True):
        error = float((mine - exact).norm() / exact.norm())
        assert error <= 1.2 * float((other - exact).norm() / exact.norm())
        assert error < 0.02


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "granite", "qwen2"])
def test_the_head_of_an_architecture_is_its_own(name: str) -> None:
    """Softcap, logit scale, logits scaling, tied weights: read from the model, equal to its own logits."""
    model = tiny_model(name)
    model.set_attn_implementation(f"{PREFIX}reference")
    hidden = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.arange(5)
    spec = head(model)
    logp_N = score_hidden(hidden, target, spec).logp_N
    torch.testing.assert_close(logp_N, plain(hidden, target, spec).logp_N, rtol=0, atol=1e-12)
    packed = pack(nested_family(97), PackPolicy(True, 1))
    scores = Scorer(model)(packed, wants=Wants(entropy=True))
    assert scores.logp_N.shape == (packed.num_targets,)
    assert float(scores.logp_N.detach().max()) < 0
    assert float(scores.entropy_N.detach().min()) > 0
    assert float(scores.entropy_N.detach().max()) <= math.log(97)


@pytest.mark.parametrize("is_autocast", [True, False], ids=["autocast", "narrow weights"])
@pytest.mark.parametrize("kind", ["plain", "softcap", "scale", "rows"])
def test_narrow_logits_are_the_chunked_heads(kind: str, is_autocast: bool) -> None:
    """What an engine draws from is what is trained: scale and softcap are not computed in bfloat16."""
    dtype = torch.float32 if is_autocast else torch.bfloat16
    hidden, target, spec = make(dtype, **SPECS[kind])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        trained = score_hidden(hidden, target, spec).logp_N
        every = spec.logits(hidden).log_softmax(-1)
    assert every.dtype == torch.float32
    drawn = every.gather(1, target[:, None]).squeeze(1)
    assert torch.allclose(drawn, trained, atol=1e-5, rtol=0)


def test_chunks_of_a_gpu_follow_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for gigabytes, expected in ((80, 80 * 2**30 // 256), (2, CHUNK_ELEMENTS)):
        memory = SimpleNamespace(total_memory=gigabytes * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        assert chunk_elements(torch.device("cuda"), torch.float32) == expected
    assert chunk_elements(torch.device("cpu"), torch.float32) == CHUNK_ELEMENTS


@pytest.mark.parametrize("backend", attention_backends.AHEAD)
def test_the_layers_find_what_they_read_of_a_layout_made(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a window that bites, and the rows that the last layer computes."""
    model = Scorer(tiny_model("gemma3", attention=PREFIX + backend))
    windows: list[int | None] = []

    def looks(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
        made = set(layout.cache)
        attention_backends.AHEAD[backend](layout, call.window)
        assert set(layout.cache) == made
        windows.append(call.window)
        return q

    monkeypatch.setitem(attention_backends.BACKENDS, backend, looks)
    packed = pack(nested_family(64), ALONE)
    there = model.ready(packed)
    assert there.on_host is packed
    assert packed.layout is None
    assert "row_index" in vars(there.layout)
    model(there)
    assert len(set(windows)) == 2
