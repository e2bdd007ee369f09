"""The rollout of a phase: prompts -> trajectories -> verdicts -> groups, and groups without a signal replaced.

The prompts of a phase are a pure function of the seed and the phase (``Order`` in data/order.py). With
``rollout.dynamic_sampling_rounds`` groups whose rewards are all equal, from which nothing can be learned, are replaced
by other prompts: dynamic sampling, as in DAPO (arXiv 2503.14476). The replacements are a function of the seed, the
phase and the round, so a restart needs no memory of them.

``RolloutSource`` is where rollouts come from: ``RolloutWorker`` generates them, ``Replay`` (replay.py) reads those that
another run recorded.

One rank judges for all, and asks the engine if it is a server: then each group is judged while others are generated
(feed.py). With ``rollout.lag`` groups are generated while the model trains (lag.py).

``score_trees`` then runs the trainer's own models: logprobs of the current policy and of the reference, values of the
critic. Trajectories are packed, shared and dealt out to ranks as in a training step, without gradient; every rank
gets all results, by sample.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from taut.config import Decision, configclass
from taut.data.prompts import PromptRow
from taut.errors import ConfigError, DataError, TautError
from taut.inference.engine import Engine, Sampling
from taut.inference.local import ConversationConfig, LocalEngine
from taut.inference.vllm import ServerConfig, ServerEngine
from taut.io.console import counted
from taut.losses.advantages import are_alike
from taut.rewards.panel import Panel, Verdict
from taut.rewards.verifier import Answered, Score
from taut.rl.environment import EnvironmentConfig, EnvironmentPool
from taut.rl.feed import Feed, Judge
from taut.rl.forks import ForkConfig
from taut.rl.rating import SharedRating
from taut.rl.sampler import NO_VERDICT, Trajectory, sample_trajectories
from taut.rl.steps import charged
from taut.train.distributed import Ranks
from taut.train.trainer import Role, Trainer, on_device, plan_microbatches
from taut.types import FloatArray, Packed, Sample, Scores, Tree, Wants, to_host

RESERVED = ("shaped", "kept")
"""Names of other metrics of a rollout, which no reward may have."""

TRIES = 8
"""Rounds in which other prompts are sampled where a rollout needs a useful group."""

T = TypeVar("T")


@configclass
class RolloutConfig:
    """How completions are sampled, and for how many steps a rollout is trained on."""

    n: Annotated[int, Field(ge=1)] = 8
    """Completions per prompt: the size of a group."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum number of tokens of a completion; then it is cut. With an environment: of each turn."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature. The logprobs that are trained on are at the same temperature. Tokens are sampled from the
    whole distribution: a truncated distribution (top-p, top-k, min-p) would bias the ratios."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, in addition to the model's stop set."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per pass over a rollout, which has batch.samples_per_step prompts for each of them. If fewer
    groups than that remain, some are trained on more than once."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a rollout."""
    dynamic_sampling_rounds: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling (DAPO): number of rounds in which groups whose rewards are all equal are replaced by other
    prompts. Groups that are still without a signal are then left out, unless all are. Rewards are compared before
    shaping."""
    replay_groups: Annotated[int, Field(ge=0)] = 0
    """Number of groups of earlier rollouts that are trained on again with each new rollout, newest first. Only groups
    with a signal are kept."""
    lag: Annotated[int, Field(ge=0)] = 0
    """Generate while training: groups are taken as they finish, at most this many updates after their oldest token was
    sampled. 0: each rollout is generated with the weights that begin to train on it. Above 0 requires engine=server;
    which groups are taken then depends on what is fast, and a resume is not bit for bit."""
    oversample: Annotated[int, Field(ge=0)] = 0
    """Number of further prompts that are asked with each rollout: the first groups that finish are taken, the others
    cancelled. Favours short answers: how long those are that it drops is in the event rollout. Requires engine=server
    and lag=0, as with a lag the first groups that finish are taken anyway."""
    difficulty_filter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Difficulty filtering: the probability that another prompt is asked in place of one whose last group taught
    nothing, all of its answers being right or all wrong (equal rewards). 0: prompts are asked alike."""
    max_staleness: Annotated[int, Field(ge=1)] | None = None
    """With replay_groups: maximum number of updates between the weights that sampled a group and those that are
    trained; older groups are not trained on again. None: no limit."""
    replay_from: str | None = None
    """The out directory of a run whose recorded rollouts are trained on instead of new ones: no engine is opened and
    nothing judged, and the keys for that, rewards among them, are not read. Advantages are computed anew."""
    reference: str | None = None
    """The column with the right answer. None: answers, answer, ..., or the last assistant message."""
    engine: Literal["local", "server"] = "local"
    """local: in this process, on the weights that train. server: at urls; the weights are sent to them."""
    urls: str | list[str] | None = None
    """URL of the server, as in http://127.0.0.1:8000/v1, or a list of URLs: requests are divided among the servers."""
    dtype: Literal["bfloat16"] | None = None
    """Compute dtype of the engine in this process, for a run with dtype=float32: rollouts in bfloat16 are faster on
    hardware that has its arithmetic. They are another model's than is trained, so the method has to correct for
    it (rollout_correction). None: the run's."""
    local: ConversationConfig = ConversationConfig()
    server: ServerConfig = ServerConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    fork: ForkConfig = ForkConfig()

    def __post_init__(self) -> None:
        is_own_size = self.local.prefix_cache_gib != ConversationConfig.prefix_cache_gib
        if is_own_size and not self.environment.is_on:
            raise ConfigError(
                "rollout.local.prefix_cache_gib is set without rollout.environment, and answers of one turn keep "
                "nothing for a next one; expected an environment; name one, or take rollout.local.prefix_cache_gib out"
            )
        if self.fork.is_on:
            self._require_forks()
        if (self.engine == "server") != (self.urls is not None):
            raise ConfigError(
                f"rollout.engine={self.engine} and rollout.urls={self.urls} contradict each other: urls are where "
                "servers answer; set both rollout.engine=server and rollout.urls=http://HOST:PORT/v1, or neither"
            )
        if self.engine == "server" and self.dtype is not None:
            raise ConfigError(
                f"rollout.dtype={self.dtype} with rollout.engine=server, which has a precision of its own; expected it "
                "with the engine in this process alone; take rollout.dtype out"
            )
        for section, config in (("local", ConversationConfig()), ("server", ServerConfig())):
            if section != self.engine and getattr(self, section) != config:
                raise ConfigError(
                    f"rollout.{section} is set with rollout.engine={self.engine}, where nothing reads it; expected the "
                    f"settings of the engine in use; take rollout.{section} out, or set rollout.engine={section}"
                )
        if self.lag and self.engine == "local":
            raise ConfigError(
                f"rollout.lag={self.lag} with rollout.engine=local: the engine in this process has the weights that "
                "train, and cannot generate while they change; expected rollout.engine=server; take rollout.lag out"
            )
        if self.lag and self.server.sync.sleep:
            raise ConfigError(
                f"rollout.lag={self.lag} with rollout.server.sync.sleep=true: servers that generate while the model "
                "trains cannot sleep meanwhile; expected one of the two; take one out"
            )
        if self.lag % self.updates:
            raise ConfigError(
                f"rollout.lag={self.lag} and a rollout that is trained on for {self.updates} updates: weights are sent "
                f"before each rollout, so answers are 0, {self.updates}, {2 * self.updates}, ... updates old; expected "
                f"a multiple of {self.updates}; set rollout.lag={-(-self.lag // self.updates) * self.updates}, or "
                "another rollout.minibatches or rollout.epochs"
            )
        if self.oversample and self.engine == "local":
            raise ConfigError(
                f"rollout.oversample={self.oversample} with rollout.engine=local, which computes all completions as "
                "one batch; expected rollout.engine=server; take rollout.oversample out"
            )
        if self.oversample and self.lag:
            raise ConfigError(
                f"rollout.oversample={self.oversample} with rollout.lag={self.lag}, where the first groups that finish "
                "are taken anyway, and the others go on; expected one of the two; take one out"
            )
        if self.oversample and self.environment.agents:
            raise ConfigError(
                f"rollout.oversample={self.oversample} with an agent (rollout.environment.name), which goes on when "
                "its trajectory is cancelled; expected one of the two; take one out"
            )
        if self.difficulty_filter and self.n == 1:
            raise ConfigError(
                f"rollout.difficulty_filter={self.difficulty_filter:g} with rollout.n=1: a single answer has none that "
                "its reward could differ from; expected rollout.n of 2 or more; raise it, or take "
                "rollout.difficulty_filter out"
            )
        stalest = self.lag + self.updates - 1
        if self.max_staleness is not None and not self.replay_groups:
            raise ConfigError(
                f"rollout.max_staleness={self.max_staleness} without rollout.replay_groups: no group is trained on "
                "again; expected replay_groups, or rollout.lag for how old a group may be when it is first trained on; "
                "set it, or take rollout.max_staleness out"
            )
        if self.max_staleness is not None and self.max_staleness < stalest:
            raise ConfigError(
                f"rollout.max_staleness={self.max_staleness} and a rollout that is trained on for {self.updates} "
                f"updates{f', generated up to {self.lag} before' if self.lag else ''}: its last is {stalest} behind; "
                f"expected {stalest} or more; raise it, or lower rollout.minibatches, rollout.epochs or rollout.lag"
            )

    def _require_forks(self) -> None:
        """Raise ConfigError where no path could fork as rollout.fork says."""
        fork, environment = self.fork, self.environment
        if not environment.is_on or environment.agents:
            is_what = (
                "has an agent, which branches by itself" if environment.is_on else "is not set"
            )
            raise ConfigError(
                f"rollout.fork.turns={fork.turns} and rollout.environment {is_what}; expected an environment, whose "
                "turns paths fork at; name one, or take rollout.fork out"
            )
        if fork.turns[-1] >= environment.max_turns:
            raise ConfigError(
                f"rollout.fork.turns={fork.turns} with rollout.environment.max_turns={environment.max_turns}: no turn "
                f"comes after turn {fork.turns[-1]}; expected turns before the last; lower them, or raise max_turns"
            )
        if self.n % fork.leaves:
            raise ConfigError(
                f"rollout.n={self.n} with rollout.fork.n={fork.n} and rollout.fork.turns={fork.turns}: a path that "
                f"begins becomes {fork.leaves}; expected rollout.n to be a multiple, for it counts them at their end; "
                f"set rollout.n={-(-self.n // fork.leaves) * fork.leaves}"
            )

    @property
    def grows(self) -> int:
        """Maximum number of tokens of a trajectory after its prompt."""
        return self.environment.max_tokens if self.environment.is_on else self.max_new_tokens

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout."""
        return self.minibatches * self.epochs

    def sampling(self, seed: int) -> Sampling:
        """How the engine samples. ``seed``: of the phase."""
        return Sampling(
            n=self.n,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop=self.stop,
            seed=seed,
        )

    def describe(self, num_steps: int, samples_per_step: int) -> str:
        """The plan of a run in a sentence."""
        num_prompts = counted(samples_per_step * self.minibatches, "prompts")
        plan = (
            f"{counted(num_steps, 'steps')}, {self.updates} on each rollout: {num_prompts}, "
            f"{counted(self.n, 'completions')} each, of at most {counted(self.grows, 'tokens')}"
        )
        if self.fork.is_on:
            turns = ", ".join(map(str, self.fork.turns))
            plan += f"; a path goes on as {self.fork.n} at the end of turn {turns}"
        return plan if self.replay_from is None else f"{plan}; recorded by {self.replay_from}"


@dataclass(frozen=True, eq=False)
class Group:
    """The trajectories of one prompt, each with its reward."""

    trajectories: tuple[Trajectory, ...]

    @property
    def row(self) -> PromptRow:
        return self.trajectories[0].row

    @property
    def rewarded(self) -> list[Trajectory]:
        """The trajectories that have a reward."""
        return [trajectory for trajectory in self.trajectories if trajectory.has_reward]

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ."""
        return not are_alike([trajectory.reward for trajectory in self.rewarded])


class Oversampled(NamedTuple):
    """What ``rollout.oversample`` has cancelled."""

    num_groups: int
    num_tokens: float
    """An estimate of the mean number of tokens that their answers had by then (``Feed.sizes``)."""


@dataclass(frozen=True)
class Rollout:
    """The groups of a rollout, and the seconds that they took."""

    groups: Sequence[Group]
    left_out: Sequence[Group] = ()
    """Without a signal, and replaced."""
    seconds_generating: float = 0.0
    """With rollout.lag: that the training waited for them."""
    seconds_judging: float = 0.0
    """After the last trajectory was finished."""
    draws: Sequence[int] = ()
    """With rollout.lag: the draws of ``all_groups`` (lag.py), in the order in which they were taken."""
    num_stale: int = 0
    """With rollout.lag: groups that were dropped as too old."""
    oversampled: Oversampled | None = None
    num_replaced: int = 0
    """Prompts that rollout.difficulty_filter has replaced."""
    from_data: Sequence[Group] = ()
    """Answers of the data, which were not generated."""
    lost: tuple[int, int] = 0, 0
    """``LocalEngine.take_lost``: tokens that were computed again, and bytes that would have been enough."""

    @property
    def all_groups(self) -> list[Group]:
        return [*self.groups, *self.left_out]

    @property
    def rewarded(self) -> list[Group]:
        """The groups to learn from, with those of their trajectories that have a reward."""
        every = (*self.groups, *self.from_data)
        groups = [Group(tuple(group.rewarded)) for group in every]
        return [group for group in groups if group.trajectories]


class RolloutSource(Protocol):
    """Where rollouts come from. Every rank has one, and all ranks call it."""

    @property
    def engine(self) -> Engine | None:
        """The engine that generates them; None: nothing is generated."""

    @property
    def is_judged(self) -> bool:
        """False: completions have no reward, and all are learned from."""

    @property
    def settled(self) -> Sequence[Decision]:
        """What was decided for the user when it was opened."""

    def roll(self, phase: int, indices: Sequence[int]) -> Rollout:
        """The rollout of a phase, with its rewards; ``indices``: of its prompts. All ranks get the same."""

    def close(self) -> None:
        """Release its resources."""


@dataclass(frozen=True, eq=False)
class RolloutWorker:
    """Generates rollouts. Every rank has one, and all ranks call an engine in this process."""

    config: RolloutConfig
    prompts: Sequence[PromptRow]
    engine: Engine
    panel: Panel | None
    """The writer's; None also where the environment alone rewards."""
    environments: EnvironmentPool | None
    seed: int
    ranks: Ranks
    is_judged: bool = True
    """False: completions have no reward, and all are learned from."""
    judges_together: bool = False
    """Whether a rollout is judged after its last trajectory, with a lag each group where it is taken: a model in this
    process judges."""
    rating: SharedRating | None = None
    """The reward models of several ranks."""
    is_useful: Callable[[Group], bool] = lambda group: group.has_signal
    """Whether anything can be learned from a group."""
    needs_one: bool = False
    """Whether a rollout without a useful group cannot be trained on: then other prompts are sampled, whatever
    dynamic_sampling_rounds is."""
    pieces: Sequence[bytes] | None = None
    """The bytes of each token id, where rewards charge steps of an answer."""
    settled: Sequence[Decision] = ()
    """What was decided for the user when it was opened."""

    @property
    def must_choose(self) -> bool:
        """Whether groups that are not useful are replaced by others."""
        return self.config.dynamic_sampling_rounds > 0 or self.needs_one

    @property
    def num_tries(self) -> int:
        """How often, at most."""
        return max(self.config.dynamic_sampling_rounds, TRIES if self.needs_one else 0)

    def roll(self, phase: int, indices: Sequence[int]) -> Rollout:
        """The groups of these prompts, with their rewards. Every rank calls it, and all get the same."""
        wanted, seen = len(indices), set(indices)
        groups: list[Group] = []
        left_out: list[Group] = []
        generating = judging = 0.0
        oversampled = None
        for number in range(self.num_tries + 1):
            if number == 0 and self.config.oversample:
                random = np.random.default_rng([self.seed, phase, 3])
                indices = [*indices, *self._others(random, seen)[: self.config.oversample]]
                seen.update(indices)
            rows = distinct([self.prompts[index] for index in indices])
            sampling = self.config.sampling(seed_of(self.seed, phase, number))
            began = time.perf_counter()
            trajectories, generated, cancelled = self._sample(rows, sampling, wanted - len(groups))
            oversampled = oversampled or cancelled
            generating += generated - began
            judging += time.perf_counter() - generated
            judged = [replace(trajectory, rollout=phase) for trajectory in trajectories]
            size = self.config.n
            for at in range(0, len(judged), size):
                group = Group(tuple(judged[at : at + size]))
                is_kept = not self.must_choose or self.is_useful(group)
                (groups if is_kept else left_out).append(group)
            missing = wanted - len(groups)
            if missing <= 0 or (number >= self.config.dynamic_sampling_rounds and groups):
                break
            # prompts that this phase has not asked yet
            random = np.random.default_rng([self.seed, phase, number, 1])
            indices = self._others(random, seen)[:missing]
            if not indices:
                break
            seen.update(indices)
        if not groups:  # a step has to have something
            groups, left_out = left_out, []
        lost = self.engine.take_lost() if isinstance(self.engine, LocalEngine) else (0, 0)
        return Rollout(groups, left_out, generating, judging, oversampled=oversampled, lost=lost)

    def close(self) -> None:
        """Close rewards, environments and engine."""
        if self.panel is not None:
            self.panel.close()
        if self.environments is not None:
            self.environments.close()
        if isinstance(self.engine, ServerEngine):
            self.engine.close()

    def _others(self, random: np.random.Generator, seen: Collection[int]) -> list[int]:
        """The indices of the prompts that are not in ``seen``, shuffled."""
        order = random.permutation(len(self.prompts)).tolist()
        return [index for index in order if index not in seen]

    def _sample(
        self, rows: Sequence[PromptRow], sampling: Sampling, wanted: int
    ) -> tuple[list[Trajectory], float, Oversampled | None]:
        """The trajectories of these rows in their order, judged; when the last of them was finished; and what was
        cancelled, where a server had finished the ``wanted`` groups before.

        The writer asks a server, and judges each group as soon as it is finished. A model in this process judges all
        together: how its batches are made up changes last bits.
        """
        if isinstance(self.engine, ServerEngine):
            judge = None if self.judges_together else self.judge
            sample = partial(self._feed, self.engine, rows, sampling, judge, wanted)
            sampled, generated, cancelled = self.engine.shared(sample, self.ranks)[0]
            if judge is not None:
                return sampled, generated, cancelled
        else:
            sampled = sample_trajectories(self.engine, rows, sampling, self.environments)
            generated, cancelled = time.perf_counter(), None
        if self.rating is not None:
            self.rating.rate([answered(path) for path in sampled if path.error is None])
        verdicts = self._on_all_ranks(partial(self.judge, sampled))
        judged = [t.judged(v) for t, v in zip(sampled, verdicts, strict=True)]
        return judged, generated, cancelled

    def _feed(
        self,
        engine: ServerEngine,
        rows: Sequence[PromptRow],
        sampling: Sampling,
        judge: Judge | None,
        wanted: int,
    ) -> tuple[list[Trajectory], float, Oversampled | None]:
        """What ``_sample`` returns, on the writer. Without a judge any group counts as wanted."""
        if not self.ranks.is_writer:
            return [], 0.0, None
        with closing(Feed(engine, sampling, self.environments, judge)) as feed:
            for number, row in enumerate(rows):
                feed.ask(number, row)
            groups: dict[int, list[Trajectory]] = {}
            while feed.is_busy and wanted:
                number, trajectories = feed.next()
                groups[number] = trajectories
                is_any = judge is None or not self.must_choose
                wanted -= is_any or self.is_useful(Group(tuple(trajectories)))
            sizes, cancelled = feed.sizes(), None
            if self.config.oversample and sizes:
                num_groups = len(sizes) // self.config.n
                cancelled = Oversampled(num_groups, sum(sizes) / len(sizes))
        in_order = [trajectory for number in sorted(groups) for trajectory in groups[number]]
        return in_order, feed.generated_at, cancelled

    def judge(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """A verdict for each trajectory; without a total where the engine or the environment failed."""
        whole = [trajectory for trajectory in trajectories if trajectory.error is None]
        if self.panel is not None:
            verdicts = self.panel.grade([answered(trajectory) for trajectory in whole])
        else:  # without rewards all trajectories are worth the same
            verdicts = [Verdict({}, None if self.is_judged else 0.0)] * len(whole)
        if self.pieces is not None:
            pairs = zip(verdicts, whole, strict=True)
            verdicts = [charged(verdict, trajectory, self.pieces) for verdict, trajectory in pairs]
        graded = iter([with_own(*pair) for pair in zip(verdicts, whole, strict=True)])
        return [
            next(graded) if trajectory.error is None else NO_VERDICT for trajectory in trajectories
        ]

    def _on_all_ranks(self, make: Callable[[], T]) -> T:
        """The value that the writer computes, on all ranks; its error is raised on all of them."""
        if self.ranks.size == 1:
            return make()
        made: T | TautError | None = None
        if self.ranks.is_writer:
            try:
                made = make()
            except TautError as error:
                made = error
        made = self.ranks.gather(made)[0]
        if isinstance(made, TautError):
            raise made
        return cast(T, made)


def with_own(said: Verdict, trajectory: Trajectory) -> Verdict:
    """The verdict with the environment's rewards. Raises DataError where two rewards have one name."""
    if not trajectory.rewards:
        return said
    for name in trajectory.rewards:
        if name in said.parts or name in RESERVED:
            raise DataError(
                f"{trajectory.row.place}: the environment gives the reward {name!r}, and another number of the run has "
                "that name; expected one of its own; rename it"
            )
    parts = {name: Score(value) for name, value in trajectory.rewards.items()} | dict(said.parts)
    total = sum(trajectory.rewards.values())
    if said.parts:
        whole = None if said.error is not None else total + (said.total or 0.0)
        return replace(said, parts=parts, total=whole)
    return Verdict(parts, total)


def answered(trajectory: Trajectory) -> Answered:
    """A trajectory as the rewards get it: up to the policy's last turn, which they judge."""
    row, roles = trajectory.row, [message["role"] for message in trajectory.messages]
    num_after = roles[::-1].index("assistant") if "assistant" in roles else 0
    return Answered(
        text=trajectory.text,
        references=row.references,
        row=row.columns,
        num_tokens=trajectory.num_sampled,
        finish_reason=trajectory.finish_reason,
        prompt=row.prompt if trajectory.first_messages is None else trajectory.first_messages,
        messages=trajectory.messages[: len(roles) - num_after],
    )


def seed_of(seed: int, phase: int, number: int) -> int:
    """The seed of a round of a phase: a prompt that is sampled again has other completions."""
    digest = hashlib.sha256(f"rollout/{seed}/{phase}/{number}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def distinct(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The rows, each with its own id, where a row occurs more than once."""
    times: dict[str, int] = {}
    named = []
    for row in rows:
        again = times[row.id] = times.get(row.id, -1) + 1
        named.append(replace(row, id=f"{row.id} again {again}") if again else row)
    return named


# -- scores of the trainer's own models

POLICY, REFERENCE, VALUE = "old_logp_N", "ref_logp_N", "value_R"
ModelScores: TypeAlias = dict[str, dict[str, FloatArray]]
"""Sample id -> name -> a model's scores of it, [N] or [R]."""


def sample_of(
    trajectory: Trajectory, *, has_reads: bool = False, has_bootstrap: bool = False
) -> Sample:
    """A trajectory as a sample: its sampled tokens are the targets. ``has_reads``: a critic is read before each target.
    ``has_bootstrap``: where the trajectory was cut, also after the last one.
    """
    at_N, size = trajectory.sampled_at_N, trajectory.ids_T.size
    sample = Sample(trajectory.name, trajectory.ids_T, at_N, np.ones(at_N.size), trajectory.media)
    if not has_reads:
        return sample
    after = [size - 1] if has_bootstrap and trajectory.is_cut else []
    return replace(sample, read_at_R=np.concatenate([at_N - 1, after]).astype(np.int64))


def score_trees(
    trainer: Trainer, trees: Sequence[Tree], wants: Wants, roles: Sequence[Role], step: int
) -> ModelScores:
    """The scores that the policy, the critic and ``roles`` give each sample of these trees. ``wants``: the policy's
    logprobs (``logp``) and the critic's values (``scalar``)."""
    scores_of: ModelScores = {sample.id: {} for tree in trees for sample in tree.samples}
    if not trees or not (wants.logp or wants.scalar or roles):
        return scores_of

    kept: list[tuple[str, Packed, Tensor, Tensor]] = []
    """What was scored, its micro-batch, the values on their device, and the sample of each."""

    def attempt(act: Callable[[Packed], T], packed: Packed) -> T:
        if trainer.ranks.size == 1:
            trainer.interrupts.check()
        with torch.no_grad():  # outside the attempt: what fits a forward is not what fits a step
            where = f"the rollout of step {step}"
            return trainer.fit.attempt(partial(act, packed), packed, trees, where)

    def policy_and_critic(packed: Packed) -> Scores:
        was_training = trainer.scorer.training
        trainer.scorer.eval()
        try:
            with trainer.compute():
                scores: Scores = trainer.scorer(packed, wants=wants)
        finally:
            trainer.scorer.train(was_training)
        return scores

    planned = plan_microbatches(trees, trainer)
    if wants.logp or wants.scalar:
        for packed, is_real in on_device(trainer, planned):
            scores, host = attempt(policy_and_critic, packed), packed.on_host
            if is_real and wants.logp:
                kept.append((POLICY, host, scores.logp_N, host.row_N))
            if is_real and scores.scalar_R is not None:
                kept.append((VALUE, host, scores.scalar_R, host.row_R))
    for role in roles:
        with trainer.interrupts.held(), role.active(), trainer.compute():
            for packed, is_real in on_device(trainer, planned):
                streams, host = attempt(role.streams, packed), packed.on_host
                for name, value_N in streams.items() if is_real else ():
                    kept.append((name, host, value_N, host.row_N))
    read = to_host([value for _, _, value, _ in kept])
    for (name, packed, _, row), value in zip(kept, read, strict=True):
        values, rows = value.double().numpy(), row.numpy()
        for number, sample_id in enumerate(packed.sample_ids):
            scores_of[sample_id][name] = values[rows == number]
    if trainer.ranks.size == 1:
        return scores_of
    everything: ModelScores = {name: {} for name in scores_of}
    for share in trainer.ranks.gather(scores_of):
        for name, scores_of_sample in share.items():
            everything[name] |= scores_of_sample
    return everything
