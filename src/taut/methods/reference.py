"""The reference of preference optimization: log-probabilities of the policy at the start of the run.

    start       copies of the trained tensors at the start, which are swapped with the policy's for a forward. With LoRA
                they are the adapters alone (B = 0: the base model; with lora.adapter: that adapter); without, a frozen
                copy of the model. Never read from a checkpoint's weights
    model       another model directory
    file        logprobs computed once before training and saved, with a fingerprint of all that they depend on

``update_every`` moves the start towards the policy (TR-DPO, arXiv 2404.09656): ref <- (1 - mix) ref + mix policy.

The reference scores the same micro-batch as the policy, in the same layout and precision, without gradient: at step
0 the two agree to the last bit, unless another model is named. Its stream is ``ref_logp_N``.

``methods.aux_models`` makes the roles, ``run.reference_cache`` reads and writes the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from taut.methods.settings import STREAM, ReferenceConfig
from taut.models.scorer import evaluating
from taut.train import distributed
from taut.train.trainer import Role
from taut.types import Packed, Wants


class Start(nn.Module):
    """Copies of the policy's initial trained tensors, swapped with the current ones for the reference's forwards. Part
    of the scorer while the reference is updated, so that a checkpoint holds them.
    """

    gives = STREAM

    def __init__(
        self,
        scorer: nn.Module,
        trained: Sequence[nn.Parameter],
        config: ReferenceConfig,
        wants: Wants,
    ) -> None:
        super().__init__()
        self._wants = wants
        self._scorer = [scorer]  # in a list: not a part of this one
        self._trained = list(trained)
        self._config = config
        for number, parameter in enumerate(trained):
            copy = parameter.detach().clone()
            self.register_buffer(f"tensor_{number}", copy, persistent=config.update_every > 0)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The policy with the tensors of the start."""
        with evaluating(self._scorer[0]):
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    def streams(self, packed: Packed) -> dict[str, Tensor]:
        scores = self._scorer[0](packed, wants=self._wants)
        return {STREAM: scores.logp_N}

    def tensors(self) -> list[Tensor]:
        return list(self.buffers())

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Update the copies towards the policy, if an update is due after ``step``."""
        every, mix = self._config.update_every, self._config.update_mix
        if not every or step % every:
            return
        for number, parameter in enumerate(self._trained):
            self.get_buffer(f"tensor_{number}").lerp_(parameter.detach(), mix)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the contents of the policy's tensors and of the copies."""
        for number, parameter in enumerate(self._trained):
            distributed.swap(parameter, self.get_buffer(f"tensor_{number}"))
        distributed.reshard(self._scorer[0])


class Other:
    """Another model as the reference."""

    gives = STREAM

    def __init__(self, scorer: nn.Module, wants: Wants) -> None:
        self._wants = wants
        self._scorer = scorer.eval().requires_grad_(requires_grad=False)

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def streams(self, packed: Packed) -> dict[str, Tensor]:
        return {STREAM: self._scorer(packed, wants=self._wants).logp_N}

    def tensors(self) -> list[Tensor]:
        return list(self._scorer.parameters())

    def follow(self, step: int) -> None:
        """The reference does not change."""


class Recorded:
    """A reference whose logprobs are in a file. ``live`` computes them until they are recorded and is then released."""

    gives = STREAM

    def __init__(self, live: Role) -> None:
        self._live: Role | None = live
        self._find: Callable[[str], Tensor] | None = None

    def record(self, find: Callable[[str], Tensor]) -> None:
        """From now on use the logprobs of ``find``, which takes a sample id."""
        self._live, self._find = None, find

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._live is None else self._live.active()

    def tensors(self) -> list[Tensor]:
        """Tensors of ``live``; recorded logprobs are on the host."""
        return [] if self._live is None else self._live.tensors()

    def streams(self, packed: Packed) -> dict[str, Tensor]:
        if self._find is None:
            assert self._live is not None
            return self._live.streams(packed)
        return {STREAM: torch.cat([self._find(name) for name in packed.sample_ids])}

    def follow(self, step: int) -> None:
        """The reference does not change."""
