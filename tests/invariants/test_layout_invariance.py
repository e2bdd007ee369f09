"""However samples are laid out, loss and gradients are the same, to float64 rounding.

Parametrized over the attention backends, the architectures and the losses that are linear in the log-probabilities: a
new entry of a registry is held to these by being listed. Every loss: test_losses.py. Reference for all: each sample
alone in a micro-batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from tests.helpers.kernel_emulation import flash_on_cpu
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, EIGHT, FOLLOWING, tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor
from transformers import PreTrainedModel

from taut.data.packing import ALONE, PackPolicy, pack
from taut.losses.loss import Loss
from taut.losses.registry import LOSSES
from taut.models.attention_backends import BACKENDS
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.types import Packed, Sample, Scores

LIMIT = 1e-9
SHARE_ALL = PackPolicy(share_prefixes=True, min_saved_tokens=1)
NO_BACKWARD_ON_CPU = {"flex"}
WITHOUT_SOFTCAP_AND_SINKS = {"varlen"}

LINEAR = [
    name
    for name, loss in LOSSES.items()
    if type(loss).linear_weights is not Loss.linear_weights and not loss.needs
]
"""Those that read streams as well are in test_losses.py."""

Layouts = Callable[[Sequence[Sample]], list[Packed]]

LAYOUTS: dict[str, Layouts] = {
    "packed": lambda samples: [pack(samples, ALONE)],
    "shared": lambda samples: [pack(samples, SHARE_ALL)],
    "shared where it pays": lambda samples: [pack(samples, PackPolicy(True, 20))],
    "shared, another order": lambda samples: [pack(samples[::-1], SHARE_ALL)],
    "packed, another order": lambda samples: [pack(samples[::-1], ALONE)],
    "split unevenly": lambda samples: [pack(samples[:1], SHARE_ALL), pack(samples[1:], SHARE_ALL)],
    "split, mixed": lambda samples: [pack(samples[::2], SHARE_ALL), pack(samples[1::2], ALONE)],
}


def load(name: str, backend: str) -> Scorer:
    return Scorer(tiny_model(name, attention=f"taut_{backend}"))


def measure(
    scorer: Scorer, loss: Loss, layouts: list[Packed], is_linear: bool
) -> tuple[float, dict[str, Tensor]]:
    """The step's loss sum and every gradient."""
    scorer.zero_grad()
    total = 0.0
    with compute_context(torch.float64, torch.device("cpu")):
        for packed in layouts:
            linear = loss.linear_weights(packed) if is_linear else None
            if linear is not None:
                scores = scorer(packed, torch.stack(list(linear.values())).sum(0))
                scores.linear_sum.backward()
            else:
                scores = scorer(packed)
                torch.stack(list(loss(scores, packed).terms.values())).sum().backward()
            total += sum(float(term.detach()) for term in loss(scores, packed).terms.values())
    gradients = {
        name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None
    }
    return total, gradients


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm().clamp_min(1e-30))


def require_equal(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]
) -> None:
    assert abs(found[0] - expected[0]) <= LIMIT * abs(expected[0])
    assert found[1].keys() == expected[1].keys()
    worst = {name: relative(found[1][name], grad) for name, grad in expected[1].items()}
    assert max(worst.values()) <= LIMIT, max(worst.items(), key=lambda item: item[1])


@pytest.fixture
def emulated() -> Iterator[None]:
    with flash_on_cpu():
        yield


CASES = [
    (name, backend)
    for name in (*CARRIED, *FOLLOWING)
    for backend in BACKENDS
    if backend not in NO_BACKWARD_ON_CPU
]
WINDOWED = {"mistral", "gemma3"}
"""Of the backends but the reference, these see the other architectures in the slow tests."""


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("loss", LINEAR)
@pytest.mark.parametrize(
    ("name", "backend"),
    slow_except([it for it in CASES if it[1] == "reference" or it[0] in WINDOWED], CASES),
)
def test_every_layout_gives_the_same_loss_and_gradients(name: str, backend: str, loss: str) -> None:
    if backend in WITHOUT_SOFTCAP_AND_SINKS and name in ("gemma2", "gpt_oss"):
        pytest.skip("refused by select: this backend has no softcap and no sinks")
    scorer = load(name, backend)
    samples = nested_family(scorer.model.config.vocab_size)
    expected = measure(scorer, LOSSES[loss], [pack([s], ALONE) for s in samples], is_linear=False)
    for layout in LAYOUTS.values():
        for is_linear in (False, True):
            require_equal(measure(scorer, LOSSES[loss], layout(samples), is_linear), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", EIGHT)
def test_flex_forward_equals_reference(name: str) -> None:
    packed = pack(nested_family(97), SHARE_ALL)
    with torch.no_grad():
        scores = [load(name, backend)(packed).logp_N for backend in ("flex", "reference")]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CARRIED)
def test_alone_equals_the_librarys_own_attention(name: str) -> None:
    """The chosen attention, the positions and the head give what the library's eager path gives."""
    ours = load(name, "reference")
    theirs: PreTrainedModel = tiny_model(name)
    theirs.set_attn_implementation("eager")
    with torch.no_grad(), compute_context(torch.float64, torch.device("cpu")):
        for sample in nested_family(97):
            packed = pack([sample], ALONE)
            logits = theirs(input_ids=packed.ids_T[None], use_cache=False).logits[0]
            every = logits.log_softmax(-1)[packed.predictor_N]
            expected = every.gather(1, packed.target_N[:, None])[:, 0]
            torch.testing.assert_close(ours(packed).logp_N, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*CARRIED, *FOLLOWING])
def test_touching_one_sample_leaves_the_others_alone(name: str) -> None:
    scorer = load(name, "reference")
    samples = nested_family(97)
    changed = Sample(
        "alone", (samples[3].ids_T + 1) % 97, samples[3].target_at_N, samples[3].weight_N
    )
    with torch.no_grad():
        before, after = (
            scores_by_id(scorer, pack(some, SHARE_ALL))
            for some in (samples, [*samples[:3], changed, *samples[4:]])
        )
    for sample_id, logp_N in before.items():
        gap = float((logp_N - after[sample_id]).abs().max())
        assert (gap > 1e-3) if sample_id == "alone" else (gap < LIMIT)


def scores_by_id(scorer: Scorer, packed: Packed) -> dict[str, Tensor]:
    logp_N = scorer(packed).logp_N
    return {name: logp_N[packed.row_N == row] for row, name in enumerate(packed.sample_ids)}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_weights_are_the_derivative(name: str) -> None:
    loss = LOSSES[name]
    packed = pack(nested_family(97), SHARE_ALL)
    linear = loss.linear_weights(packed)
    assert linear is not None
    logp_N = torch.randn(packed.num_targets, dtype=torch.float64, requires_grad=True)
    for term, total in loss(Scores(logp_N), packed).terms.items():
        (gradient,) = torch.autograd.grad(total, logp_N, retain_graph=True)
        torch.testing.assert_close(linear[term], gradient, rtol=0, atol=0)
