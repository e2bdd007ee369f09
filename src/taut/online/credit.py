"""What becomes of judged paths: the trees that are trained on, with what each token is given credit for.

    PolicyCredit  every token its advantage: policy gradients (online/policy_credit.py)
    Pairs         the best and the worst answer of a group, as a preference: online DPO (arXiv 2402.04792)
    Best          the best answers of a group, to be learned as they are: rejection sampling (RAFT, arXiv 2304.06767)
    All           every answer as it is: a teacher says what of it is right (GKD, arXiv 2306.13649)

Wiring: the maths is in losses. What was sampled is trained on token for token.

May import losses, rollout and its neighbours. online.method calls it, methods make it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from taut.config import configclass
from taut.errors import CheckFailed
from taut.losses import Loss
from taut.losses.advantages import Estimator
from taut.online.rollouts import Group
from taut.online.scoring import Asked, Said, sample_of
from taut.rewards.panel import Verdict
from taut.rollout.episode import Episode
from taut.types import FloatArray, Sample, Tree


@configclass
class BestOfNConfig:
    """Which answers are learned."""

    keep: Annotated[int, Field(ge=1)] = 1
    """How many of a prompt's answers, the best first."""
    at_least: float | None = None
    """The reward an answer must have to be learned; None: any."""
    overlong: Literal["drop", "keep"] = "drop"
    """drop: completions that were cut are not learned. keep: they are candidates like the others, and the model learns
    to run on where one is chosen."""


@dataclass(frozen=True, eq=False)
class Rewarded:
    """An episode with a reward."""

    name: str
    """Unique in a run."""
    group: int
    """Unique in a roll-out."""
    episode: Episode
    verdict: Verdict
    reward: float

    @property
    def is_cut(self) -> bool:
        """Whether it did not end by itself."""
        return self.episode.finish_reason == "length"

    @property
    def version(self) -> int:
        """The oldest weights it was drawn from."""
        return int(self.episode.version_N.min())


def paths_of(groups: Sequence[Group], phase: int) -> list[Rewarded]:
    """The paths of a roll-out that have a reward."""
    found = []
    for number, group in enumerate(groups):
        for episode, verdict in group.judged:
            assert verdict.total is not None
            name = f"{episode.row.id}#{episode.index} of roll-out {phase + 1}"
            found.append(Rewarded(name, number, episode, verdict, verdict.total))
    return found


class Credited(NamedTuple):
    """What has come of a roll-out."""

    trees: list[Tree]
    with_signal: list[tuple[int, Tree]]
    """Those from which something is learned, each with the version of the oldest weights it was drawn from."""
    metrics: dict[str, float]
    advantages: Mapping[str, FloatArray]
    """Of each path that is learned from."""
    learned: Any = None
    """For ``Credit.learn``."""
    num_told_apart: int | None = None
    """Groups of which rewards say something; None: of those with a signal alone."""

    @property
    def num_groups_with_signal(self) -> int:
        """Groups of whose rewards something is learned."""
        return len(self.with_signal) if self.num_told_apart is None else self.num_told_apart


class Credit:
    """The base of all kinds."""

    asked = Asked(policy=False, values=False, temperature=1.0)
    good = 1.0
    """A reward that something is learned from, where another answer has 1 less."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def bare(self, paths: Sequence[Rewarded]) -> list[Tree]:
        """The paths, a tree for each group, as the models that score them see them."""
        reads = {"has_reads": self.asked.values, "has_bootstrap": self.asked.bootstrap}
        return _trees([(p.group, sample_of(p.episode, p.name, **reads)) for p in paths])

    estimator: Estimator | None = None
    """How advantages are estimated from the rewards of a group, where they are."""
    is_plain = True
    """Whether rewards are compared as they are: neither shaped nor with a penalty."""
    needs_one = False
    """Whether there is nothing to train on without a group that is useful."""

    def is_useful(self, group: Group) -> bool:
        """Whether anything can be learned from a group: its rewards differ."""
        return group.has_signal

    def trees(self, paths: Sequence[Rewarded], said: Said) -> Credited:
        """What is trained on."""
        raise NotImplementedError

    def learn(self, given: Credited) -> None:
        """Take in what a roll-out has taught the controllers."""

    remembered: ClassVar[Any] = None
    """The type of what ``remember`` returns."""

    def remember(self) -> Any:
        """The state of the controllers, as JSON-able values."""
        return None

    def recall(self, remembered: Any) -> None:
        """Take it back."""


class Pairs(Credit):
    """Online preferences: of each group the best answer and the worst."""

    needs_one = True

    def trees(self, paths: Sequence[Rewarded], said: Said) -> Credited:
        made = []
        for group in _groups(paths).values():
            best, worst = max(group, key=_reward), min(group, key=_reward)
            if best.reward > worst.reward:
                made += [(one, _preferred(one)) for one in (best, worst)]
        if not made:
            raise CheckFailed(
                "in no group of a roll-out is one answer better than another, so there is no pair to learn from; "
                "expected rewards that differ; set rollout.refills, or take easier or harder prompts"
            )
        return credited(made, {"pairs": len(made) / 2}, {}, is_atom=True)


class Best(Credit):
    """Rejection sampling: of each group the best answers that are good enough and, unless cut ones are kept, whole."""

    needs_one = True

    def __init__(self, loss: Loss, config: BestOfNConfig) -> None:
        super().__init__(loss)
        self.config = config
        self.good = max(self.good, config.at_least or 0.0)

    def is_useful(self, group: Group) -> bool:
        return any(
            said.total is not None and self._may_be_learned(one, said.total)
            for one, said in group.judged
        )

    def _may_be_learned(self, episode: Episode, reward: float) -> bool:
        is_whole = episode.finish_reason != "length" or self.config.overlong == "keep"
        return is_whole and (self.config.at_least is None or reward >= self.config.at_least)

    def trees(self, paths: Sequence[Rewarded], said: Said) -> Credited:
        made = []
        for group in _groups(paths).values():
            good = [one for one in group if self._may_be_learned(one.episode, one.reward)]
            chosen = sorted(good, key=lambda one: -one.reward)[: self.config.keep]
            made += [(one, sample_of(one.episode, one.name, has_reads=False)) for one in chosen]
        if not made:
            raise CheckFailed(self._nothing(paths))
        kept = float(np.mean([path.reward for path, _ in made]))
        return credited(made, {"kept": float(len(made)), "reward_kept": kept}, {})

    def _nothing(self, paths: Sequence[Rewarded]) -> str:
        """Why no answer of a roll-out can be learned."""
        whole = [path for path in paths if not path.is_cut]
        if not whole and self.config.overlong == "drop":
            return (
                f"all {len(paths)} completions of a roll-out were cut, and best_of_n.overlong=drop leaves those out; "
                "expected some that end; raise rollout.max_new_tokens, or set best_of_n.overlong=keep"
            )
        best = max(path.reward for path in (whole if self.config.overlong == "drop" else paths))
        return (
            f"no answer of a roll-out has a reward of best_of_n.at_least={self.config.at_least:g}; the best has "
            f"{best:g}; expected some; lower it, raise rollout.n, or take easier prompts"
        )


class All(Credit):
    """Every answer as it is."""

    def trees(self, paths: Sequence[Rewarded], said: Said) -> Credited:
        made = [(path, sample_of(path.episode, path.name, has_reads=False)) for path in paths]
        return credited(made, {}, {})


def credited(
    made: Sequence[tuple[Rewarded, Sample]],
    metrics: dict[str, float],
    advantages: Mapping[str, FloatArray],
    *,
    is_atom: bool = False,
) -> Credited:
    """Samples as trees, one a group. A tree whose advantages are all 0 has no signal."""
    trees = _trees([(path.group, sample) for path, sample in made], is_atom=is_atom)
    versions: dict[int, int] = {}
    for path, _ in made:
        versions[path.group] = min(path.version, versions.get(path.group, path.version))
    with_signal = [
        (version, tree)
        for version, tree in zip(versions.values(), trees, strict=True)
        if any(bool(s.streams.get("advantage_N", np.ones(1)).any()) for s in tree.samples)
    ]
    return Credited(trees, with_signal, metrics, advantages)


def _trees(made: Sequence[tuple[int, Sample]], *, is_atom: bool = False) -> list[Tree]:
    by_group: dict[int, list[Sample]] = {}
    for group, sample in made:
        by_group.setdefault(group, []).append(sample)
    return [Tree(tuple(samples), is_atom) for samples in by_group.values()]


def _groups(paths: Sequence[Rewarded]) -> dict[int, list[Rewarded]]:
    found: dict[int, list[Rewarded]] = {}
    for path in paths:
        found.setdefault(path.group, []).append(path)
    return found


def _preferred(path: Rewarded) -> Sample:
    values = {"preference": path.reward, "margin": path.reward}
    return replace(sample_of(path.episode, path.name, has_reads=False), values=values)


def _reward(path: Rewarded) -> float:
    return path.reward
