"""The commands that train: each a run (taut/run/config.py) with a section of its own, and what it minimises.

    taut sft        Run               taut reward     RewardRun
    taut dpo        DpoRun            taut kto        KtoRun
    taut orpo       OrpoRun           taut simpo      SimpoRun          taut cpo     CpoRun
    taut distill    DistillRun

Those that learn from what the model generates are in online_runs.py.

A new method is a configclass and a loss (taut/methods, taut/losses), a class here, and a line in ``METHODS``.

May import run, methods and losses. api, commands and the command line import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from taut.config import configclass, read_toml
from taut.errors import ConfigError
from taut.losses import Loss
from taut.losses.preference import Unpaired
from taut.methods.distill import DistillConfig
from taut.methods.preference import CpoConfig, DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from taut.methods.reference import STREAM, ReferenceConfig
from taut.methods.reward import RewardConfig
from taut.models.reward_model import NewHead
from taut.run.config import Comparing, Method, Objective, Run
from taut.run.online_runs import BestOfNRun, GkdRun, GrpoRun, OnlineDpoRun, PpoRun
from taut.train.optim import DefaultRates


def _of_pairs(loss: Loss, reference: ReferenceConfig | None = None) -> Objective:
    """A loss on the answers of a row, compared with each other."""
    return Objective(loss, "preference", are_compared=True, reference=reference)


@configclass
class DpoRun(Comparing):
    """A run of ``taut dpo``."""

    METHOD: ClassVar[Method] = "dpo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL; with adapters TRL and tinker-cookbook; Tulu 3 and zephyr (7B, 8B): 5e-7"
    )

    method: Method = "dpo"
    dpo: DpoConfig = DpoConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def objective(self) -> Objective:
        loss = self.dpo.make_loss()
        needed = self.reference if STREAM in loss.needs else None
        return _of_pairs(loss, needed)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dpo.reference_free and self.reference != ReferenceConfig():
            raise ConfigError(
                "dpo.reference_free=true and settings of reference contradict each other: there is none; keep one"
            )


@configclass
class KtoRun(Comparing):
    """A run of ``taut kto``."""

    METHOD: ClassVar[Method] = "kto"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL, which advises 5e-7 to 5e-6"
    )

    method: Method = "kto"
    kto: KtoConfig = KtoConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def objective(self) -> Objective:
        loss = self.kto.make_loss()
        is_mismatched = isinstance(loss, Unpaired) and loss.mismatched
        return Objective(loss, "unpaired", is_mismatched=is_mismatched, reference=self.reference)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch.samples_per_step < 2 and self.objective.loss.observes:
            raise ConfigError(
                f"batch.samples_per_step=1 with kto.loss={self.kto.loss}: its reference point is taken over the "
                "samples of a step; expected 2 or more; raise it, or set kto.loss=apo_zero"
            )
        if self.objective.is_mismatched and self.reference.file is not None:
            raise ConfigError(
                f"reference.file={self.reference.file} and kto.loss={self.kto.loss} contradict each other: its "
                "reference point is taken over prompts with each other's answers, which differ from step to step and "
                "are in no file; take reference.file out, or set kto.loss=bco"
            )


@configclass
class OrpoRun(Comparing):
    """A run of ``taut orpo``."""

    METHOD: ClassVar[Method] = "orpo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        5e-6, 5e-5, "alignment-handbook (zephyr-orpo); TRL: 1e-6"
    )

    method: Method = "orpo"
    orpo: OrpoConfig = OrpoConfig()

    @property
    def objective(self) -> Objective:
        return _of_pairs(self.orpo.make_loss())


@configclass
class SimpoRun(Comparing):
    """A run of ``taut simpo``."""

    METHOD: ClassVar[Method] = "simpo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "its authors: 3e-7 to 1e-6, and 1e-5 breaks the model"
    )

    method: Method = "simpo"
    simpo: SimpoConfig = SimpoConfig()

    @property
    def objective(self) -> Objective:
        return _of_pairs(self.simpo.make_loss())


@configclass
class CpoRun(Comparing):
    """A run of ``taut cpo``."""

    METHOD: ClassVar[Method] = "cpo"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(1e-6, 1e-5, "TRL")

    method: Method = "cpo"
    cpo: CpoConfig = CpoConfig()

    @property
    def objective(self) -> Objective:
        return _of_pairs(self.cpo.make_loss())


@configclass
class RewardRun(Comparing):
    """A run of ``taut reward``."""

    METHOD: ClassVar[Method] = "reward"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        1e-5, 1e-4, "OpenRLHF: 9e-6; Tulu 3 (8B): 3e-6; tinker-cookbook with LoRA: 3e-4"
    )

    method: Method = "reward"
    reward: RewardConfig = RewardConfig()

    @property
    def objective(self) -> Objective:
        config = self.reward
        return Objective(
            config.make_loss(),
            config.kind,
            are_compared=config.kind == "preference",
            head=NewHead(config.head_kind, config.bias, self.seed),
        )


@configclass
class DistillRun(Run):
    """A run of ``taut distill``."""

    METHOD: ClassVar[Method] = "distill"
    LEARNING_RATES: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "TRL; tinker-cookbook with LoRA: 1e-4 to 1e-3"
    )

    method: Method = "distill"
    distill: DistillConfig = DistillConfig()

    @property
    def objective(self) -> Objective:
        return Objective(self.distill.make_loss(), teacher=self.distill)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distill.require_teacher(self.model, has_eval=bool(self.data.eval))


METHODS: dict[Method, type[Run]] = {
    "sft": Run,
    "reward": RewardRun,
    "dpo": DpoRun,
    "kto": KtoRun,
    "orpo": OrpoRun,
    "simpo": SimpoRun,
    "cpo": CpoRun,
    "distill": DistillRun,
    "grpo": GrpoRun,
    "ppo": PpoRun,
    "online_dpo": OnlineDpoRun,
    "best_of_n": BestOfNRun,
    "gkd": GkdRun,
}


def class_of(path: Path | None, overrides: Sequence[str] = ()) -> type[Run]:
    """The class of the run that a file and what is set on top describe, by its ``method``."""
    named = read_toml(path).get("method", "sft")
    for text in overrides:
        key, _, value = text.partition("=")
        named = value.strip().strip("\"'") if key.strip() == "method" else named
    found = next((cls for name, cls in METHODS.items() if name == named), None)
    if found is None:
        raise ConfigError(f"found method={named}; expected one of {', '.join(METHODS)}; correct it")
    return found
