"""Hooks: objects of the user that see a run and may end it, named by ``hooks=["FILE.py:Class", ...]``.

    class Class:
        def __init__(self, out, settings): ...      # optional: once, before models are loaded
        def __call__(self, event): ...              # every event; returns None to go on, or a reason to end the run
        def state_dict(self): ...                   # optional: values of JSON, kept in every checkpoint
        def load_state_dict(self, state): ...       # those of the checkpoint that a run resumes from

``__init__`` gets those of these arguments that it names: ``out`` (the run's directory, a Path) and ``settings`` (the
run's configuration by dotted key). A function of an event is a hook too. Events are those of events.jsonl, each a copy.
A run that a hook ends is finished as after its last step: the evaluations and the checkpoint of the step are made, and
the model is saved. The reason is part of the checkpoint, so a resume ends there, too.

A hook changes no numbers: it gets no tensors, and the random generators are set back after each call. It runs in the
first rank alone; all ranks learn after each step what it wants. An exception ends the run, with the hook's line; one in
the event ``end``, when the model is saved, is a warning.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import TypedDict

from taut.config import home_path
from taut.errors import UserCodeError, redacted_in
from taut.io.user_code import UserCode, read_user_code
from taut.train import random_state
from taut.train.distributed import Ranks
from taut.train.log.events import Event, ReportLost
from taut.train.run_dir import dotted


class HooksState(TypedDict):
    """The state of hooks in a checkpoint."""

    all: list[str]
    why_over: str | None
    states: dict[str, Any]
    """By the hook as the configuration names it."""


@dataclass
class Hooks:
    """The hooks of a run: a sink of its log, and a part of its checkpoints. Only the writer has objects."""

    remembered: ClassVar[Any] = HooksState
    all: Sequence[str]
    """As the configuration names them."""
    ranks: Ranks
    why_over: str | None = None
    """Why the run ends, the same on all ranks; None if it goes on."""
    codes: dict[str, UserCode] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    _asked: str | None = None
    """Why a hook has asked for the end, on the writer."""
    _failure: UserCodeError | None = None

    def __call__(self, event: Event) -> None:
        """Give an event to every hook. An exception is kept for ``agree``, since other ranks do not come here."""
        try:
            for spec, found in self.objects.items() if self._failure is None else ():
                answer = self._call(spec, found, copy.deepcopy(event))
                if not isinstance(answer, str | None):
                    raise UserCodeError(
                        f"hooks has {spec}, which returned {answer!r:.60}; expected None, or the reason to end the run"
                    )
                if answer is not None and self._asked is None:
                    self._asked = f"the hook {spec}: {answer}"
        except UserCodeError as error:
            if event["kind"] == "end":
                raise ReportLost(f"{error}; the model is saved") from error
            self._failure = error

    def agree(self, step: int = 0) -> None:
        """Learn on every rank whether the run goes on. Raises what a hook has raised since the last call."""
        if self.all:
            self.why_over = self.ranks.agree(self._failure or self._asked)[0]

    def close(self) -> None:
        """Nothing to close: the event ``end`` is the last."""

    def remember(self) -> HooksState:
        def state_of(spec: str) -> Any:
            return json.loads(json.dumps(self.objects[spec].state_dict(), allow_nan=False))

        def states() -> dict[str, Any]:
            own = [spec for spec, found in self.objects.items() if hasattr(found, "state_dict")]
            return {spec: self._call(spec, state_of, spec) for spec in own}

        kept = self.ranks.run_on_writer(states)
        return {"all": [*self.all], "why_over": self.why_over, "states": kept}

    def recall(self, remembered: HooksState) -> None:
        """Restore the state of hooks that had one, and where all hooks are the same the reason to end."""

        def restore() -> None:
            for spec, state in remembered["states"].items():
                if spec in self.objects:
                    self._call(spec, self.objects[spec].load_state_dict, state)

        self.ranks.run_on_writer(restore)
        if remembered["all"] == self.all:
            self.why_over = self._asked = remembered["why_over"]

    def _call(self, spec: str, function: Callable[..., Any], *values: Any) -> Any:
        with random_state.kept(self.ranks.device):
            return self.codes[spec].call("a hook", function, *values)


def open_hooks(specs: Sequence[str], ranks: Ranks, out: Path, config: Mapping[str, Any]) -> Hooks:
    """Read the files of ``hooks`` and make the objects. Raises TautError on all ranks."""
    hooks = Hooks(list(specs), ranks)

    def make() -> None:
        values = {"out": out, "settings": redacted_in(dict(dotted(config)))}
        for spec in specs:
            path = home_path(spec.rpartition(":")[0])
            code = hooks.codes[spec] = read_user_code(spec, path, f"hooks has {spec}", "class")
            found = code.load()
            if isinstance(found, type):
                names = inspect.signature(found).parameters.keys() & values
                found = code.call("a hook", found, **{name: values[name] for name in names})
            hooks.objects[spec] = found

    with random_state.kept(ranks.device):
        ranks.run_on_writer(make)
    return hooks
