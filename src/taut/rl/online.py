"""The source of steps of methods that learn from completions of the policy: GRPO, PPO and their relatives.

    phase    one rollout (rollout.py): sampled, judged, scored by the auxiliary models, made into trees (advantages.py)
    step     trains on a part of its phase's trees: ``rollout.minibatches`` parts, ``rollout.epochs`` passes

A phase belongs to the steps that train on it. It is a function of the weights it began with, the seed and its
number, so a step that is repeated finds the same phase. What a later step needs of an earlier one is state of the
checkpoint (``remember``): trees that are not used up, groups to be replayed, and the state of the credit's
controllers.

With ``rollout.asynchronous`` the next phase is generated in a thread (``Ahead``) while this one is trained on, at most
one phase ahead:

    ahead.start(4, lambda: roll(4))        returns at once
    ...                                    phase 3 is trained on
    ahead.take(4)                          waits; raises what the call raised

The call runs in one thread next to the one that trains: it asks a server and judges answers, makes its collective
calls in a process group of its own (``Ranks.on_cpu``) and leaves torch's global state alone. ``close`` waits for
nothing: the thread is a daemon, and closing the engine, which comes next, cancels what it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict

from taut.config import Decision
from taut.data.batching import Cursor, Order, Rows
from taut.data.prompts import PromptSet
from taut.losses import Loss
from taut.rl import metrics
from taut.rl.advantages import Credit, Credited, TrainSample, judged_trajectories
from taut.rl.buffer_state import KeptTree, as_tuple, decoded, encoded
from taut.rl.monitors import Guard, GuardState
from taut.rl.rollout import Roller, Rollout, RolloutConfig, scored
from taut.train.log.events import to_json
from taut.train.oom import require_room
from taut.train.trainer import Role, Trainer
from taut.types import Tree

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

T = TypeVar("T")


class Ahead(Generic[T]):
    """One call under way, or done and not yet taken."""

    def __init__(self) -> None:
        self._phase: int | None = None
        self._future: Future[T] | None = None

    @property
    def started(self) -> int | None:
        """The phase that is under way or done; None where there is none."""
        return self._phase

    def start(self, phase: int, call: Callable[[], T]) -> None:
        """Begin a phase, once the one before is taken."""
        assert self._phase is None, f"phase {self._phase} is not taken yet"
        future: Future[T] = Future()
        self._phase, self._future = phase, future
        threading.Thread(
            target=_run, args=(call, future), name=f"phase {phase}", daemon=True
        ).start()

    def take(self, phase: int) -> T:
        """The result of a phase that was started, when it is there. Raises what the call raised."""
        assert self._future is not None and self._phase == phase, f"phase {phase} is not under way"
        try:
            return self._future.result()
        finally:
            self.close()

    def close(self) -> None:
        """Forget what is under way."""
        self._phase, self._future = None, None


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 (raised again by take)
        future.set_exception(error)


# -- the source of steps

SMALLER = "set a smaller rollout.local.sequences or rollout.local.prefill_tokens"
"""What helps where generating runs out of memory."""


class Crew(NamedTuple):
    """What a method that generates works with, once there is a model."""

    trainer: Trainer
    roles: Sequence[Role]
    """Models whose word is part of what a roll-out is worth: a reference that a penalty in the reward is taken from."""
    open_roller: Callable[[], Roller]
    """Makes engine and rewards ready, when they are first needed."""


class KeptState(TypedDict):
    """A ``State`` as JSON-able values."""

    replayed: list[Annotated[tuple[int, KeptTree], BeforeValidator(as_tuple)]]
    credit: Any
    guard: GuardState


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
    """What Online remembers."""

    phase: KeptPhase | None


class State(NamedTuple):
    """What the steps to come need of those before, beside the phase they train on."""

    replayed: list[TrainSample]
    """Trees that may be trained on again, each with the version of the oldest weights it was drawn from."""
    credit: Any
    guard: dict[str, Any]

    def encoded(self) -> dict[str, Any]:
        """As JSON-able values."""
        replayed = [[sample.version, encoded(sample.tree)] for sample in self.replayed]
        return {"replayed": replayed, "credit": self.credit, "guard": self.guard}

    @classmethod
    def decoded(cls, kept: Mapping[str, Any], image_store: ImageStore | None) -> State:
        """What was ``encoded``."""
        replayed = [
            TrainSample(version, decoded(tree, image_store)) for version, tree in kept["replayed"]
        ]
        return cls(replayed, kept["credit"], kept["guard"])


@dataclass(frozen=True, eq=False)
class Phase:
    """A roll-out that is being trained on."""

    number: int
    trees: Sequence[Tree]
    told: Sequence[tuple[str, dict[str, Any]]] = ()
    """The events of it, by kind."""
    before: State | None = None
    """What there was when it was drawn; None: some of it is trained on."""


@dataclass(eq=False)
class Online:
    """Which trees each step trains on."""

    config: RolloutConfig
    prompts: PromptSet
    order: Order
    """Of prompts: a step of it is a phase."""
    credit: Credit
    guard: Guard
    seed: int
    phase: Phase | None = None
    replayed: list[TrainSample] = field(default_factory=list)
    _crew: Crew | None = None
    _opened: Roller | None = None
    _ahead: Ahead[Rollout] | None = None
    _taken: tuple[int, Rollout] | None = None
    """The number of a phase that is being made, and its roll-out: a step begun again does not draw it anew."""
    _untold: Sequence[tuple[str, dict[str, Any]]] = ()
    """What is to be told of a phase that came from a checkpoint."""

    def join(self, crew: Crew) -> None:
        """Take what there is to work with."""
        self._crew = crew

    @property
    def loss(self) -> Loss:
        """What is minimised."""
        return self.credit.loss

    @property
    def crew(self) -> Crew:
        assert self._crew is not None, "roll-outs need a model: build hands the method its crew"
        return self._crew

    @cached_property
    def roller(self) -> Roller:
        """Engine and rewards, ready."""
        self._opened = self.crew.open_roller()
        return self._opened

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1); the first of a phase rolls out. An empty list where no completion
        of the phase has a reward and nothing is replayed: the loop skips the step.
        """
        number, update = divmod(step - 1, self.config.updates)
        if self.phase is None or self.phase.number != number:
            self.phase = self._rolled_out(number, step)
        for kind, fields in self._untold:  # a resume takes back what is told of steps to come
            self.crew.trainer.emit(kind, **fields)
        self._untold = ()
        return numbered(self._part(self.phase, update))

    def observed(self, step: int) -> list[Tree] | None:
        """Statistics of a step are taken over the step."""
        return None

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """The same."""
        return None

    def cursor(self, step: int) -> Cursor:
        """How many prompts had been asked after a step, those of dynamic_sampling_rounds not counted."""
        phases = -(-step // self.config.updates)
        return Cursor(step, self.order.cursor(phases).samples)

    def open(self) -> Sequence[Decision]:
        """Open engine, rewards and environment."""
        return self.roller.settled

    @property
    def state(self) -> Online:
        """Itself: trees that are not used up, groups to be replayed, and what controllers have learned."""
        return self

    def close(self) -> None:
        """End what generates and judges."""
        if self._ahead is not None:
            self._ahead.close()
        if self._opened is not None:
            self._opened.close()

    # -- a phase

    def _rolled_out(self, number: int, step: int) -> Phase:
        """Roll out, score, credit. Nothing that is remembered changes before all of it is done."""
        trainer, version, before = self.crew.trainer, step - 1, self._state
        told: list[tuple[str, dict[str, Any]]] = []

        def tell(kind: str, **fields: Any) -> None:
            told.append((kind, fields))
            trainer.emit(kind, **fields)

        if self._taken is None or self._taken[0] != number:
            draw = partial(self._rolled, number, version)
            if self.config.engine == "local":
                draw = partial(require_room, draw, f"the roll-out of step {step}", SMALLER)
            with trainer.interrupts.at_once(trainer.ranks):
                self._taken = number, draw()
        rolled = self._taken[1]
        self.guard.require_rewards([*rolled.groups, *rolled.left_out], step)
        paths = judged_trajectories(rolled.groups, number)
        began = time.perf_counter()
        if paths:
            trees = self.credit.bare(paths)
            said = scored(trainer, trees, self.credit.asked, self.crew.roles, step)
        seconds = time.perf_counter() - began
        given = self.credit.trees(paths, said) if paths else Credited([], [], {}, {})
        fields = metrics.fields(rolled, paths, given, version, self.config)
        replayed = [sample for sample in self.replayed if self._is_young(sample.version, version)]
        event = {"step": step, **fields}
        event |= {"num_replayed": len(replayed), "seconds_scoring": seconds}
        event |= metrics.push(self.roller.engine)
        tell("rollout", **event)
        self.guard.look(step, fields, tell)
        if paths:
            self.credit.learn(given)
        self.replayed = [*given.with_signal, *replayed][: self.config.replay_groups]
        self._taken = None
        return Phase(number, [*given.trees, *(sample.tree for sample in replayed)], told, before)

    def _is_young(self, drawn_at: int, version: int) -> bool:
        most = self.config.max_staleness
        return most is None or version + self.config.updates - 1 - drawn_at <= most

    def _rolled(self, number: int, version: int) -> Rollout:
        """The roll-out of a phase, generated with the weights of now, or ahead of time; and the next begun."""
        if not self.config.asynchronous:
            self._update(version)
            return self.roller.roll(number, self._indices(number))
        generator = self._generator
        # Nothing was generated ahead at the start, and after a resume.
        is_first = generator.started != number
        if is_first:
            self._update(version)
            generator.start(number, self._generate(number))
        rolled = generator.take(number)
        if not is_first:
            self._update(version)
        if (number + 1) * self.config.updates < self.crew.trainer.num_steps:
            generator.start(number + 1, self._generate(number + 1))
        return rolled

    @cached_property
    def _generator(self) -> Ahead[Rollout]:
        self._ahead = Ahead()
        return self._ahead

    def _generate(self, number: int) -> Callable[[], Rollout]:
        return partial(self.roller.roll, number, self._indices(number))

    def _update(self, version: int) -> None:
        with self.crew.trainer.interrupts.held():  # half of the weights would be nobody's
            self.roller.engine.update(version)

    def _indices(self, number: int) -> list[int]:
        return self.order.step(number + 1)

    def _part(self, phase: Phase, update: int) -> list[Tree]:
        """The trees of one update; each pass over the phase deals them out anew."""
        count, trees = self.config.minibatches, phase.trees
        if count == 1 or not trees:
            return list(trees)
        epoch, part = divmod(update, count)
        order = np.random.default_rng([self.seed, phase.number, epoch, 2]).permutation(len(trees))
        if len(trees) < count:
            return [trees[order[part % len(trees)]]]
        return [trees[index] for index in np.array_split(order, count)[part]]

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
        """What the steps to come need of those before."""
        return {"phase": self._open_phase(), **self._state.encoded()}

    def _open_phase(self) -> list[Any] | None:
        """The phase that steps to come train on; if none has yet, what was told of it and what was before it."""
        phase, (number, update) = self.phase, divmod(self.crew.trainer.done, self.config.updates)
        if phase is None or phase.number != number:
            return None
        held = [encoded(tree) for tree in phase.trees]
        if update or phase.before is None:
            return [number, held, [], None]
        return [number, held, to_json(list(phase.told)), phase.before.encoded()]

    def recall(self, remembered: dict[str, Any]) -> None:
        image_store = self.prompts.image_store
        if remembered["phase"] is not None:
            number, held, self._untold, before = remembered["phase"]
            state = None if before is None else State.decoded(before, image_store)
            self.phase = Phase(
                number, [decoded(tree, image_store) for tree in held], self._untold, state
            )
        self._take_back(State.decoded(remembered, image_store))

    def reject(self) -> None:
        """Forget the phase if no step has trained on it: what stopped the run may be its fault, and a resume is to draw
        it anew.
        """
        phase, done = self.phase, self.crew.trainer.done
        if phase is None or phase.before is None or phase.number * self.config.updates != done:
            return
        self.phase = None
        self._take_back(phase.before)

    @property
    def _state(self) -> State:
        return State(self.replayed, self.credit.remember(), self.guard.remember())

    def _take_back(self, state: State) -> None:
        self.replayed = state.replayed
        self.credit.recall(state.credit)
        self.guard.recall(state.guard)


def numbered(trees: Sequence[Tree]) -> list[Tree]:
    """The trees of a step; what is compared inside one has the tree's number as its group."""
    return [
        replace(tree, samples=tuple(replace(one, group=number) for one in tree.samples))
        if tree.is_atom
        else tree
        for number, tree in enumerate(trees)
    ]
