"""Distillation however samples are laid out is plain autograd over the library's own logits: loss and gradients.

Reference: each sample alone through the library's eager forward, of student and teacher, and all of [N, V].
"""

from __future__ import annotations

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor
from transformers import PreTrainedModel

from taut.data.packing import ALONE, PackPolicy, pack
from taut.losses.supervised import DistillLoss
from taut.models.attention_backends import PREFIX
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.models.teacher import ModelTeacher
from taut.types import Packed, Sample

LIMIT = 1e-9
SHARE_ALL = PackPolicy(share_prefixes=True, min_saved_tokens=1)
LOSSES = {
    "forward": DistillLoss(temperature=2.0, sft_weight=0.4),
    "reverse": DistillLoss(divergence="reverse"),
    "js": DistillLoss(divergence="js", beta=0.2, sft_weight=0.1),
}
CASES = [
    ("llama", "qwen3", "forward"),
    ("llama", "qwen3", "reverse"),
    ("gemma2", "mistral", "js"),
    ("qwen3_moe", "gemma2", "forward"),
    ("gpt_oss", "llama", "reverse"),
]
"""Student, teacher, loss: windows, softcaps, sinks and experts on either side."""


def models(student: str, teacher: str, attention: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    wide = tiny_model(teacher, seed=3, hidden_size=48)
    found = tiny_model(student), wide.eval().requires_grad_(requires_grad=False)
    for model in found:
        model.set_attn_implementation(attention)
    return found


def plainly(
    student: PreTrainedModel, teacher: PreTrainedModel, samples: list[Sample], loss: DistillLoss
) -> float:
    """Adds the gradient; gives the loss."""
    total = 0.0
    how = loss.wants.divergence
    assert how is not None
    for sample in samples:
        packed = pack([sample], ALONE)
        z_s, z_t = (
            model(input_ids=packed.ids_T[None], use_cache=False).logits[0][packed.predictor_N]
            for model in (student, teacher)
        )
        s, t = ((z / how.temperature).log_softmax(-1) for z in (z_s, z_t))
        beta = {"forward": 1.0, "reverse": 0.0, "js": how.beta}[how.kind]
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        to_student, to_teacher = {"forward": (s, t), "reverse": (s, t), "js": (m, m)}[how.kind]
        forward = (t.exp() * (t - to_student)).sum(1)
        reverse = (s.exp() * (s - to_teacher)).sum(1)
        divergence_N = beta * forward + (1 - beta) * reverse
        logp_N = z_s.log_softmax(-1).gather(1, packed.target_N[:, None])[:, 0]
        each_N = how.temperature**2 * divergence_N - loss.sft_weight * logp_N
        value = (packed.weight_N * each_N).sum()
        value.backward()
        total += float(value.detach())
    return total


def packed_ways(samples: list[Sample]) -> dict[str, list[Packed]]:
    return {
        "packed": [pack(samples, ALONE)],
        "shared": [pack(samples, SHARE_ALL)],
        "split, mixed": [pack(samples[::2], SHARE_ALL), pack(samples[1::2], ALONE)],
    }


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("student", "teacher", "kind"), CASES)
def test_every_layout_gives_what_plain_autograd_gives(
    student: str, teacher: str, kind: str
) -> None:
    loss, samples = LOSSES[kind], nested_family(97)
    with compute_context(torch.float64, torch.device("cpu")):
        theirs = models(student, teacher, "eager")
        expected = plainly(*theirs, samples, loss)
        wanted = gradients(theirs[0])
        ours = models(student, teacher, PREFIX + "reference")
        scorer = Scorer(ours[0], ModelTeacher(ours[1]))
        for name, layout in packed_ways(samples).items():
            found = 0.0
            for packed in layout:
                linear_2N = torch.stack(list(loss.linear_weights(packed).values())).sum(0)
                scores = scorer(packed, linear_2N, loss.wants)
                scores.linear_sum.backward()
                terms = loss(scores, packed).terms
                found += sum(float(term.detach()) for term in terms.values())
            assert found == pytest.approx(expected, rel=LIMIT), name
            grads = gradients(ours[0])
            assert grads.keys() == wanted.keys()
            scale = max(float(grad.norm()) for grad in wanted.values())
            worst = max(float((grads[key] - grad).norm()) for key, grad in wanted.items())
            assert worst <= LIMIT * scale, name
