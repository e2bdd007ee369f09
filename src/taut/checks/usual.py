"""Numbers that people mean: ranges of settings, wide around what recipes have.

A number outside is a warning: more often it is a slip (a percent for a share, another framework's unit) than an
experiment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

from taut.checks.registry import Finding, check, passed, warned
from taut.checks.session import Session
from taut.config import to_dict
from taut.methods.sources import Offline
from taut.train.optim import highest


class Usual(NamedTuple):
    """The range of a key, or of a pattern of keys."""

    key: str
    low: float
    high: float
    source: str
    """What recipes have, and whose."""


USUAL = (
    Usual("optim.weight_decay", 0, 0.5, "0 in TRL and Tulu 3, 0.1 in pretraining"),
    Usual("optim.beta1", 0, 0.98, "0.9 in all recipes"),
    Usual("optim.beta2", 0.9, 0.9999, "0.95 to 0.999"),
    Usual("optim.eps", 1e-16, 1e-4, "1e-8; 1e-5 in PPO"),
    Usual("optim.clip_grad_norm", 0.01, 100, "1; 0.1 in verl's recipes of long answers"),
    Usual("optim.warmup_ratio", 0, 0.5, "0.03 to 0.1 in alignment-handbook and Tulu 3"),
    Usual("epochs", 0, 30, "1 to 3; 15 to 20 for hundreds of rows"),
    Usual("lora.rank", 0, 1024, "8 to 256 in LoRA Without Regret"),
    Usual("lora.alpha", 0.5, 2048, "one to two times the rank"),
    Usual("lora.dropout", 0, 0.5, "0 to 0.1 in QLoRA"),
    Usual("noise.neftune_alpha", 0, 50, "5 to 15 in its paper"),
    Usual("dpo.beta", 0.001, 20, "0.01 to 0.5; 5 in Tulu 3, by length"),
    Usual("kto.beta", 0.001, 10, "0.1 in its paper"),
    Usual("cpo.beta", 0.001, 10, "0.1 in its paper"),
    Usual("orpo.beta", 0.001, 10, "0.1 in its paper"),
    Usual("online_dpo.beta", 0.001, 20, "0.1 in TRL"),
    Usual("simpo.beta", 0.1, 100, "2 to 10 by its authors"),
    Usual("simpo.gamma", 0, 30, "0.3 to 1.6, or half of beta, by its authors"),
    Usual("distill.temperature", 0.2, 20, "1 to 4"),
    Usual("*.kl_coef", 0, 1, "0 to 0.05 in verl, OpenRLHF and Tulu 3"),
    Usual("*.entropy_coef", 0, 0.5, "0 to 0.01 in verl"),
    Usual("*.clip_low", 1e-5, 1, "0.2 in PPO, 3e-4 in GSPO"),
    Usual("*.clip_high", 1e-5, 10, "0.2 to 0.28; 4 in CISPO"),
    Usual("ppo.gamma", 0.9, 1, "1 in InstructGPT and OpenRLHF"),
    Usual("ppo.value_coef", 0.001, 10, "0.1 to 1 in TRL and verl"),
    Usual("rollout.temperature", 0.2, 2, "0.6 to 1.2"),
    Usual("rollout.max_new_tokens", 4, 1e6, "256 to 32,768"),
    Usual("batch.samples_per_step", 1, 65_536, "8 to 1,024"),
)
"""Wide around the sources, so that an experiment is seldom outside."""
RATES = 1 / 300, 30.0
"""The lowest and the highest learning rate, in multiples of the method's default. The highest is for models of 4,096
dimensions, and in inverse proportion higher for narrower ones."""


@check("run.usual", after=["model.trains"])
def numbers_are_those_people_mean(session: Session) -> Finding:
    """Are the run's numbers within what people use?

    The table of docs/hyperparameters.md; the learning rate against the method's default; and passes over few rows.
    """
    values = dict(_flat(to_dict(session.run)))
    ranges = [
        (key, value, one.low, one.high, one.source)
        for key, value in values.items()
        for one in USUAL
        if fnmatch(key, one.key)
    ]
    rates, optim = session.run.learning_rates, session.run.resolved_optim
    default = rates.lora if session.run.lora.is_on else rates.full
    width = session.language.config.get_text_config().hidden_size
    most = RATES[1] * default * max(1.0, 4096 / width)
    ranges.append(("optim.learning_rate", highest(optim), RATES[0] * default, most, rates.sources))
    source = session.trainer.source
    if isinstance(source, Offline) and "epochs" not in values:
        times = source.cursor(session.trainer.num_steps).samples / source.order.epoch_size
        ranges.append(("passes over the data (steps)", times, 0, 100, "1 to 3"))
    outside = [
        f"{key}={value:g}: usual are {low:g} to {high:g} ({origin})"
        for key, value, low, high, origin in ranges
        if not low <= value <= high
    ]
    if outside:
        return warned(
            f"{outside[0].partition(':')[0]} is outside of what people use",
            measured=(len(outside), f"of {len(ranges)} numbers"),
            evidence=outside,
            remedy="correct it if it is a slip; if it is meant, go on",
        )
    return passed("within what people use", len(ranges), "numbers")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Keys with dots and their numbers."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield before + key, float(value)
