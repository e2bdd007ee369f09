"""For stacks that are not ours: the pair of samples packed as plain transformers would be given it.

Every setting people use is tried with the kernel that the library takes (use_cache, a mask of ones, position_ids that
begin anew) and compared with the second sample alone: what differs by more than rounding leaks. That is told and no
failure, since taut uses none of it; told too is which kernels the run's own attention takes, by the profiler.

A failure is that the library's kernels differ about a sample alone: then ``attention.packed`` compared with something
that may be wrong, and a server computes something else than the trainer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from taut.checks.differ import drift
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.packing import ALONE, pack
from taut.models import architecture
from taut.models.heads import scalar, scalar_head
from taut.models.load import set_attention
from taut.types import Sample
from taut.vision import tower

KERNEL = re.compile(r"_(?:flash|efficient|cudnn)_attention|flash|fmha|flex|aten::_softmax")
SHOWN = 3


class Setting(NamedTuple):
    """How plain transformers is called."""

    kernel: str
    has_positions: bool
    has_mask: bool
    uses_cache: bool

    def __str__(self) -> str:
        return ", ".join(
            (
                "position_ids" if self.has_positions else "no position_ids",
                "mask of ones" if self.has_mask else "no mask",
                "use_cache=True (the default)" if self.uses_cache else "use_cache=False",
            )
        )


def ask(session: Session) -> Finding:
    """Do the library's own attention kernels agree about this model?"""
    unit = f"{session.says.unit} a token"
    kernels = ["eager", *(["sdpa"] if session.model._supports_sdpa else [])]
    first, second = session.pair
    alone = {
        kernel: _numbers(session, Setting(kernel, False, False, False), [second])
        for kernel in kernels
    }
    apart = drift(alone[kernels[0]], alone[kernels[-1]])
    if apart > session.tolerance:
        return failed(
            f"the {session.says.many} of {second.id} alone differ by {apart:.3g} {unit} between "
            f"{' and '.join(kernels)}",
            number=apart,
            unit=unit,
            evidence=[f"at most {session.tolerance:g} is rounding in {session.dtype}"],
            remedy="one of them drops what this model asks of attention (a softcap, a scale, a window); name the one "
            "you serve with, compare it with the model's paper, and please report the model to transformers",
        )
    used = kernels[-1]
    leaks = {
        setting: drift(alone[used], _numbers(session, setting, [first, second]))
        for setting in (Setting(used, *it) for it in product((True, False), *[(False, True)] * 2))
    }
    said = f"{' and '.join(kernels)} agree"
    return passed(said, apart, unit, [_profiled(session), *_told(leaks, session.tolerance, unit)])


def _profiled(session: Session) -> str:
    """The kernels of attention in a forward of the run's own, by name."""
    is_cuda = session.ranks.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces itself on stderr
    with profile(activities=[activity]) as profiled:
        session.numbers(session.pair[:1])
    counts = {event.key: event.count for event in profiled.key_averages()}
    found = [f"{name} ({times}x)" for name, times in counts.items() if KERNEL.search(name)]
    chosen = session.loaded.attention.name
    return f"{chosen} runs {', '.join(found[:SHOWN]) or 'no kernel with a name of attention'}"


def _told(leaks: dict[Setting, float], limit: float, unit: str) -> Iterator[str]:
    """One line for each way to call the library."""
    used = next(iter(leaks)).kernel
    yield f"two samples packed by plain transformers ({used}), the second against itself alone:"
    for setting, value in leaks.items():
        yield f"{'right' if value <= limit else 'LEAKS':5}  {setting} ({value:.2g} {unit})"


@torch.no_grad()
def _numbers(session: Session, setting: Setting, samples: list[Sample]) -> Tensor:
    """log-probs of the last sample's targets, or scores where they are predicted, as the library computes them."""
    packed = pack(samples, ALONE).to(session.ranks.device)
    ids, backbone = packed.ids_T, architecture.decoder(session.model)
    keywords: dict[str, Any] = {"use_cache": setting.uses_cache}
    keywords |= tower.library_arguments(backbone, packed.media, ids)
    if setting.has_positions:
        keywords["position_ids"] = packed.position_ids.unsqueeze(-2)
    if setting.has_mask:
        keywords["attention_mask"] = torch.ones_like(ids)[None]
    last = samples[-1]
    at = torch.from_numpy(last.target_at_N - 1).to(ids.device) + (ids.numel() - last.num_tokens)
    with session.quiet(), plainly(session, setting.kernel):
        if session.is_scalar:
            hidden_TD = backbone(input_ids=ids[None], **keywords)[0][0]
            head = scalar_head(session.scorer.model)
            return scalar(hidden_TD.index_select(0, at), head).cpu()
        logits = session.model(input_ids=ids[None], logits_to_keep=at, **keywords).logits[0]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_N = torch.from_numpy(last.ids_T[last.target_at_N]).to(ids.device)
    return torch.log_softmax(wide, -1).gather(1, target_N[:, None]).squeeze(1).cpu()


@contextmanager
def plainly(session: Session, kernel: str) -> Iterator[None]:
    """The model with one of the library's kernels."""
    ours = architecture.text_config(session.model)._attn_implementation
    set_attention(session.model, kernel)
    try:
        yield
    finally:
        set_attention(session.model, ours)
