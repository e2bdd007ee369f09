"""What a user says of preference optimization becomes the loss that was meant, or an error that says what to do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from tests.helpers.refusals import ErrorCode, says

from taut.config import configclass, load
from taut.errors import ConfigError
from taut.losses.loss import Loss
from taut.losses.preference import VARIANTS, CpoLoss, DpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from taut.losses.settings import (
    CpoConfig,
    DpoConfig,
    DpoVariant,
    KtoConfig,
    OrpoConfig,
    SimpoConfig,
)


@configclass
class Sections:
    dpo: DpoConfig = DpoConfig()
    kto: KtoConfig = KtoConfig()
    orpo: OrpoConfig = OrpoConfig()
    simpo: SimpoConfig = SimpoConfig()
    cpo: CpoConfig = CpoConfig()


def sections(*overrides: str) -> Sections:
    return load(Sections, None, overrides)


def test_every_variant_can_be_named() -> None:
    assert set(get_args(DpoVariant)) == set(VARIANTS)


LOSS_OF: dict[str, type[Loss]] = {
    "dpo": DpoLoss,
    "kto": KtoLoss,
    "orpo": OrpoLoss,
    "simpo": SimpoLoss,
    "cpo": CpoLoss,
}


@pytest.mark.parametrize("section", LOSS_OF)
def test_a_loss_is_its_section(section: str) -> None:
    config, cls = getattr(sections(), section), LOSS_OF[section]
    assert isinstance(config, cls.__mro__[1])
    assert [field.name for field in fields(cls)] == [field.name for field in fields(config)]
    assert cls.of(config) == cls()


def test_defaults() -> None:
    """Those of TRL, but SimPO's, which are the paper's."""
    dpo, simpo, cpo = DpoLoss(), SimpoLoss(), CpoLoss()
    assert (dpo.beta, dpo.terms, dpo.tau) == (0.1, (("sigmoid", 1.0),), 0.05)
    assert not (dpo.reference_free or dpo.length_normalized or dpo.gamma or dpo.sft_weight)
    assert (KtoLoss().loss, KtoLoss().beta, OrpoLoss().beta) == ("kto", 0.1, 0.1)
    assert (simpo.beta, simpo.gamma, simpo.alpha, simpo.terms) == (2.0, 1.0, 0.0, dpo.terms)
    assert simpo.length_normalized and simpo.reference_free
    assert (cpo.beta, cpo.sft_weight, cpo.terms) == (0.1, 1.0, dpo.terms)
    assert cpo.reference_free and not cpo.length_normalized


DPO: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("dpo.loss=ipo",), {"terms": (("ipo", 1.0),)}),
    (("dpo.loss=['sigmoid', 'bco']",), {"terms": (("sigmoid", 1.0), ("bco", 1.0))}),
    (
        ('dpo.loss=["sigmoid", "bco"]', "dpo.loss_weights=[0.8, 0.2]", "dpo.sft_weight=1.0"),
        {"terms": (("sigmoid", 0.8), ("bco", 0.2)), "sft_weight": 1.0},
    ),
    (("dpo.label_smoothing=0.1", "dpo.beta=0.3"), {"label_smoothing": 0.1, "beta": 0.3}),
    (("dpo.length_normalized=true",), {"length_normalized": True}),
    (("dpo.divergence=js",), {"divergence": "js"}),
    (("dpo.divergence=alpha", "dpo.alpha=0.25"), {"divergence": "alpha", "alpha": 0.25}),
    (("dpo.margin=0.5",), {"margin": 0.5}),
    (
        ("dpo.reference_free=true", "dpo.log_entropy=true"),
        {"reference_free": True, "log_entropy": True},
    ),
    (
        ("dpo.loss=discopop", "dpo.discopop_tau=0.1"),
        {"terms": (("discopop", 1.0),), "tau": 0.1},
    ),
]


@pytest.mark.parametrize(("overrides", "reads"), DPO)
def test_dpo(overrides: tuple[str, ...], reads: dict[str, Any]) -> None:
    found, usual = DpoLoss.of(sections(*overrides).dpo), DpoLoss()
    names = ("terms", "tau", "beta", "label_smoothing", "sft_weight", "margin", "log_entropy")
    names += ("divergence", "alpha", "length_normalized", "reference_free")
    assert {name: getattr(found, name) for name in reads} == reads
    assert {name for name in names if getattr(found, name) != getattr(usual, name)} == reads.keys()


def test_the_others() -> None:
    found = sections(
        "kto.loss=bco",
        "kto.beta=0.2",
        "kto.desirable_weight=1.5",
        "kto.undesirable_weight=0.5",
        "kto.log_entropy=true",
        "orpo.beta=0.2",
        "orpo.log_entropy=true",
        "simpo.beta=2.5",
        "simpo.gamma=1.4",
        "simpo.alpha=0.25",
        "simpo.label_smoothing=0.1",
        "simpo.sft_weight=0.5",
        "simpo.log_entropy=true",
        "cpo.loss=hinge",
        "cpo.beta=0.2",
        "cpo.sft_weight=0.5",
        "cpo.log_entropy=true",
    )
    assert KtoLoss.of(found.kto) == KtoLoss(
        loss="bco", beta=0.2, desirable_weight=1.5, undesirable_weight=0.5, log_entropy=True
    )
    assert OrpoLoss.of(found.orpo) == OrpoLoss(beta=0.2, log_entropy=True)
    assert SimpoLoss.of(found.simpo) == SimpoLoss(
        beta=2.5, gamma=1.4, alpha=0.25, label_smoothing=0.1, sft_weight=0.5, log_entropy=True
    )
    cpo = CpoLoss.of(found.cpo)
    assert cpo == CpoLoss(beta=0.2, loss="hinge", sft_weight=0.5, log_entropy=True)
    assert cpo.terms == (("hinge", 1.0),)
    assert CpoLoss.of(sections("cpo.label_smoothing=0.1").cpo).label_smoothing == 0.1


def test_a_reference_is_needed_where_it_is_read() -> None:
    for overrides, section, needs in (
        ((), "dpo", True),
        (("dpo.reference_free=true",), "dpo", False),
        ((), "kto", True),
        ((), "orpo", False),
        ((), "simpo", False),
        ((), "cpo", False),
    ):
        loss = LOSS_OF[section].of(getattr(sections(*overrides), section))
        assert ("ref_logp_N" in loss.needs) == needs


REFUSED = [
    (("dpo.loss=nca", "dpo.margin=1.0"), ErrorCode("dpo.margin/dpo.loss")),
    (("dpo.loss=aot", "dpo.divergence=js"), ErrorCode("dpo.divergence/dpo.loss")),
    (("dpo.loss=bco", "dpo.reference_free=true"), ErrorCode("dpo.reference_free/dpo.loss")),
    (
        ("dpo.reference_free=true", "dpo.divergence=js"),
        ErrorCode("dpo.reference_free/dpo.divergence"),
    ),
    (
        ("dpo.loss=exo",),
        "dpo.loss=exo: it is infinite without one; expected more than 0; set dpo.label_smoothing",
    ),
    (("dpo.loss=hinge", "dpo.label_smoothing=0.1"), ErrorCode("dpo.label_smoothing/dpo.loss")),
    (
        ("dpo.label_smoothing=0.5",),
        "dpo.label_smoothing=0.5 on the command line; expected less than 0.5",
    ),
    (
        ("dpo.loss=discopop", "dpo.discopop_tau=1.5"),
        "dpo.discopop_tau=1.5 on the command line; expected less than or equal to 1",
    ),
    (
        ("dpo.discopop_tau=0.5",),
        "with dpo.loss=sigmoid: nothing reads it; expected dpo.loss=discopop",
    ),
    (("dpo.alpha=0.5",), "expected dpo.divergence=alpha"),
    (("dpo.loss=[]",), ErrorCode("dpo.loss")),
    (("dpo.loss=['ipo', 'ipo']",), "each once"),
    (
        ("dpo.loss_weights=[1.0, 2.0]",),
        "dpo.loss_weights=[1.0, 2.0] with dpo.loss=sigmoid: 2 weights for 1 terms",
    ),
    (("dpo.loss=exo_pair",), 'found dpo.loss="exo_pair"'),
    (("dpo.beta=0",), "dpo.beta"),
    (("simpo.label_smoothing=0.7",), "found simpo.label_smoothing=0.7"),
    (
        ("cpo.loss=ipo", "cpo.label_smoothing=0.1"),
        ErrorCode("cpo.label_smoothing/cpo.loss"),
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_has_no_meaning_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sections(*overrides)
    assert says(raised.value, message)
    assert "\n" not in str(raised.value)
    assert "; expected" in str(raised.value)
