"""The source of steps of methods that learn from completions of the policy: GRPO, PPO and their relatives.

    phase    one rollout: sampled and judged (``Online.rollouts``), scored by the models (``score_trees``), and made
             into trees (advantages.py)
    step     trains on a part of its phase's trees: ``rollout.minibatches`` parts, ``rollout.epochs`` passes

A phase is a function of the weights at its beginning, the seed and its number, so a step that is repeated finds the
same phase. What a later step needs of an earlier one is state of the checkpoint (``remember``): trees that are still to
be trained on (saved_trees.py), and the state of the sources of rollouts, the credit and the monitor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict

from taut.config import Decision
from taut.data.batching import Rows
from taut.data.order import Cursor, Order
from taut.data.rows.prompts import PromptRow, PromptSet
from taut.losses.loss import Loss
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.advantages import Credit, TrainSample, as_tuple
from taut.rl.async_rollouts import AsyncRollouts, DrawState
from taut.rl.data_answers import DataAnswers
from taut.rl.difficulty import DifficultyFilter, KeptRecord, Record
from taut.rl.dynamic_sampling import DynamicSampling, GroupChoice
from taut.rl.monitors import (
    RolloutMonitor,
    RolloutMonitorState,
    push_event,
    rollout_event,
)
from taut.rl.oversampling import Oversampling
from taut.rl.replay import ReplayGroups
from taut.rl.rollout import (
    POLICY,
    Group,
    ModelScores,
    Rollout,
    RolloutRequest,
    RolloutSource,
    RolloutState,
    score_trees,
)
from taut.rl.sampler import Trajectory
from taut.rl.saved_trees import KeptTree, decode_tree, encode_tree
from taut.rl.settings import RolloutConfig
from taut.rl.teachers import Teachers
from taut.rl.worker import RolloutWorker
from taut.train.log.events import to_json
from taut.train.oom import require_room
from taut.train.trainer import Role, Trainer
from taut.types import IntArray, Sample, Tree, Wants

# RecordedRollouts is imported where it is opened: pyarrow takes long to import.
if TYPE_CHECKING:
    from taut.rl.recorded import RecordedRollouts

# -- what a checkpoint keeps


class KeptState(TypedDict):
    """The state that a phase changes, in a checkpoint; older checkpoints lack some keys."""

    replayed: list[Annotated[tuple[int, KeptTree], BeforeValidator(as_tuple)]]
    credit: Any
    guard: RolloutMonitorState
    draws: NotRequired[DrawState]
    difficulty: NotRequired[list[KeptRecord]]


KeptPhase = Annotated[
    tuple[
        Annotated[int, Field(ge=0)],
        list[KeptTree],
        list[Annotated[tuple[str, dict[str, Any]], BeforeValidator(as_tuple)]],
        KeptState | None,
    ],
    BeforeValidator(as_tuple),
]


class OnlineState(KeptState):
    """The state of ``Online`` in a checkpoint."""

    phase: KeptPhase | None


# -- the source of steps

SMALLER = "set a smaller rollout.local.sequences or rollout.local.prefill_tokens"
"""The remedy where generation runs out of memory."""

Events = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class Phase:
    """A rollout that is being trained on."""

    number: int
    trees: Sequence[Tree]
    events: Events
    """Its log events, as (kind, fields)."""
    before: dict[str, Any] | None
    """The state before the phase (``Online._state``); None: a step has trained on it."""


@dataclass(eq=False)
class Online:
    """A source of steps that generates rollouts and trains on their trees."""

    config: RolloutConfig
    prompts: PromptSet
    order: Order
    """The order of prompts; each of its steps is a phase."""
    credit: Credit
    monitor: RolloutMonitor
    seed: int
    get_trainer: Callable[[], Trainer] | None = None
    """The trainer, which is made after its source. None: only the order of prompts is needed."""
    roles: Sequence[Role] = ()
    """Models that score a rollout before it is trained on, such as a reference for a penalty in the reward."""
    open_worker: Callable[[], RolloutWorker | RecordedRollouts] | None = None
    """Opens engine, rewards and environment, or the rollouts of another run, when they are first needed."""
    open_teachers: Callable[[], Teachers] | None = None
    """Opens the teachers that score a rollout before it is trained on, where a method has some."""
    policy_share: float = 1.0
    """Share of the prompts that the policy answers. The data answer the others (GKD's lambda)."""
    phase: Phase | None = field(default=None, init=False)
    _taken: tuple[int, Rollout] | None = field(default=None, init=False)
    """The number of the phase that is being made, and its rollout, so that a step that is repeated does not sample
    again.
    """
    _unlogged: Events = field(default=(), init=False)
    """Events of a phase that came from a checkpoint."""
    _of_rollouts: RolloutState = field(default_factory=RolloutState, init=False)
    """The state of ``rollouts``."""

    @property
    def loss(self) -> Loss:
        """The loss to minimize."""
        return self.credit.loss

    @property
    def trainer(self) -> Trainer:
        assert self.get_trainer is not None, "rollouts need a trainer: build_trainer has one"
        return self.get_trainer()

    @cached_property
    def worker(self) -> RolloutWorker | RecordedRollouts:
        """Engine, rewards and environment, opened; or recorded rollouts."""
        assert self.open_worker is not None, "rollouts need an engine"
        return self.open_worker()

    @cached_property
    def rollouts(self) -> RolloutSource:
        """The source of rollouts that the configuration asks for, from the base outwards."""
        config, seed, state = self.config, self.seed, self._of_rollouts
        credit, prompts = self.credit, self.prompts
        choice = GroupChoice(credit.is_useful, config.dynamic_sampling_rounds, credit.needs_one)
        source: RolloutSource = self.worker
        if isinstance(self.worker, RolloutWorker):
            num_prompts = len(self.worker.prompts)
            if config.lag:  # takes groups one by one, and others in place of those without a signal
                source = AsyncRollouts(self.worker, choice, state)
            elif config.oversample:
                source = Oversampling(source, config.oversample, choice, num_prompts, seed)
            if choice.num_tries and not config.lag:
                source = DynamicSampling(source, choice, num_prompts, seed)
            if self.policy_share < 1:
                source = DataAnswers(source, self.worker.engine, prompts, self.policy_share, seed)
        if config.difficulty_filter:
            rows, share = prompts.prompt_rows, config.difficulty_filter
            source = DifficultyFilter(source, share, seed, rows, state)
        if config.replay_groups:
            source = ReplayGroups(source, config, state)
        return source

    @cached_property
    def teachers(self) -> Teachers | None:
        """The teachers, opened."""
        return None if self.open_teachers is None else self.open_teachers()

    def add_teacher_scores(
        self, scores: ModelScores, groups: Sequence[Group], step: int
    ) -> dict[str, float]:
        """Add the teachers' scores of these groups to the scores, and return their metrics."""
        if self.teachers is None:
            return {}
        streams, metrics = self.teachers.score(self.trainer, groups, step)
        for name, of_trajectory in streams.items():
            scores.setdefault(name, {}).update(of_trajectory)
        return metrics

    def prepare(self, step: int) -> list[Tree]:
        """Return the trees of a step (counted from 1). The list is empty where no completion of the phase has a reward
        and nothing is replayed: the loop skips the step.
        """
        # The first step of a phase makes its trees.
        number, update = divmod(step - 1, self.config.updates)
        if self.phase is None or self.phase.number != number:
            self.phase = self._new_phase(number, step)
        # A resume has removed the events of later steps from the log: write those of this phase again.
        for kind, fields in self._unlogged:
            self.trainer.emit(kind, **fields)
        self._unlogged = ()
        # Each step trains on a part of them.
        return numbered(self.part(self.phase.trees, number, update))

    def is_known(self, step: int) -> bool:
        """Whether the rollout of a step is there; later rollouts need weights that are yet to be trained."""
        return self.phase is not None and self.phase.number == (step - 1) // self.config.updates

    def part(self, trees: Sequence[Tree], number: int, update: int) -> list[Tree]:
        """Return the trees of one update of a phase. Each pass over the phase deals them out in another order."""
        count = self.config.minibatches
        if count == 1 or not trees:
            return list(trees)
        epoch, part = divmod(update, count)
        order = np.random.default_rng([self.seed, number, epoch, 2]).permutation(len(trees))
        if len(trees) < count:
            return [trees[order[part % len(trees)]]]
        return [trees[index] for index in np.array_split(order, count)[part]]

    def observed(self, step: int) -> list[Tree] | None:
        """Return None: losses take their statistics over the step."""
        return None

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """Return None, for held-out rows as well."""
        return None

    def cursor(self, step: int) -> Cursor:
        """Return the number of prompts that were asked after a step, without replacements of dynamic sampling."""
        phases = -(-step // self.config.updates)
        return Cursor(step, self.order.cursor(phases).samples)

    @property
    def epoch_size(self) -> int:
        """Prompts in an epoch."""
        return self.order.epoch_size

    def open(self) -> Sequence[Decision]:
        """Open engine, rewards, environment and teachers."""
        teachers = () if self.teachers is None else self.teachers.decisions
        return [*teachers, *self.rollouts.decisions]

    @property
    def state(self) -> Online:
        """The state of the checkpoint, which this object remembers and recalls."""
        return self

    def close(self) -> None:
        """Close engine, rewards, environment and teachers, if they were opened."""
        if (teachers := vars(self).get("teachers")) is not None:
            teachers.close()
        if "worker" in vars(self):
            self.rollouts.close()

    # -- a phase

    def _new_phase(self, number: int, step: int) -> Phase:
        """Make the trees of a rollout. No state changes before all of it is done."""
        trainer, version, before = self.trainer, step - 1, self._state
        events: list[tuple[str, dict[str, Any]]] = []

        def emit(kind: str, **fields: Any) -> None:
            events.append((kind, fields))
            trainer.emit(kind, **fields)

        # Generate and judge: groups are judged as they finish, or together (worker.py). A phase that is begun again
        # because memory ran out keeps its rollout.
        if self._taken is None or self._taken[0] != number:
            generate = partial(self._generate, number, version)
            if self.config.engine == "local" and self.worker.engine is not None:
                generate = partial(require_room, generate, f"the rollout of step {step}", SMALLER)
            with trainer.interrupts.at_once(trainer.ranks):
                self._taken = number, generate()
        rollout = self._taken[1]
        if rollout.all_groups:
            self.monitor.require_rewards(rollout.all_groups, step)
        groups = rollout.rewarded
        self.credit.require_usable(groups)

        samples, metrics, seconds_scoring = list[TrainSample](), dict[str, float](), 0.0
        if groups:
            # Score: logprobs and values of the trainer's models and of teachers, before anything is trained.
            began = time.perf_counter()
            trees = self.credit.bare(self.credit.scored(groups))
            scores = score_trees(trainer, trees, self.credit.wants, self.roles, step)
            of_teachers = self.add_teacher_scores(scores, groups, step)
            seconds_scoring = time.perf_counter() - began

            # Advantages: of each token, from rewards and scores.
            samples, metrics = self.credit.assign(groups, scores)
            metrics |= of_teachers

        # Record the rollout; warn of it, or stop the run.
        is_judged = self.worker.is_judged
        fields = rollout_event(rollout, samples, metrics, version, self.config, is_judged=is_judged)
        from taut.rl.records import SCHEMA, rollout_rows

        make_rows = partial(rollout_rows, step, rollout, samples)
        trainer.recorder.add_rollouts(step, SCHEMA, make_rows)
        pushed = push_event(self.worker.engine)
        emit(
            "rollout",
            step=step,
            **fields,
            num_replayed=len(rollout.replayed),
            seconds_scoring=seconds_scoring,
            **pushed,
        )
        for reason in pushed.get("servers_left_out", ()):
            detail = f"left out, {pushed['servers']} are in use; {reason}"
            emit("warning", name="server", step=step, detail=detail)
        if rollout.all_groups:
            self.monitor.look(step, fields, emit)

        # Accept the rollout: from here on state changes.
        if groups:
            self.credit.learn(groups, metrics)
        self.rollouts.commit(rollout, samples)
        self._taken = None

        # Trees: one for each group, then the groups that are replayed. ``prepare`` deals them out to the steps.
        trees = [sample.tree for sample in (*samples, *rollout.replayed)]
        return Phase(number, trees, events, before)

    def _generate(self, number: int, version: int) -> Rollout:
        """Take the rollout of a phase, after the engine has the current weights."""
        if self.worker.engine is not None:
            # an engine with half of the weights has no version
            with self.trainer.interrupts.held():
                self.worker.engine.update(version)
        num_left = -(-self.trainer.num_steps // self.config.updates) - number
        return self.rollouts.take(RolloutRequest(number, self.order, version, num_left))

    # -- across a restart

    @property
    def remembered(self) -> Any:
        """The type of what ``remember`` returns; the state of the credit depends on its kind."""
        credit_type = pydantic.TypeAdapter(self.credit.remembered)

        def require_credit(state: OnlineState) -> OnlineState:
            phase = state["phase"]
            before = phase[3] if phase is not None else None
            for kept in (state, before):
                if kept is not None:
                    kept["credit"] = credit_type.validate_python(kept["credit"], strict=True)
            return state

        return Annotated[OnlineState, AfterValidator(require_credit)]

    def remember(self) -> dict[str, Any]:
        """Return the state that later steps need, as JSON-able values. A phase that no step has trained on is kept with
        its events and the state before it.
        """
        number, update = divmod(self.trainer.done, self.config.updates)
        state, phase = _encode_state(self._state), self.phase
        if phase is None or phase.number != number:
            return {"phase": None, **state}
        trees = [encode_tree(tree) for tree in phase.trees]
        if update or phase.before is None:
            return {"phase": [number, trees, [], None], **state}
        events = to_json(list(phase.events))
        return {"phase": [number, trees, events, _encode_state(phase.before)], **state}

    def recall(self, remembered: dict[str, Any]) -> None:
        """Restore what ``remember`` returned."""
        image_store = self.prompts.image_store

        def decode_state(kept: Mapping[str, Any]) -> dict[str, Any]:
            pairs = kept["replayed"]
            replayed = [
                TrainSample(version, decode_tree(tree, image_store)) for version, tree in pairs
            ]
            records = {index: Record(*rest) for index, *rest in kept.get("difficulty", ())}
            return {**kept, "replayed": replayed, "difficulty": records}

        if remembered["phase"] is not None:
            number, trees, self._unlogged, before = remembered["phase"]
            state = None if before is None else decode_state(before)
            decoded = [decode_tree(tree, image_store) for tree in trees]
            self.phase = Phase(number, decoded, self._unlogged, state)
        self._restore(decode_state(remembered))

    def reject(self) -> None:
        """Forget the phase if no step has trained on it: it may be why the run stopped. A resume generates another."""
        phase, done = self.phase, self.trainer.done
        if phase is None or phase.before is None or phase.number * self.config.updates != done:
            return
        self.phase = None
        self._restore(phase.before)

    @property
    def _state(self) -> dict[str, Any]:
        """The state that a phase changes: of the credit, the monitor and the sources of rollouts."""
        return {
            "replayed": self._of_rollouts.replayed,
            "credit": self.credit.remember(),
            "guard": self.monitor.remember(),
            "draws": self._of_rollouts.draws,
            "difficulty": self._of_rollouts.difficulty,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.credit.recall(state["credit"])
        self.monitor.recall(state["guard"])
        self._of_rollouts.replayed = state["replayed"]
        self._of_rollouts.draws = state.get("draws", self._of_rollouts.draws)
        self._of_rollouts.difficulty = state["difficulty"]


def _encode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that a phase changes as JSON-able values."""
    replayed = [[sample.version, encode_tree(sample.tree)] for sample in state["replayed"]]
    difficulty = [[index, *record] for index, record in sorted(state["difficulty"].items())]
    return {**state, "replayed": replayed, "difficulty": difficulty}


def numbered(trees: Sequence[Tree]) -> list[Tree]:
    """Return the trees of a step; samples that are compared with each other get their tree's number as group."""
    return [
        replace(tree, samples=tuple(replace(sample, group=number) for sample in tree.samples))
        if tree.is_atom
        else tree
        for number, tree in enumerate(trees)
    ]


# -- a dry run


def made_up_trajectory(
    prompt: PromptRow, index: int, ids_N: IntArray, reward: float, rollout: int = 0
) -> Trajectory:
    """Return a completion of a prompt that no engine sampled, with a reward."""
    return Trajectory(
        row=prompt,
        index=index,
        ids_T=np.concatenate([prompt.ids_T, ids_N]),
        sampled_at_N=np.arange(prompt.ids_T.size, prompt.ids_T.size + ids_N.size),
        logp_N=np.zeros(ids_N.size),
        version_N=np.zeros(ids_N.size, dtype=np.int64),
        finish_reason="stop",
        text="",
        media=prompt.media,
        rollout=rollout,
        reward_result=RewardResult({"dry run": Score(reward)}, reward),
    )


def dry_run_group(
    sample: Sample, good: float, columns: Mapping[str, Any] = MappingProxyType({})
) -> Group | None:
    """Return a group of two answers made of a prompt, or None if the prompt has no second half. Its first half with all
    of its pictures is the prompt; the second half is one answer, with a good reward, and its tokens reversed are the
    other. ``columns``: of the prompt's row.
    """
    half = max((sample.num_tokens + 1) // 2, *(media.stop for media in sample.media), 1)
    if half >= sample.num_tokens:
        return None
    prompt = PromptRow(
        sample.id, sample.id, sample.ids_T[:half], "", (), None, columns, media=sample.media
    )
    end_N = sample.ids_T[half:]
    first = made_up_trajectory(prompt, 0, end_N, good)
    return Group((first, made_up_trajectory(prompt, 1, end_N[::-1], good - 1)))


def dry_run(source: Online, trainer: Trainer, samples: Sequence[Sample]) -> list[Tree]:
    """Return the trees that a run would train on if these prompts were completions (``dry_run_group``). The trainer's
    logprobs stand for the engine's; scores, advantages and trees are made as in training. Checks use it to look at a
    step before anything is generated.
    """
    credit = source.credit
    columns_of = {row.place: row.columns for row in source.prompts.prompt_rows}
    candidates = (dry_run_group(s, credit.good, columns_of.get(s.id, {})) for s in samples)
    groups = [group for group in candidates if group is not None]
    trees = credit.bare(groups)
    policy_scores = score_trees(trainer, trees, Wants(temperature=credit.wants.temperature), (), 1)
    groups = [
        Group(tuple(replace(t, logp_N=policy_scores[t.name][POLICY]) for t in group.trajectories))
        for group in groups
    ]
    scores = score_trees(trainer, trees, credit.wants, source.roles, 1)
    source.add_teacher_scores(scores, groups, 1)
    return numbered([sample.tree for sample in credit.assign(groups, scores)[0]])
