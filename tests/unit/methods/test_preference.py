"""What a user says of preference optimisation becomes the loss that was meant, or an error that says what to do."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from taut.config import configclass, load
from taut.errors import ConfigError
from taut.losses.preference import VARIANTS, DpoVariant, Orpo, Preference, Unpaired
from taut.methods.cpo import CpoConfig
from taut.methods.kto import KtoConfig
from taut.methods.orpo import OrpoConfig
from taut.methods.preference import DpoConfig
from taut.methods.simpo import SimpoConfig


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


def test_defaults() -> None:
    """Those of TRL, but SimPO's, which are the paper's."""
    found = sections()
    assert found.dpo.make_loss() == Preference(beta=0.1)
    assert found.kto.make_loss() == Unpaired("kto", 0.1)
    assert found.orpo.make_loss() == Orpo(0.1)
    simpo = found.simpo.make_loss()
    assert simpo == Preference(
        beta=2.0, gamma=1.0, length_normalised=True, reference_free=True, alpha=0.0
    )
    assert found.cpo.make_loss() == Preference(beta=0.1, reference_free=True, sft_weight=1.0)


DPO: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("dpo.loss=ipo",), {"terms": (("ipo", 1.0),)}),
    (("dpo.loss=['sigmoid', 'bco']",), {"terms": (("sigmoid", 1.0), ("bco", 1.0))}),
    (
        ('dpo.loss=["sigmoid", "bco"]', "dpo.loss_weights=[0.8, 0.2]", "dpo.sft_weight=1.0"),
        {"terms": (("sigmoid", 0.8), ("bco", 0.2)), "sft_weight": 1.0},
    ),
    (("dpo.label_smoothing=0.1", "dpo.beta=0.3"), {"label_smoothing": 0.1, "beta": 0.3}),
    (("dpo.length_normalised=true",), {"length_normalised": True}),
    (("dpo.divergence=js",), {"divergence": "js"}),
    (("dpo.divergence=alpha", "dpo.alpha=0.25"), {"divergence": "alpha", "alpha": 0.25}),
    (("dpo.margin=0.5",), {"margin": 0.5}),
    (
        ("dpo.reference_free=true", "dpo.log_entropy=true"),
        {"reference_free": True, "entropy": True},
    ),
    (
        ("dpo.loss=discopop", "dpo.discopop_tau=0.1"),
        {"terms": (("discopop", 1.0),), "tau": 0.1},
    ),
]


@pytest.mark.parametrize(("overrides", "fields"), DPO)
def test_dpo(overrides: tuple[str, ...], fields: dict[str, Any]) -> None:
    assert sections(*overrides).dpo.make_loss() == Preference(**fields)


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
    assert found.kto.make_loss() == Unpaired("bco", 0.2, 1.5, 0.5, entropy=True)
    assert found.orpo.make_loss() == Orpo(0.2, entropy=True)
    assert found.simpo.make_loss() == Preference(
        beta=2.5,
        gamma=1.4,
        divergence="alpha",
        alpha=0.25,
        label_smoothing=0.1,
        sft_weight=0.5,
        length_normalised=True,
        reference_free=True,
        entropy=True,
    )
    assert found.cpo.make_loss() == Preference(
        beta=0.2, terms=(("hinge", 1.0),), sft_weight=0.5, reference_free=True, entropy=True
    )
    smoothed = sections("cpo.label_smoothing=0.1").cpo.make_loss()
    assert isinstance(smoothed, Preference)
    assert smoothed.label_smoothing == 0.1


def test_a_reference_is_needed_where_it_is_read() -> None:
    found = sections()
    for config, needs in (
        (found.dpo, True),
        (sections("dpo.reference_free=true").dpo, False),
        (found.kto, True),
        (found.orpo, False),
        (found.simpo, False),
        (found.cpo, False),
    ):
        assert ("ref_logp_N" in config.make_loss().needs) == needs


REFUSED = [
    (("dpo.loss=nca", "dpo.margin=1.0"), "found margin=1.0 with loss=nca"),
    (("dpo.loss=aot", "dpo.divergence=js"), "found divergence=js with loss=aot"),
    (("dpo.loss=bco", "dpo.reference_free=true"), "found reference_free=True with loss=bco"),
    (("dpo.reference_free=true", "dpo.divergence=js"), "expected a reference to diverge from"),
    (("dpo.loss=exo",), "found loss=exo with label_smoothing=0"),
    (("dpo.loss=hinge", "dpo.label_smoothing=0.1"), "loss=hinge, which does not read it"),
    (("dpo.label_smoothing=0.5",), "expected at least 0 and less than 0.5"),
    (("dpo.loss=discopop", "dpo.discopop_tau=1.5"), "expected more than 0 and at most 1"),
    (("dpo.discopop_tau=0.5",), "expected dpo.loss=discopop"),
    (("dpo.alpha=0.5",), "expected dpo.divergence=alpha"),
    (("dpo.loss=[]",), "found loss=[]; expected one or more of sigmoid"),
    (("dpo.loss=['ipo', 'ipo']",), "each once"),
    (("dpo.loss_weights=[1.0, 2.0]",), "found 2 dpo.loss_weights for dpo.loss=sigmoid"),
    (("dpo.loss=exo_pair",), 'found dpo.loss="exo_pair"'),
    (("dpo.beta=0",), "dpo.beta"),
    (("simpo.label_smoothing=0.7",), "simpo: found label_smoothing=0.7"),
    (
        ("cpo.loss=ipo", "cpo.label_smoothing=0.1"),
        "cpo: found label_smoothing=0.1 with loss=ipo, which does not read it",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_has_no_meaning_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sections(*overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "; expected" in str(raised.value)
