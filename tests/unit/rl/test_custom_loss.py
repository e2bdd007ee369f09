"""Advantages and losses of the user's own: what a sound one gives, and what an unsound one is refused for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.online_runs import OWN_CODE
from tests.helpers.sampled_outcomes import outcomes_of

from taut.errors import ConfigError, UserCodeError
from taut.losses.loss import Loss
from taut.losses.policy import PolicyGradient
from taut.losses.registry import LOSSES
from taut.rl.custom_loss import load_advantage, load_loss, read_own, require_sound
from taut.types import LossSum, Packed, Sample, Scores, Wants

REWARD_S = torch.tensor([1.0, 0.0, 0.25, 0.5], dtype=torch.float64)
GROUP_S = torch.tensor([0, 0, 1, 1])


def advantage(tmp_path: Path, body: str, name: str = "advantage") -> Any:
    lines = "\n    ".join(body.splitlines())
    (tmp_path / "own.py").write_text(
        f"import torch; from pathlib import Path\n\ndef advantage(outcomes):\n    {lines}\n"
    )
    return load_advantage(read_own(f"{tmp_path / 'own.py'}:{name}", "grpo.advantage", "function"))


@pytest.mark.parametrize(
    "body",
    [
        "return 2 * outcomes.reward_S",
        "return [torch.full((n,), 2 * float(r)) for r, n in zip(outcomes.reward_S, outcomes.length_S)]",
    ],
)
def test_what_a_function_returns_is_the_advantage_of_each_token(tmp_path: Path, body: str) -> None:
    found = advantage(tmp_path, body)(
        outcomes_of(REWARD_S, GROUP_S, [1, 2, 3, 1]), [torch.zeros(n) for n in (1, 2, 3, 1)]
    )
    assert [a_N.tolist() for a_N in found] == [[2.0], [0.0] * 2, [0.5] * 3, [1.0]]
    assert {a_N.dtype for a_N in found} == {torch.float64}


UNSOUND = [
    (
        "return outcomes.reward_S[:-1]",
        r"own.py:advantage returned a tensor of shape \[5\] for 6 samples",
    ),
    (
        "return 1.0",
        r"returned \['float'\] for samples of .* tokens; expected a tensor \[S\], or a list",
    ),
    (
        "return [r.expand(2) for r in outcomes.reward_S]",
        r"returned \[\[2\], .* for samples of \[3, 5",
    ),
    ("return outcomes.reward_S / 0", r"returned (inf|nan) for sample \d, whose reward is .*finite"),
    (
        "return outcomes.rewards",
        r"raised AttributeError: .*rewards.* \(own.py:4\); expected advantages",
    ),
    (
        "return outcomes.reward_S * torch.rand(1)",
        r"two calls with the same outcomes return different",
    ),
]


@pytest.mark.parametrize(("body", "message"), UNSOUND)
def test_an_unsound_advantage_is_refused_before_the_run(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        advantage(tmp_path, body)
    assert "\n" not in str(caught.value)


def test_an_advantage_that_fails_on_a_rollout_says_so(tmp_path: Path) -> None:
    estimator = advantage(tmp_path, "return outcomes.reward_S / (outcomes.length_S < 7)")
    with pytest.raises(UserCodeError, match=r"returned inf for sample 0, whose reward is 1;"):
        estimator.assessed(outcomes_of(REWARD_S, GROUP_S, [7, 1, 1, 1]))
    with pytest.raises(ConfigError, match=r"has no function 'other'; expected one of advantage"):
        advantage(tmp_path, "return outcomes.reward_S", name="other")


# -- losses

BUILT_IN = [
    name
    for name, loss in LOSSES.items()
    if isinstance(loss, PolicyGradient) and not loss.critic and not loss.needs_values
]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_loss_of_taut_s_is_sound(name: str) -> None:
    require_sound(LOSSES[name], name)


@dataclass(frozen=True)
class Plain(Loss):
    """-A log pi, with whatever else ``change`` makes of the term."""

    change: Callable[[torch.Tensor, Packed], torch.Tensor] = lambda cost_N, packed: cost_N.sum()
    terms: tuple[str, ...] = ("policy",)
    reads: tuple[str, ...] = ("advantage_N",)
    silent: bool = False

    @property
    def units(self) -> Any:
        return {"policy": "token"}

    @property
    def needs(self) -> tuple[str, ...]:
        return self.reads

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        cost_N = -packed.weight_N * packed.streams["advantage_N"] * scores.logp_N
        return LossSum(dict.fromkeys(self.terms, self.change(cost_N, packed)))

    def is_silent(self, sample: Sample) -> bool:
        return self.silent or not sample.streams["advantage_N"].any()


class Linear(Plain):
    def linear_weights(self, packed: Packed) -> Any:
        return {"policy": packed.streams["advantage_N"]}


class Critical(Plain):
    @property
    def wants(self) -> Wants:
        return Wants(scalar=True)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            Plain(change=lambda cost_N, _: cost_N.mean()),
            r"policy of packed samples differs .* never a mean",
        ),
        (
            Plain(change=lambda cost_N, packed: (cost_N * packed.num_samples).sum()),
            r"policy of packed samples differs from the sum over them alone by \d",
        ),
        (Plain(change=lambda cost_N, _: cost_N.exp().sum()), r"not finite where log-ratios are"),
        (Plain(change=lambda cost_N, _: cost_N.detach().sum()), r"no term has a gradient"),
        (
            Plain(terms=("policy", "more")),
            r"returns the terms \['more', 'policy'\]; expected .*'policy'",
        ),
        (Plain(reads=("value_N",)), r"own.py:Plain: it needs value_N; expected one of advantage_N"),
        (Plain(silent=True), r"is_silent is true of a sample with a loss"),
        (Linear(), r"linear_weights of policy is not its derivative"),
        (Critical(), r"it wants a scalar head"),
    ],
)
def test_an_unsound_loss_is_refused(loss: Loss, message: str) -> None:
    require_sound(Plain(), "own.py:Plain")
    with pytest.raises(ConfigError, match=message) as caught:
        require_sound(loss, "own.py:Plain")
    assert "\n" not in str(caught.value)


def test_a_loss_is_made_for_the_temperature_of_the_rollout(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_CODE)

    def load(name: str, temperature: float = 0.5) -> Loss:
        spec = f"{tmp_path / 'own.py'}:{name}"
        return load_loss(read_own(spec, "grpo.loss", "Class"), temperature)

    assert load("Own").wants.temperature == 0.5
    assert load("Own") is load("Own"), "the file is run once"
    for name, message in (
        ("Cold", r"own.py:Cold wants scores at temperature 1, and rollout.temperature is 0.5"),
        ("centered", r"centered is no class of losses"),
        ("Gone", r"has no Class 'Gone'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(name)


def test_the_example_of_the_docs_is_sound(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rl.md").read_text()
    _, _, section = page.partition("### Your own advantage or loss")
    lines = section.partition("\n- ")[0].splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    ") or not line)
    (tmp_path / "own.py").write_text(code)
    spec = f"{tmp_path / 'own.py'}:"
    loss = load_loss(read_own(f"{spec}Own", "grpo.loss", "Class"), 0.7)
    assert loss.wants.temperature == 0.7 and "old_logp_N" in loss.needs
    estimator = load_advantage(read_own(f"{spec}centered", "grpo.advantage", "function"))
    found = torch.cat(estimator.assessed(outcomes_of(REWARD_S, GROUP_S)))
    assert found.tolist() == (REWARD_S - REWARD_S.mean()).tolist()
