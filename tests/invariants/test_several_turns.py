"""Paths of several turns: what the engine says of each sampled token is what the trainer says of it; what paths share
is computed once, and their gradient is that of each alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.unit.rl.test_environment import Scripted, row_of
from torch import Tensor

from taut.data.packing import ALONE, PackPolicy, pack
from taut.data.render.render import Renderer
from taut.data.rows.tool_calls import ToolCall
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.losses.advantages import ESTIMATORS
from taut.losses.policy import PolicyGradient
from taut.models.attention_backends import PREFIX
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.advantages import PolicyCredit
from taut.rl.environment import EnvironmentPool, Step
from taut.rl.rollout import Group
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import EnvironmentConfig, ForkConfig, ShapingConfig
from taut.rl.turns import Bridge
from taut.types import Packed, Sample

LIMIT = 1e-9


class Asks:
    """Asks on for ever."""

    def step(self, text: str, calls: list[ToolCall]) -> Step:
        return Step([{"role": "user", "content": "And then?"}])


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()))
    model.set_attn_implementation(PREFIX + "reference")
    return Scorer(model)


def environments(renderer: Renderer, stop_ids: tuple[int, ...], turns: int) -> EnvironmentPool:
    config = EnvironmentConfig(name="asks", max_turns=turns)
    return EnvironmentPool(config, Asks, Bridge(renderer, stop_ids), None, (), 256, None)


def steps_of(scorer: Scorer, loss: PolicyGradient, layouts: list[Packed]) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter, summed over layouts."""
    scorer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for packed in layouts:
        with compute_context(torch.float64, torch.device("cpu")):
            term = loss(scorer(packed), packed).terms["policy"]
            term.backward()
            total = total + term.detach()
    grads = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    return {**grads, "loss": total}


def sample(trajectory: Trajectory, seed: int) -> Sample:
    size = trajectory.sampled_at_N.size
    advantage_N = np.random.default_rng(seed).normal(size=size)
    name = f"{trajectory.row.id}#{trajectory.index}"
    streams = {"advantage_N": advantage_N, "engine_logp_N": trajectory.logp_N}
    return Sample(name, trajectory.ids_T, trajectory.sampled_at_N, np.ones(size), streams=streams)


def gradient(scorer: Scorer, layouts: list[Packed]) -> dict[str, Tensor]:
    scorer.zero_grad()
    for packed in layouts:
        with compute_context(torch.float64, torch.device("cpu")):
            (scorer(packed).logp_N * packed.streams["advantage_N"]).sum().backward()
    return {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}


def test_the_engine_and_the_trainer_agree_on_every_turn(scorer: Scorer) -> None:
    renderer = Renderer(tiny_tokenizer("qwen3"))
    stop_ids = (*range(0, len(tiny_tokenizer()), 3), *renderer.stop_ids)  # so that turns end soon
    engine = LocalEngine(scorer, tiny_tokenizer(), stop_ids, context=256)
    rows = [row_of(renderer, name) for name in "ab"]
    sampling = Sampling(n=3, max_new_tokens=20, seed=1)
    found = sample_trajectories(engine, rows, sampling, environments(renderer, stop_ids, turns=3))
    assert max(trajectory.num_turns for trajectory in found) == 3
    assert len({tuple(trajectory.ids_T.tolist()) for trajectory in found}) == 6
    for policy in (ALONE, PackPolicy(True, 1)):
        packed = pack([sample(trajectory, 0) for trajectory in found], policy)
        with torch.no_grad():
            logp_N = scorer(packed).logp_N
        assert float((logp_N - packed.streams["engine_logp_N"]).abs().max()) < LIMIT
    again = sample_trajectories(engine, rows, sampling, environments(renderer, stop_ids, turns=3))
    assert [e.ids_T.tolist() for e in again] == [e.ids_T.tolist() for e in found]


def test_paths_that_branch_share_their_past(scorer: Scorer) -> None:
    renderer = Renderer(tiny_tokenizer("qwen3"))
    engine = Scripted(
        renderer, lambda name, index, turn: "first" if turn == 0 else f"{name[-3:]} goes on"
    )
    left, right = sample_trajectories(
        engine,
        [row_of(renderer)],
        Sampling(n=2),
        environments(renderer, renderer.stop_ids, turns=2),
    )
    samples = [sample(left, 1), sample(right, 2)]
    common = int((left.ids_T != right.ids_T).argmax())
    first = engine.drawn[0].ids_N.size
    assert common > engine.asked[0][0].ids_T.size + first  # beyond the first turn and what was said

    shared = pack(samples, PackPolicy(True, 1))
    assert shared.num_tokens == left.ids_T.size + right.ids_T.size - common
    assert shared.num_targets == left.sampled_at_N.size + right.sampled_at_N.size
    inside = shared.predictor_N < common - 1
    assert torch.bincount(shared.row_N[inside]).tolist() == [first, first]

    together, alone = (
        gradient(scorer, [shared]),
        gradient(scorer, [pack([s], ALONE) for s in samples]),
    )
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        assert float((together[name] - expected).norm() / expected.norm()) < LIMIT, name


def test_a_tree_of_paths_is_trained_as_its_leaves_are_one_by_one(scorer: Scorer) -> None:
    """Four paths: two begin with "left", two with "right", and all end apart. Rewards are 1, 0, 0, 0 with a deviation
    of 1/2: leaves are worth 3/2 and three times -1/2, the first turns 1/2 and -1/2.
    """
    renderer = Renderer(tiny_tokenizer("qwen3"))
    last = ["a good end", "bad", "so what", "no"]

    def script(name: str, index: int, turn: int) -> str:
        number = int(name.partition("#")[2].partition("@")[0])
        return last[number] if turn else ["left", "right"][number // 2]

    paths = sample_trajectories(
        Scripted(renderer, script),
        [row_of(renderer)],
        Sampling(n=4),
        environments(renderer, renderer.stop_ids, turns=2),
    )
    judged = [
        replace(path, reward_result=RewardResult({"r": Score(reward)}, reward))
        for path, reward in zip(paths, [1.0, 0.0, 0.0, 0.0], strict=True)
    ]
    loss = PolicyGradient()
    credit = PolicyCredit(
        loss, ESTIMATORS["tree"], ShapingConfig(), limit=99, temperature=1.0, has_old=False
    )
    made, _ = credit.assign([Group(tuple(judged))], {})
    samples = made[0].tree.samples

    by_hand = []
    for path, value, before in zip(
        paths, [1.5, -0.5, -0.5, -0.5], [0.5, 0.5, -0.5, -0.5], strict=True
    ):
        first = int((np.diff(path.sampled_at_N) > 1).argmax()) + 1
        advantage_N = np.full(path.sampled_at_N.size, value - before)
        advantage_N[:first] = before
        by_hand.append(
            replace(sample(path, 0), streams={"advantage_N": advantage_N * 0.5 / 0.5001})
        )

    shared = pack(samples, PackPolicy(True, 1))
    assert shared.num_tokens < sum(path.ids_T.size for path in paths)
    together = steps_of(scorer, loss, [shared])
    alone = steps_of(scorer, loss, [pack([leaf], ALONE) for leaf in by_hand])
    for name, expected in alone.items():
        assert float((together[name] - expected).norm() / expected.norm()) < LIMIT, name


def test_a_forked_tree_is_trained_as_its_paths_are_with_their_weights(scorer: Scorer) -> None:
    """The engine samples two paths that become eight in two forks, some of which end before the second. The tree in one
    layout has the loss and the gradient of its distinct paths, each by itself with the number of its leaves as weight.
    What the engine says of each token is what the trainer says.
    """
    renderer = Renderer(tiny_tokenizer("qwen3"))
    stop_ids = (*range(0, len(tiny_tokenizer()), 3), *renderer.stop_ids)

    class AsksUntil(Asks):
        def step(self, text: str, calls: list[ToolCall]) -> Step:
            return replace(super().step(text, calls), done=len(text) % 5 == 1)

    engine = LocalEngine(scorer, tiny_tokenizer(), stop_ids, context=256)
    pool = environments(renderer, stop_ids, turns=3)
    pool = replace(pool, make=AsksUntil, fork=ForkConfig(turns=[1, 2]))
    rows, sampling = (
        [row_of(renderer, name) for name in "abc"],
        Sampling(n=8, max_new_tokens=20, seed=1),
    )
    paths = sample_trajectories(engine, rows, sampling, pool)
    assert len(paths) == 24
    weights: dict[tuple[int, ...], list[int]] = {}
    for number, path in enumerate(paths):
        weights.setdefault((number // 8, *path.ids_T.tolist()), []).append(number)
    sizes = {len(numbers) for numbers in weights.values()}
    assert {1, 2} <= sizes <= {1, 2, 4}, "some ended before a fork"

    random = np.random.default_rng(0)
    judged = [
        replace(path, reward_result=RewardResult({}, reward))
        for numbers in weights.values()
        for reward in [float(random.normal())]
        for path in [paths[number] for number in numbers]
    ]
    groups = [Group(tuple(p for p in judged if p.row.id == row.id)) for row in rows]
    loss = PolicyGradient()
    credit = PolicyCredit(
        loss, ESTIMATORS["tree"], ShapingConfig(), limit=99, temperature=1.0, has_old=False
    )
    made, _ = credit.assign(groups, {})
    samples = [leaf for train_sample in made for leaf in train_sample.tree.samples]
    shared = pack(samples, PackPolicy(True, 1))
    with torch.no_grad():
        logp_N = scorer(shared).logp_N
    assert float((logp_N - shared.streams["engine_logp_N"]).abs().max()) < LIMIT

    by_name = {leaf.id: leaf for leaf in samples}
    alone = []
    for numbers in weights.values():
        leaves = [by_name[paths[number].name] for number in numbers]
        for leaf in leaves[1:]:  # all leaves of a path have its advantages
            assert (leaf.streams["advantage_N"] == leaves[0].streams["advantage_N"]).all()
        weighted = replace(leaves[0], weight_N=leaves[0].weight_N * len(leaves))
        alone.append(pack([weighted], ALONE))
    assert shared.num_tokens < sum(packed.num_tokens for packed in alone)
    together, apart = steps_of(scorer, loss, [shared]), steps_of(scorer, loss, alone)
    for name, expected in apart.items():
        assert float((together[name] - expected).norm() / expected.norm()) < LIMIT, name
