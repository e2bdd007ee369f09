"""The source of steps of methods that learn from completions of the policy: GRPO, PPO and their relatives.

    phase    one rollout (rollout.py): sampled, rewarded, scored by the models (``score_trees``), made into trees
             (advantages.py)
    step     trains on a part of its phase's trees: ``rollout.minibatches`` parts, ``rollout.epochs`` passes

A phase is a function of the weights at its beginning, the seed and its number, so a step that is repeated finds the
same phase. What a later step needs of an earlier one is state of the checkpoint (``remember``): trees that are still to
be trained on, groups to be replayed, and the state of the credit's controllers. Trees are kept as JSON-able values, to
the last bit: an array is its dtype, its shape and its bytes, compressed, as base64; no pickled object.

With ``rollout.lag`` above 0 groups are generated while the model trains, and which prompts are open is state too
(lag.py).
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict

from taut.config import Decision
from taut.data.batching import Rows
from taut.data.order import Cursor, Order
from taut.data.prompts import PromptRow, PromptSet
from taut.inference.vllm import ServerEngine
from taut.losses import Loss
from taut.rewards.panel import Verdict
from taut.rewards.verifier import Score
from taut.rl.advantages import Credit, TrainSample, as_tuple
from taut.rl.data_answers import DataAnswers
from taut.rl.difficulty import Difficulty, KeptRecord, Record
from taut.rl.lag import Draws, Lagging
from taut.rl.monitors import (
    RolloutMonitor,
    RolloutMonitorState,
    push_event,
    rollout_event,
    warn_of_servers,
)
from taut.rl.rollout import (
    POLICY,
    Group,
    ModelScores,
    Rollout,
    RolloutConfig,
    RolloutSource,
    RolloutWorker,
    score_trees,
)
from taut.rl.sampler import Trajectory
from taut.rl.teachers import Teachers
from taut.train.log.events import to_json
from taut.train.oom import require_room
from taut.train.recorder import Recorder
from taut.train.trainer import Role, Trainer
from taut.types import IntArray, Media, Sample, Tree, Wants

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

# -- what a checkpoint keeps

DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
"""Dtypes of the arrays of a sample."""

Array = Annotated[tuple[str, list[int], str], BeforeValidator(as_tuple)]
KeptMedia = Annotated[
    tuple[str, str, int, int, int, list[int] | None, bool], BeforeValidator(as_tuple)
]


class _KeptSample(TypedDict):
    """A sample in a checkpoint."""

    id: str
    ids_T: Array
    target_at_N: Array
    weight_N: Array
    media: list[KeptMedia]
    streams: dict[str, Array]
    values: dict[str, str]
    read_at_R: Array | None
    read_values: dict[str, Array]
    group: int


def _require_readable(kept: Any) -> Any:
    """Check that a sample without its pictures can be made of ``kept``: the asserts of Sample hold."""
    _decode_sample({**kept, "media": ()}, None)
    return kept


class KeptTree(TypedDict):
    """A tree in a checkpoint: what ``encode_tree`` returns."""

    samples: list[Annotated[_KeptSample, AfterValidator(_require_readable)]]
    is_atom: bool


class KeptState(TypedDict):
    """The state of ``Online`` in a checkpoint, but for the phase that it trains on."""

    replayed: list[Annotated[tuple[int, KeptTree], BeforeValidator(as_tuple)]]
    credit: Any
    guard: RolloutMonitorState
    draws: NotRequired[Draws]
    """Older checkpoints have none."""
    difficulty: NotRequired[list[KeptRecord]]
    """Older checkpoints have none."""


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


def encode_tree(tree: Tree) -> dict[str, Any]:
    """A tree as JSON-able values."""
    samples = [
        {
            "id": sample.id,
            "ids_T": _encode_array(sample.ids_T),
            "target_at_N": _encode_array(sample.target_at_N),
            "weight_N": _encode_array(sample.weight_N),
            "media": [
                [
                    media.picture.source,
                    media.picture.content,
                    media.picture.num_pictures,
                    media.start,
                    media.stop,
                    media.grid,
                    media.is_two_way,
                ]
                for media in sample.media
            ],
            "streams": {name: _encode_array(value) for name, value in sample.streams.items()},
            "values": {name: float(value).hex() for name, value in sample.values.items()},
            "read_at_R": None if sample.read_at_R is None else _encode_array(sample.read_at_R),
            "read_values": {
                name: _encode_array(value) for name, value in sample.read_values.items()
            },
            "group": sample.group,
        }
        for sample in tree.samples
    ]
    return {"samples": samples, "is_atom": tree.is_atom}


def decode_tree(kept: Mapping[str, Any], image_store: ImageStore | None) -> Tree:
    """The tree that was encoded. ``image_store``: the store of its pictures."""
    return Tree(tuple(_decode_sample(s, image_store) for s in kept["samples"]), kept["is_atom"])


def _decode_sample(kept: Mapping[str, Any], image_store: ImageStore | None) -> Sample:
    all_media = []
    for source, content, num_pictures, start, stop, grid, is_two_way in kept["media"]:
        assert image_store is not None, "pictures are kept where the model takes them"
        picture = image_store.picture(source, content, num_pictures, kept["id"])
        all_media.append(Media(picture, start, stop, tuple(grid) if grid else None, is_two_way))
    read_at = kept["read_at_R"]
    return Sample(
        id=kept["id"],
        ids_T=_decode_array(kept["ids_T"]),
        target_at_N=_decode_array(kept["target_at_N"]),
        weight_N=_decode_array(kept["weight_N"]),
        media=tuple(all_media),
        streams={name: _decode_array(value) for name, value in kept["streams"].items()},
        values={name: float.fromhex(value) for name, value in kept["values"].items()},
        read_at_R=None if read_at is None else _decode_array(read_at),
        read_values={name: _decode_array(value) for name, value in kept["read_values"].items()},
        group=kept["group"],
    )


def _encode_array(value: NDArray[Any]) -> list[Any]:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
    return [value.dtype.str, list(value.shape), text]


def _decode_array(kept: Sequence[Any]) -> NDArray[Any]:
    """The array. Raises ValueError where ``kept`` is no encoded array."""
    dtype, shape, text = kept
    if dtype not in DTYPES or any(size < 0 for size in shape):
        raise ValueError(f"an array has the dtype {dtype[:20]!r} and the shape {shape[:8]}")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size >= 2**40:
        raise ValueError(f"an array has the shape {shape[:8]}")
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"an array cannot be unpacked ({error})") from error
    if len(raw) != size or not unpacking.eof:
        raise ValueError(f"an array has not the {size:,} bytes of its shape")
    return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()


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
    """The state of ``Online`` before it (``_state``); None: a step has trained on it."""


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
    open_worker: Callable[[], RolloutSource] | None = None
    """Opens engine, rewards and environment, or the rollouts of another run, when they are first needed."""
    open_teachers: Callable[[], Teachers] | None = None
    """Opens the teachers that score a rollout before it is trained on, where a method has some."""
    data_answers: DataAnswers | None = None
    """Answers of the data to some of the prompts, where a method mixes them in."""
    phase: Phase | None = field(default=None, init=False)
    replayed: list[TrainSample] = field(default_factory=list, init=False)
    """Groups that may be trained on again, newest first."""
    _taken: tuple[int, Rollout] | None = field(default=None, init=False)
    """The number of a phase that is being made, and its rollout: a step that is repeated does not draw again."""
    _unlogged: Events = field(default=(), init=False)
    """Events of a phase that came from a checkpoint."""
    draws: Draws = field(default_factory=lambda: Draws(next=0, open=[]), init=False)
    """With rollout.lag: which prompts are open."""

    @property
    def loss(self) -> Loss:
        """The loss to minimise."""
        return self.credit.loss

    @property
    def trainer(self) -> Trainer:
        assert self.get_trainer is not None, "rollouts need a trainer: build_trainer has one"
        return self.get_trainer()

    @cached_property
    def worker(self) -> RolloutSource:
        """Engine, rewards and environment, opened; or recorded rollouts."""
        assert self.open_worker is not None, "rollouts need an engine"
        return self.open_worker()

    @cached_property
    def teachers(self) -> Teachers | None:
        """The teachers, opened."""
        return None if self.open_teachers is None else self.open_teachers()

    def taught(self, scores: ModelScores, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Add what the teachers say of these groups to the scores; their metrics."""
        if self.teachers is None:
            return {}
        streams, metrics = self.teachers.score(self.trainer, groups, step)
        for name, of_trajectory in streams.items():
            scores.setdefault(name, {}).update(of_trajectory)
        return metrics

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1); the first of a phase generates its rollout. An empty list where no
        completion of the phase has a reward and nothing is replayed: the loop skips the step.
        """
        number, update = divmod(step - 1, self.config.updates)
        if self.phase is None or self.phase.number != number:
            self.phase = self._new_phase(number, step)
        for kind, fields in self._unlogged:  # a resume takes back the events of steps to come
            self.trainer.emit(kind, **fields)
        self._unlogged = ()
        return numbered(self.part(self.phase.trees, number, update))

    def is_known(self, step: int) -> bool:
        """Whether the rollout of a step is there: that of another phase is made with weights yet to come."""
        return self.phase is not None and self.phase.number == (step - 1) // self.config.updates

    def part(self, trees: Sequence[Tree], number: int, update: int) -> list[Tree]:
        """The trees of one update of a phase; each pass over the phase deals them out in another order."""
        count = self.config.minibatches
        if count == 1 or not trees:
            return list(trees)
        epoch, part = divmod(update, count)
        order = np.random.default_rng([self.seed, number, epoch, 2]).permutation(len(trees))
        if len(trees) < count:
            return [trees[order[part % len(trees)]]]
        return [trees[index] for index in np.array_split(order, count)[part]]

    def observed(self, step: int) -> list[Tree] | None:
        """None: statistics are taken over the step."""
        return None

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """None, for held-out rows as well."""
        return None

    def cursor(self, step: int) -> Cursor:
        """The number of prompts that were sampled after a step, those of dynamic_sampling_rounds not counted."""
        phases = -(-step // self.config.updates)
        return Cursor(step, self.order.cursor(phases).samples)

    def open(self) -> Sequence[Decision]:
        """Open engine, rewards, environment and teachers."""
        teachers = () if self.teachers is None else self.teachers.settled
        return [*teachers, *self.worker.settled]

    @property
    def state(self) -> Online:
        """This object, which remembers trees still to be trained on, groups to be replayed and the state of
        controllers."""
        return self

    def close(self) -> None:
        """Close engine, rewards, environment and teachers, if they were opened."""
        if "_lagging" in vars(self):
            self._lagging.close()
        if (teachers := vars(self).get("teachers")) is not None:
            teachers.close()
        if "worker" in vars(self):
            self.worker.close()

    # -- a phase

    def _new_phase(self, number: int, step: int) -> Phase:
        """Generate a rollout, reward it, score it and assign credit. No state changes before all of it is done."""
        trainer, version, before = self.trainer, step - 1, self._state
        events: list[tuple[str, dict[str, Any]]] = []

        def emit(kind: str, **fields: Any) -> None:
            events.append((kind, fields))
            trainer.emit(kind, **fields)

        if self._taken is None or self._taken[0] != number:
            generate = partial(self._generate, number, version)
            if self.config.engine == "local" and self.worker.engine is not None:
                generate = partial(require_room, generate, f"the rollout of step {step}", SMALLER)
            with trainer.interrupts.at_once(trainer.ranks):
                self._taken = number, generate()
        rollout = self._taken[1]
        if rollout.all_groups:
            self.monitor.require_rewards(rollout.all_groups, step)
        groups, seconds = rollout.rewarded, 0.0
        self.credit.require_usable(groups)
        samples: list[TrainSample] = []
        of_credit: dict[str, float] = {}
        if groups:
            began = time.perf_counter()
            trees = self.credit.bare(self.credit.scored(groups))
            scores = score_trees(trainer, trees, self.credit.wants, self.roles, step)
            of_teachers = self.taught(scores, groups, step)
            seconds = time.perf_counter() - began
            samples, of_credit = self.credit.assign(groups, scores)
            of_credit |= of_teachers
        is_judged = self.worker.is_judged
        fields = rollout_event(
            rollout, samples, of_credit, version, self.config, is_judged=is_judged
        )
        self._record(trainer.recorder, step, rollout, samples)
        replayed = [sample for sample in self.replayed if self._is_young(sample.version, version)]
        pushed = push_event(self.worker.engine)
        emit(
            "rollout",
            step=step,
            **fields,
            num_replayed=len(replayed),
            seconds_scoring=seconds,
            **pushed,
        )
        warn_of_servers(pushed, step, emit)
        if rollout.all_groups:
            self.monitor.look(step, fields, emit)
        if groups:
            self.credit.learn(groups, of_credit)
        trees = [sample.tree for sample in (*samples, *replayed)]
        samples = [sample for sample in samples if sample.has_gradient]
        self.replayed = [*samples, *replayed][: self.config.replay_groups]
        if "_lagging" in vars(self):
            self.draws = self._lagging.draws
        if self.config.difficulty_filter:
            self.difficulty.record(rollout.all_groups)
        self._taken = None
        return Phase(number, trees, events, before)

    def _record(
        self, recorder: Recorder, step: int, rollout: Rollout, samples: Sequence[TrainSample]
    ) -> None:
        from taut.rl.records import SCHEMA, rollout_rows

        recorder.add_rollouts(step, SCHEMA, partial(rollout_rows, step, rollout, samples))

    def _is_young(self, drawn_at: int, version: int) -> bool:
        most = self.config.max_staleness
        return most is None or version + self.config.updates - 1 - drawn_at <= most

    def _generate(self, number: int, version: int) -> Rollout:
        """The rollout of a phase: recorded, or generated with the current weights, or with rollout.lag taken from what
        is in flight.
        """
        engine = self.worker.engine
        if engine is not None:
            with (
                self.trainer.interrupts.held()
            ):  # an engine with half of the weights has no version
                engine.update(version)
        if engine is None:
            return self.worker.roll(number, self.order.step(number + 1))
        are_own = self._are_own(number)
        if not any(are_own):
            rollout = Rollout([])
            if isinstance(engine, ServerEngine):
                engine.rest()
        elif self.config.lag:
            num_left = -(-self.trainer.num_steps // self.config.updates) - number
            rollout = self._lagging.take(number, version, num_left)
        else:
            indices, num_replaced = self._prompts_of(number)
            own = [index for index, is_own in zip(indices, are_own, strict=True) if is_own]
            rollout = replace(self.worker.roll(number, own), num_replaced=num_replaced)
        if self.data_answers is None:
            return rollout
        indices = self.order.step(number + 1)
        return replace(rollout, from_data=self.data_answers.groups(number, indices))

    def _are_own(self, number: int) -> list[bool]:
        """Whether the policy answers each prompt of a phase."""
        size = self.order.samples_per_step
        answers = self.data_answers
        return [True] * size if answers is None else answers.are_own(number, size)

    def _prompts_of(self, number: int) -> tuple[list[int], int]:
        """The prompts of a phase, and how many of them replace others."""
        indices, first = self.order.step(number + 1), number * self.order.samples_per_step
        if not self.config.difficulty_filter:
            return indices, 0
        taken, chosen = set(indices), []
        for place, index in enumerate(indices, first):
            chosen.append(self.difficulty.choose(place, index, taken))
            taken.add(chosen[-1])
        return chosen, sum(a != b for a, b in zip(indices, chosen, strict=True))

    @cached_property
    def difficulty(self) -> Difficulty:
        """What is known of the difficulty of prompts."""
        return Difficulty(self.config.difficulty_filter, self.seed, self.prompts.prompt_rows)

    @cached_property
    def _lagging(self) -> Lagging:
        assert isinstance(self.worker, RolloutWorker)
        size = self.order.samples_per_step

        def prompt_of(draw: int, taken: Collection[int]) -> tuple[int, bool]:
            index = self.order.step(draw // size + 1)[draw % size]
            if not self.config.difficulty_filter:
                return index, False
            chosen = self.difficulty.choose(draw, index, taken)
            return chosen, chosen != index

        return Lagging(self.worker, prompt_of, self._are_own, size, self.draws)

    # -- across a restart

    @property
    def remembered(self) -> Any:
        """The type of what ``remember`` returns; what the credit remembers depends on its kind."""
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
        """What the steps to come need of those before. A phase that no step has trained on is kept with its events and
        the state before it.
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
        """The state that a phase changes."""
        credit, monitor = self.credit.remember(), self.monitor.remember()
        return {
            "replayed": self.replayed,
            "credit": credit,
            "guard": monitor,
            "draws": self.draws,
            "difficulty": dict(self.difficulty.records) if self.config.difficulty_filter else {},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.replayed = state["replayed"]
        self.credit.recall(state["credit"])
        self.monitor.recall(state["guard"])
        self.draws = state.get("draws", self.draws)
        if self.config.difficulty_filter:
            self.difficulty.records = dict(state["difficulty"])


def _encode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that a phase changes, as JSON-able values."""
    replayed = [[sample.version, encode_tree(sample.tree)] for sample in state["replayed"]]
    difficulty = [[index, *record] for index, record in sorted(state["difficulty"].items())]
    return {**state, "replayed": replayed, "difficulty": difficulty}


def numbered(trees: Sequence[Tree]) -> list[Tree]:
    """The trees of a step. Samples that are compared with each other get their tree's number as group."""
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
    """A completion of a prompt that no engine sampled, with a reward."""
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
        verdict=Verdict({"dry run": Score(reward)}, reward),
    )


def dry_run_group(
    sample: Sample, good: float, columns: Mapping[str, Any] = MappingProxyType({})
) -> Group | None:
    """A group of two answers, made of a prompt: its first half with all of its pictures is the prompt, its second half
    one answer, and the same tokens reversed the other. One answer gets a good reward. None if there is no second half.
    ``columns``: of the prompt's row.
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
    """The trees that a run which generates would train on if these prompts were completions (``dry_run_group``). The
    trainer's own logprobs stand for the engine's; scores, advantages and trees are made as in training. Checks use it
    to look at what a step computes before anything is generated.
    """
    credit = source.credit
    columns_of = {row.place: row.columns for row in source.prompts.prompt_rows}
    made = (dry_run_group(s, credit.good, columns_of.get(s.id, {})) for s in samples)
    groups = [group for group in made if group is not None]
    trees = credit.bare(groups)
    policy_scores = score_trees(trainer, trees, Wants(temperature=credit.wants.temperature), (), 1)
    groups = [
        Group(tuple(replace(t, logp_N=policy_scores[t.name][POLICY]) for t in group.trajectories))
        for group in groups
    ]
    scores = score_trees(trainer, trees, credit.wants, source.roles, 1)
    source.taught(scores, groups, 1)
    return numbered([sample.tree for sample in credit.assign(groups, scores)[0]])
