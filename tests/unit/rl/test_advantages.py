"""Judged paths become trees: what each token is given credit for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from taut.data.rows.prompts import PromptRow
from taut.errors import CheckFailed
from taut.losses.advantages import ESTIMATORS, by_turn
from taut.losses.policy import Kl, PolicyGradient
from taut.losses.supervised import CrossEntropy
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.advantages import (
    Credit,
    EntropyTarget,
    Gae,
    KlPenalty,
    PolicyCredit,
    TrainSample,
    turns_of,
)
from taut.rl.conversations import Path
from taut.rl.credits import AllCredit, BestCredit, PairCredit
from taut.rl.rollout import Group
from taut.rl.sampler import Trajectory
from taut.rl.settings import ShapingConfig
from taut.types import FinishReason, FloatArray, Tree

PROMPT = np.array([7, 8, 9])
REWARDS = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5]]


def trajectory(name: str, index: int, size: int, finish: FinishReason = "stop") -> Trajectory:
    return Trajectory(
        row=PromptRow(name, name, PROMPT, "", (), None, {}),
        index=index,
        ids_T=np.concatenate([PROMPT, 10 + np.arange(size) + index]),
        sampled_at_N=np.arange(3, 3 + size),
        logp_N=-np.arange(1.0, size + 1),
        version_N=np.full(size, 4),
        finish_reason=finish,
        text="",
    )


def paths(rewards: Sequence[Sequence[float]] = REWARDS, **cut: FinishReason) -> list[Trajectory]:
    """Groups a, b, ...; the path of reward i has i + 2 tokens. ``cut``: a1="length"."""
    return [
        replace(
            trajectory(name, i, i + 2, cut.get(f"{name}{i}", "stop")),
            reward_result=RewardResult({"r": Score(value)}, value),
        )
        for name, of in zip("abc", rewards, strict=False)
        for i, value in enumerate(of)
    ]


def groups_of(every: Sequence[Trajectory]) -> list[Group]:
    """The trajectories by their prompt."""
    by_row: dict[str, list[Trajectory]] = {}
    for path in every:
        by_row.setdefault(path.row.id, []).append(path)
    return [Group(tuple(group)) for group in by_row.values()]


class Assigned(NamedTuple):
    """What a credit makes of trajectories."""

    samples: list[TrainSample]
    metrics: dict[str, float]

    @property
    def trees(self) -> list[Tree]:
        return [sample.tree for sample in self.samples]

    @property
    def advantages(self) -> dict[str, FloatArray]:
        return {s.id: s.streams["advantage_N"] for tree in self.trees for s in tree.samples}


def assign(made: Credit, every: Sequence[Trajectory], scores: dict[str, Any]) -> Assigned:
    return Assigned(*made.assign(groups_of(every), scores))


def policy(**keys: Any) -> PolicyCredit:
    given: dict[str, Any] = {
        "estimate": ESTIMATORS["mean"],
        "shaping": ShapingConfig(),
        "limit": 4,
        "temperature": 1.0,
        "has_old": False,
    }
    return PolicyCredit(PolicyGradient(), **{**given, **keys})


def said(every: Sequence[Trajectory], **values: float) -> dict[str, dict[str, Any]]:
    """The same number for every token of every path."""
    return {
        path.name: {name: np.full(path.sampled_at_N.size, value) for name, value in values.items()}
        for path in every
    }


def test_every_token_has_its_paths_advantage_and_the_prompt_none() -> None:
    every = paths()
    given = assign(policy(), every, said(every))
    first, second = given.trees
    assert [s.id for s in first.samples] == [f"a#{i} of rollout 1" for i in range(3)]
    advantages = [s.streams["advantage_N"].tolist() for s in first.samples]
    np.testing.assert_allclose(advantages[0], [2 / 3] * 2)
    np.testing.assert_allclose(advantages[2], [-1 / 3] * 4)
    assert all(not s.streams["advantage_N"].any() for s in second.samples)
    assert [(s.version, s.tree) for s in given.samples if s.has_gradient] == [(4, first)]
    for sample, path in zip(first.samples, every, strict=False):
        assert sample.target_at_N.tolist() == path.sampled_at_N.tolist()
        np.testing.assert_equal(sample.streams["engine_logp_N"], path.logp_N)


def test_a_penalty_for_divergence_is_a_part_of_the_reward() -> None:
    every = paths([[1.0, 1.0]])
    made = policy(penalty=KlPenalty(0.5))
    given = assign(made, every, said(every, old_logp_N=-1.0, ref_logp_N=-1.2))
    lost = [0.5 * 0.2 * 2, 0.5 * 0.2 * 3]
    mean = sum(lost) / 2
    found = [s.streams["advantage_N"][0] for s in given.trees[0].samples]
    np.testing.assert_allclose(found, [mean - lost[0], mean - lost[1]], rtol=1e-12)
    assert given.metrics["kl"] == pytest.approx(0.2)
    assert "ref_logp_N" not in given.trees[0].samples[0].streams


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_one_mean_and_one_deviation_of_all_tokens_of_a_roll_out(name: str) -> None:
    """Before steps, micro-batches and ranks have their parts of it. Paths differ in length."""
    every = paths([[1.0, 0.0, 0.0, 0.3], [0.5, 0.9, 0.2], [0.0, 0.0]])
    given = assign(policy(estimate=ESTIMATORS[name]), every, said(every))
    trees = [np.concatenate([s.streams["advantage_N"] for s in t.samples]) for t in given.trees]
    of_all = np.concatenate(trees)
    assert of_all.size == sum(path.sampled_at_N.size for path in every)
    assert of_all.mean() == pytest.approx(0.0, abs=1e-12)
    assert of_all.std(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert all(abs(of_tree.mean()) > 0.01 for of_tree in trees)


def test_a_group_is_told_apart_by_its_rewards_also_where_all_tokens_are_shifted() -> None:
    assert (
        signals(policy(estimate=ESTIMATORS["reinforce_pp_baseline"]), [[1.0, 0.0], [1.0, 1.0]]) == 1
    )


def test_an_adaptive_penalty_learns_when_it_is_told_to_and_is_remembered() -> None:
    every = paths([[1.0, 0.0]])
    made = policy(penalty=KlPenalty(0.5, target=0.1))
    given = assign(made, every, said(every, old_logp_N=-1.0, ref_logp_N=-2.0))
    assert made.remember()["coef"] == 0.5
    made.learn(groups_of(every), given.metrics)
    state = json.loads(json.dumps(made.remember()))
    assert state["coef"] > 0.5
    other = policy(penalty=KlPenalty(0.5, target=0.1))
    other.recall(state)
    assert other.remember() == state


def test_the_entropy_coefficient_follows_what_was_sampled_and_is_remembered() -> None:
    """Paths of logprobs -1, -2 and -1, -2, -3 have an entropy of 9/5. Of a target of 2 the bonus is on, and rises; of
    one of 1.5 it is off, and falls to 0 at last.
    """
    every = paths([[1.0, 0.0]])
    for target, first, states in ((2.0, 0.02, [0.05, 0.08]), (1.5, 0.0, [0.0, 0.0])):
        made = policy(entropy=EntropyTarget(target, 0.03, 0.02))
        given = assign(made, every, said(every))
        assert given.metrics["entropy_sampled"] == pytest.approx(9 / 5)
        assert {s.values["entropy_coef"] for s in given.trees[0].samples} == {first}
        assert given.metrics["entropy_coef"] == first
        assert made.remember()["entropy_coef"] == 0.02
        for state in states:
            made.learn(groups_of(every), given.metrics)
            assert made.remember()["entropy_coef"] == pytest.approx(state)
        other = policy(entropy=EntropyTarget(target, 0.03, 0.02))
        other.recall(json.loads(json.dumps(made.remember())))
        assert other.remember() == made.remember()
        other.recall({"scale": [0, 0.0, 0.0], "coef": 0.0})  # of a checkpoint that has none
        assert other.remember()["entropy_coef"] == made.remember()["entropy_coef"]
    assert not assign(policy(), every, said(every)).trees[0].samples[0].values


def test_a_critic_charges_each_token_and_a_cut_path_gets_its_reward_alone() -> None:
    every = paths([[1.0, 1.0]], a1="length")
    made = policy(estimate=Gae(1.0, 1.0, is_whitened=False))
    given = assign(made, every, said(every, value_R=0.25))
    ended, cut = given.trees[0].samples
    np.testing.assert_allclose(ended.streams["advantage_N"], [0.75, 0.75])
    np.testing.assert_allclose(cut.streams["advantage_N"], [0.75, 0.75, 0.75])
    np.testing.assert_allclose(cut.read_values["return"], [1.0] * 3)
    np.testing.assert_allclose(cut.read_values["value"], [0.25] * 3)
    assert cut.read_at_R is not None and cut.read_at_R.tolist() == [2, 3, 4]
    (tree,) = made.bare(groups_of(every))
    reads = [s.read_at_R.tolist() for s in tree.samples if s.read_at_R is not None]
    assert reads == [[2, 3], [2, 3, 4]], "nothing is read that is not used"


def test_the_value_after_a_cut_may_take_the_place_of_the_paths_reward() -> None:
    """The penalty of 0.1 for each token stays; the reward of 1 goes."""
    every = paths([[1.0, 1.0]], a1="length")
    estimate = Gae(1.0, 1.0, is_whitened=False, bootstraps_cut=True)
    made = policy(estimate=estimate, penalty=KlPenalty(0.5))
    (tree,) = made.bare(groups_of(every))
    reads = [s.read_at_R.tolist() for s in tree.samples if s.read_at_R is not None]
    assert reads == [[2, 3], [2, 3, 4, 5]]
    known = said(every, old_logp_N=-1.0, ref_logp_N=-1.2, value_R=0.25)
    known[every[1].name]["value_R"] = np.array([0.25, 0.25, 0.25, 0.6])
    ended, cut = assign(made, every, known).trees[0].samples
    np.testing.assert_allclose(ended.read_values["return"], [1 - 0.2, 1 - 0.1])
    np.testing.assert_allclose(cut.read_values["return"], [0.6 - 0.3, 0.6 - 0.2, 0.6 - 0.1])
    np.testing.assert_allclose(cut.read_values["value"], [0.25] * 3)


def of_turns(path: Trajectory, *turn_rewards: tuple[int, float]) -> Trajectory:
    return replace(path, turn_rewards=turn_rewards)


def test_a_critic_charges_a_turns_reward_to_the_last_token_of_the_turn() -> None:
    """Four tokens, two turns: 1 after the first, 0.5 after the second, and 2 from what judges the path."""
    first, second, third = paths([[0.0, 0.0, 3.5]])
    path = of_turns(third, (1, 1.0), (3, 0.5))
    made = policy(estimate=Gae(1.0, 1.0, is_whitened=False))
    given = assign(made, [path], said([path], value_R=0.0))
    assert given.advantages[path.name].tolist() == [3.5, 3.5, 2.5, 2.5]
    discounted = policy(estimate=Gae(0.5, 1.0, is_whitened=False))
    given = assign(discounted, [path], said([path], value_R=0.0))
    assert given.advantages[path.name].tolist() == [0.5 + 2.5 / 8, 1 + 2.5 / 4, 2.5 / 2, 2.5]
    assert (given.metrics["return_min"], given.metrics["return_max"]) == (0.8125, 2.5)
    every = [first, second, path]
    grouped = assign(policy(), every, said(every))
    plain = assign(policy(), [first, second, third], said(every))
    for name, advantage_N in plain.advantages.items():
        assert grouped.advantages[name].tolist() == advantage_N.tolist(), "no critic, no difference"


def by_turns(discount: float = 1.0) -> PolicyCredit:
    estimate = replace(ESTIMATORS["mean"], assess=partial(by_turn, discount=discount))
    return policy(estimate=estimate, needs_turn_rewards=True)


def test_a_turns_reward_is_charged_to_its_turn_and_those_before_it() -> None:
    """Two paths of two turns, worth 1 and 0.5, and 0 and 0; the paths are worth 2 and 0 besides. Between the turns of
    each another spoke: token 5 is not sampled.
    """
    first, second = (
        replace(
            path, sampled_at_N=np.array([3, 4, 6]), logp_N=np.zeros(3), version_N=np.zeros(3, int)
        )
        for path in (trajectory("a", 0, 4), trajectory("a", 1, 4))
    )
    first = replace(
        of_turns(first, (1, 1.0), (2, 0.5)), reward_result=RewardResult({"r": Score(3.5)}, 3.5)
    )
    second = replace(of_turns(second, (1, 0.0)), reward_result=RewardResult({"r": Score(0.0)}, 0.0))
    every = [first, second]
    assert [turns_of(path)[0].tolist() for path in every] == [[1, 2]] * 2
    for discount, wanted in ((1.0, [1.75, 1.75, 1.25]), (0.0, [1.5, 1.5, 1.25])):
        made = by_turns(discount)
        given = assign(made, every, said(every))
        assert given.advantages[first.name].tolist() == wanted
        assert given.advantages[second.name].tolist() == [-x for x in wanted]
    alike = replace(
        first, index=1, reward_result=first.reward_result, turn_rewards=((1, 0.5), (2, 1.0))
    )
    group = Group((first, alike))
    assert not group.has_signal and made.is_useful(group), "equal sums, earned at other turns"
    assert not made.is_useful(Group((first, replace(first, index=1))))
    assert not made.is_useful(Group((replace(first, error="cut off"),))), "nothing is rewarded"


def test_credit_by_turns_needs_rewards_of_turns() -> None:
    every = groups_of(paths())
    with pytest.raises(
        CheckFailed,
        match=r"advantage_level=turn.*no turn of the rollout has a reward.*Step\(reward",
    ):
        by_turns().require_usable(every)
    by_turns().require_usable([Group((of_turns(every[0].trajectories[0], (1, 0.0)),))])
    by_turns().require_usable([])
    policy().require_usable(every)


def test_where_the_engine_is_the_old_policy_nothing_is_scored_and_nothing_may_be_missing() -> None:
    """Nor for a penalty in the reward, which takes the engine's logprobs for the policy's: -1, -2, ... less -1.5."""
    every = paths([[1.0, 1.0]])
    made = policy(has_old=True, is_bypassed=True, penalty=KlPenalty(0.5))
    assert not made.wants.logp and policy(has_old=True).wants.logp
    given = assign(made, every, said(every, ref_logp_N=-1.5))
    assert "old_logp_N" not in given.trees[0].samples[0].streams
    assert given.metrics["kl"] == pytest.approx((0.5 - 0.5 + 0.5 - 0.5 - 1.5) / 5)
    made.require_usable(groups_of(every))
    every[1].logp_N[1] = np.nan
    with pytest.raises(CheckFailed, match=r"gave no logprobs for 1 completions, such as a#1"):
        made.require_usable(groups_of(every))
    policy(has_old=True).require_usable(groups_of(every))


def test_branches_have_the_advantages_of_their_own_tokens() -> None:
    """Paths 10 11 of reward 1 with a branch 10 20 21, of which 20 and 21 are new, and 10 30 of reward 0: what all begin
    with has 0, the rest 1/2 and -1/2 (of group, by the deviation of sqrt 1/2, twice that times sqrt 1/2).
    """
    first, second = paths([[1.0, 0.0]])
    first = replace(
        first,
        ids_T=np.array([*PROMPT, 10, 11]),
        branches=(
            Path(np.array([*PROMPT, 10, 20, 21]), np.array([4, 5]), np.zeros(2), np.full(2, 4)),
        ),
    )
    second = replace(
        second,
        ids_T=np.array([*PROMPT, 10, 30]),
        sampled_at_N=np.array([3, 4]),
        logp_N=np.zeros(2),
        version_N=np.full(2, 4),
    )
    made = policy(estimate=ESTIMATORS["tree"])
    assert made.takes_branches and not by_turns().takes_branches
    given = assign(made, [first, second], said([first, second]))
    half = pytest.approx(0.5 / (0.5**0.5 + 1e-4), rel=1e-12)
    found = {name: advantage_N.tolist() for name, advantage_N in given.advantages.items()}
    assert found == {
        first.name: [0.0, half],
        f"{first.name}, branch 1": [half, half],
        second.name: [0.0, pytest.approx(-0.5 / (0.5**0.5 + 1e-4), rel=1e-12)],
    }
    whole = assign(policy(), [first, second], said([first, second])).advantages
    assert whole[f"{first.name}, branch 1"].tolist() == [0.5, 0.5]


def test_several_rewards_have_the_weights_of_the_configuration() -> None:
    """Two rewards that say the opposite, of weights 1 and 3: the second outweighs the first; the sums are equal."""
    reward_results = [
        RewardResult({"a": Score(3.0 * a), "b": Score(1.0 - a)}, 3.0) for a in (1.0, 0.0)
    ]
    every = [
        replace(path, reward_result=reward_result)
        for path, reward_result in zip(paths([[0.0, 0.0]]), reward_results, strict=True)
    ]
    made = policy(estimate=ESTIMATORS["gdpo"], reward_weights={"b": 3.0})
    assert made.is_useful(groups_of(every)[0]) and not groups_of(every)[0].has_signal
    given = assign(made, every, said(every))
    # A_a = +-s, A_b = -+s: x = -+2s, whose deviation is 2s sqrt 2
    assert given.advantages[every[0].name].tolist() == pytest.approx([-(0.5**0.5)] * 2, rel=1e-3)
    assert given.advantages[every[1].name].tolist() == pytest.approx([0.5**0.5] * 3, rel=1e-3)
    assert given.samples[0].has_signal


def test_shaping_scales_the_rewards_of_turns_and_leaves_the_rest_to_the_last_token() -> None:
    """Rewards 3 and 1 have a deviation of sqrt 2; clipped to 2 they would be 2 and 1."""
    one, other = paths([[3.0, 1.0]])
    path = of_turns(one, (0, 1.0))
    given: dict[str, list[float]] = {}
    for name, shaping in (
        ("scale", ShapingConfig(scale="batch")),
        ("clip", ShapingConfig(clip=2.0)),
    ):
        made = policy(estimate=Gae(1.0, 1.0, is_whitened=False), shaping=shaping)
        trees = assign(made, [path, other], said([path, other], value_R=0.0))
        given[name] = trees.advantages[path.name].tolist()
    assert given["scale"] == pytest.approx([3 / 2**0.5, 2 / 2**0.5])
    assert given["clip"] == [2.0, 1.0]


def test_where_a_value_replaces_the_reward_of_a_cut_path_its_turns_keep_theirs() -> None:
    _, whole = paths([[0.0, 2.0]], a1="length")
    path = of_turns(whole, (0, 1.0))
    made = policy(estimate=Gae(1.0, 1.0, is_whitened=False, bootstraps_cut=True))
    given = assign(made, [path], {path.name: {"value_R": np.array([0.0, 0.0, 0.0, 0.25])}})
    assert given.advantages[path.name].tolist() == [1.25, 0.25, 0.25]


def fitted(estimate: Gae, every: Sequence[Trajectory], rounds: int) -> FloatArray:
    """V of the states after 0, 1, ... tokens: 0.3 at first, then set to the mean return ``rounds`` times."""
    longest = max(path.sampled_at_N.size for path in every)
    value = np.full(longest + 1, 0.3)
    for _ in range(rounds):
        known = {}
        for path in every:
            reads = path.sampled_at_N.size + (path.is_cut and estimate.bootstraps_cut)
            known[path.name] = {"value_R": value[:reads]}
        samples = [
            s for t in assign(policy(estimate=estimate), every, known).trees for s in t.samples
        ]
        returns = [sample.read_values["return"] for sample in samples]
        for at in range(longest):
            value[at] = np.mean([return_N[at] for return_N in returns if return_N.size > at])
        value[longest] = value[longest - 1]  # the critic has no target there and generalizes
    return value


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_a_critic_of_cut_paths_alone_learns_their_constant_reward(lam: float) -> None:
    every = paths([[0.5, 0.5], [0.5, 0.5]], a0="length", a1="length", b0="length", b1="length")
    estimate = Gae(1.0, lam, is_whitened=False)
    rounds = 1 if lam == 1.0 else 60
    np.testing.assert_allclose(fitted(estimate, every, rounds)[:-1], 0.5, rtol=0, atol=1e-12)


def test_a_flat_reward_gives_no_reason_to_be_cut() -> None:
    """With a critic that has converged, answers that end and answers that are cut have advantages of 0."""
    every = paths([[0.5, 0.5], [0.5, 0.5]], a1="length", b1="length")
    estimate = Gae(1.0, 0.95, is_whitened=False)
    known = {p.name: {"value_R": fitted(estimate, every, 200)} for p in every}
    given = assign(policy(estimate=estimate), every, known)
    for path in every:
        np.testing.assert_allclose(given.advantages[path.name], 0.0, atol=1e-12)


def test_the_critics_values_are_logged_with_the_range_of_the_returns() -> None:
    """Returns are shaped rewards, 0.8, less the penalty, 0.1 for each token to come: of two tokens and of three."""
    every = paths([[1.0, 0.0]])
    asked = said(every, value_R=0.25, old_logp_N=-1.0, ref_logp_N=-1.2)
    asked[every[1].name]["value_R"][:] = 6.8
    made = policy(
        estimate=Gae(1.0, 0.95, is_whitened=True),
        penalty=KlPenalty(0.5),
        shaping=ShapingConfig(clip=0.8),
    )
    found = assign(made, paths([[1.0, 0.8]]), asked).metrics
    assert found["return_min"] == pytest.approx(0.5)
    assert found["return_max"] == pytest.approx(0.7)
    assert (found["value_low"], found["value_high"]) == (0.25, 6.8)
    assert "value_low" not in assign(policy(), every, said(every)).metrics


def test_rewards_are_shaped_in_order() -> None:
    every = paths([[1.0, 1.0]], a1="length")
    how = ShapingConfig(missing_eos_penalty=0.5, length_penalty=0.4, clip=0.6)
    given = assign(policy(shaping=how), every, said(every))
    shaped = [min(0.6, 1.0 - 0.2), min(0.6, 1.0 - 0.5 - 0.3)]
    found = [s.streams["advantage_N"][0] for s in given.trees[0].samples]
    np.testing.assert_allclose(found, [shaped[0] - sum(shaped) / 2, shaped[1] - sum(shaped) / 2])
    assert given.metrics["reward_shaped"] == pytest.approx(sum(shaped) / 2)


def test_a_paths_length_is_what_it_has_beyond_its_prompt() -> None:
    """Of eight tokens the policy chose two; a limit of ten counts all eight."""
    (one, other) = paths([[0.0, 0.0]])
    played = replace(one, ids_T=np.concatenate([PROMPT, np.arange(8)]))
    how = policy(shaping=ShapingConfig(length_penalty=1.0), limit=10)
    given = assign(how, [played, other], said([one, other]))
    found = [s.streams["advantage_N"][0] for s in given.trees[0].samples]
    np.testing.assert_allclose(found, [(-0.8 + 0.3) / 2, (0.8 - 0.3) / 2])


def test_a_cut_path_may_be_compared_and_not_learned_from() -> None:
    every = paths([[1.0, 0.0]], a1="length")
    given = assign(policy(shaping=ShapingConfig(overlong="drop")), every, said(every))
    (sample,) = given.trees[0].samples
    np.testing.assert_allclose(sample.streams["advantage_N"], [0.5, 0.5])
    assert given.metrics["dropped"] == 0.5
    both = paths([[1.0, 0.0]], a0="length", a1="length")
    assert given.advantages.keys() == {path.name for path in every if not path.is_cut}
    with pytest.raises(CheckFailed, match="overlong=drop"):
        assign(policy(shaping=ShapingConfig(overlong="drop")), both, said(both))


def test_running_scale_is_of_all_rewards_so_far() -> None:
    every = paths([[2.0, 0.0]])
    made = policy(shaping=ShapingConfig(scale="running"))
    for _ in range(2):
        given = assign(made, every, said(every))
        made.learn(groups_of(every), given.metrics)
    assert made.remember()["scale"][0] == 4


def test_the_best_and_the_worst_are_a_pair() -> None:
    given = assign(PairCredit(CrossEntropy()), paths([[0.2, 0.9, 0.5], [0.5, 0.5]]), {})
    (tree,) = given.trees
    assert tree.is_atom
    assert [s.values["preference"] for s in tree.samples] == [0.9, 0.2]
    with pytest.raises(CheckFailed, match="pair"):
        assign(PairCredit(CrossEntropy()), paths([[0.5, 0.5]]), {})


def test_the_best_that_are_good_enough_are_kept() -> None:
    made = BestCredit(CrossEntropy(), 2, 0.4, drops_cut=True)
    given = assign(made, paths([[0.2, 0.9, 0.5], [0.1, 0.3, 0.2]]), {})
    (tree,) = given.trees
    assert [s.id for s in tree.samples] == ["a#1 of rollout 1", "a#2 of rollout 1"]
    with pytest.raises(CheckFailed, match="min_reward"):
        assign(made, paths([[0.1, 0.2]]), {})


def test_a_cut_answer_is_no_candidate_of_best_of_n_unless_it_is_asked_for() -> None:
    """Learned as it is, the best of all would teach the model to run on."""
    every = paths([[0.2, 0.9, 0.5], [0.1, 0.3, 0.2]], a1="length", b1="length")
    made = BestCredit(CrossEntropy(), 1, None, drops_cut=True)
    names = [s.id for tree in assign(made, every, {}).trees for s in tree.samples]
    assert names == ["a#2 of rollout 1", "b#2 of rollout 1"]
    keeping = BestCredit(CrossEntropy(), 1, None, drops_cut=False)
    names = [s.id for tree in assign(keeping, every, {}).trees for s in tree.samples]
    assert names == ["a#1 of rollout 1", "b#1 of rollout 1"]
    cut = paths([[0.9, 0.5]], a0="length", a1="length")
    with pytest.raises(
        CheckFailed, match=r"all 2 completions .* were cut, and best_of_n\.overlong"
    ):
        assign(made, cut, {})
    group = Group(tuple(cut))
    assert (made.is_useful(group), keeping.is_useful(group)) == (False, True)
    good = BestCredit(CrossEntropy(), 1, 0.6, drops_cut=True)
    with pytest.raises(CheckFailed, match=r"min_reward=0\.6; the best has 0\.5"):
        assign(good, paths([[0.9, 0.5]], a0="length"), {})


def test_all_are_kept_as_they_are() -> None:
    given = assign(AllCredit(CrossEntropy()), paths(), {})
    assert [len(tree.samples) for tree in given.trees] == [3, 3]
    assert all(not s.streams for tree in given.trees for s in tree.samples)


def signals(made: PolicyCredit, rewards: Sequence[Sequence[float]]) -> int:
    every = paths(rewards)
    streams = {"value_R": 0.3, "old_logp_N": -1.0, "ref_logp_N": -1.2}
    return sum(s.has_signal for s in assign(made, every, said(every, **streams)).samples)


def test_what_a_critic_or_a_penalty_adds_is_no_signal() -> None:
    """So the monitor sees rewards that never differ; with a critic they may do so between prompts."""
    critic = policy(estimate=Gae(gamma=1.0, lam=1.0, is_whitened=True))
    penalty = policy(penalty=KlPenalty(0.5))
    plus = policy(estimate=ESTIMATORS["reinforce_pp"])
    shaped = policy(shaping=ShapingConfig(length_penalty=0.5))
    alike, apart, one = [[0.5, 0.5], [0.5, 0.5]], [[0.4, 0.4], [0.0, 1.0]], [[1.0], [0.0]]
    assert [signals(it, alike) for it in (critic, penalty, plus, shaped)] == [0, 0, 0, 2]
    assert [signals(it, apart) for it in (critic, penalty, plus)] == [2, 1, 2]
    assert [signals(it, one) for it in (critic, penalty)] == [2, 0]
    assert signals(critic, [[0.5]]) == 1, "compared with what the critic expects"


@pytest.mark.parametrize(
    ("keys", "loss", "names"),
    [
        ({}, {}, "a"),
        ({"estimate": ESTIMATORS["group"], "shaping": ShapingConfig(clip=1.0)}, {}, "a"),
        ({"shaping": ShapingConfig(length_penalty=1.0)}, {}, "ab"),
        ({"estimate": ESTIMATORS["reinforce_pp_baseline"]}, {}, "ab"),
        ({"estimate": Gae(1.0, 1.0, is_whitened=False)}, {}, "ab"),
        ({"penalty": KlPenalty(0.5)}, {}, "ab"),
        ({}, {"kl": Kl(0.1)}, "ab"),
        ({}, {"entropy_coef": 0.1}, "ab"),
    ],
    ids=[
        *("mean", "clipped", "length", "whitened", "critic", "penalty", "divergence", "entropy"),
    ],
)
def test_a_group_is_scored_unless_its_advantages_are_0_and_the_loss_leaves_it_out(
    keys: dict[str, Any], loss: dict[str, Any], names: str
) -> None:
    made = policy(has_old=True, **keys)
    made.loss = PolicyGradient(is_fresh=False, **loss)
    scored = made.scored(groups_of(paths()))
    assert "".join(group.trajectories[0].row.id for group in scored) == names


def test_a_group_that_is_not_scored_has_the_engines_logprobs_in_place_of_the_old_policys() -> None:
    every = paths()
    made = policy(has_old=True)
    known = said([path for path in every if path.row.id == "a"], old_logp_N=-1.0)
    first, second = assign(made, every, known).trees
    assert all((sample.streams["old_logp_N"] == -1.0).all() for sample in first.samples)
    for sample, path in zip(second.samples, every[3:], strict=True):
        np.testing.assert_array_equal(sample.streams["old_logp_N"], path.logp_N)
        assert not sample.streams["advantage_N"].any()
    unknown = [replace(path, logp_N=np.full(path.logp_N.size, np.nan)) for path in every]
    assert len(made.scored(groups_of(unknown))) == 2, "what the engine did not tell is computed"
