"""The console report of a run: decisions, progress, warnings, and a summary.

On a terminal progress is a bar that is redrawn, in a notebook a line that is replaced, elsewhere a line every ``every``
steps. Tokens per second count the samples as the user wrote them (a shared prefix counts once per sample); the share of
tokens saved is a separate number.
"""

from __future__ import annotations

import resource
import shlex
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn
from rich.text import Text

from taut.io import allocator, progress
from taut.io.console import Printer, counted, one_line
from taut.io.notebook import ProgressLine
from taut.io.terminal import Terminal
from taut.train.log.events import Event, ReportLost, with_intervals

BAR = 10
"""Columns of the progress bar."""

RECENT = 20
"""Recent steps whose duration predicts the remaining time."""

LONG = 2.0
"""Seconds after which the bar of steps says what is done, in place of the last step."""

LINES_SHOWN = 5
"""Dropped or cut samples listed at the start; events.jsonl has all."""

EVIDENCE_SHOWN = 3
"""Examples of a check's warning listed at the start."""

STYLES = {"passed": "green", "warning": "yellow", "failed": "red", "skipped": "yellow"}

COUNTED = ("loss", "seconds", "num_tokens", "num_tokens_unshared", "num_targets")
"""Fields of each step that the summary uses."""

ROLLED = (
    *(
        "reward",
        "rewarded",
        "completions",
        "groups_with_signal",
        "groups",
        "stopped",
        "tokens_mean",
    ),
    *("turns_mean", "calls", "kl"),
)
"""Fields of a rollout from which a line is made."""

POLICY_GRADIENT = "advantage/size"
"""Field of steps with a policy gradient, whose loss is not shown: it is near 0 whatever is learned."""

UPDATED = ("kl", "old/kl", "clip/low", "clip/high", "entropy", "entropy_estimate", POLICY_GRADIENT)
"""Fields of a step that trains on rollouts, from which a line is made."""

LISTED = ("loss", "eval_loss", "model", "divergence", "learned_nothing", "ended_early", "reason")
"""Fields of the last event that the summary shows, and the reason of an early end, which the command prints."""

WIDTH = 60
"""Characters shown of an answer and of the expected one."""

NOT_OF_A_STEP = ("best", "checkpoint", "data", "record")
"""Warnings that are not about the samples of a step."""

NOT_SHOWN = ("kind", "time", "step")

HEADLINES = (
    "rewards/accuracy",
    "rewards/margin",
    "z0",
    "accuracy",
    "score/margin",
    "score/error",
    "divergence",
)
"""Metrics shown next to the loss in a step's line and in the summary."""


class Part(NamedTuple):
    """A part of a step's line."""

    text: str
    rank: int
    """In a line that is too long, parts with the highest rank are left out first."""


class ConsoleReport:
    """The sink that prints."""

    def __init__(
        self, every: int = 1, console: Console | None = None, out: Path | None = None
    ) -> None:
        """``out``: the run's directory, for the commands that show more of a step."""
        self._printer = Printer.on(sys.stdout)
        self._notebook = ProgressLine.of_notebook() if console is None else None
        self._console = console or Terminal(file=cast(TextIO, self._printer), soft_wrap=True)
        self._every, self._out = every, out
        self._named: set[object] = set()
        """Names of warnings after which a command that shows the step was named."""
        self._num_steps: int | None = None
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._ended = self._between = self._evaluating = 0.0
        """When the last step ended; seconds between steps so far, and of the last evaluation."""
        self._num_taken = 0
        self._steps: list[Event] = []
        self._evals: list[Event] = []
        self._best: Event | None = None
        self._rollouts: list[Event] = []
        self._start_checks: list[Event] = []
        self._decided: set[tuple[str, ...]] = set()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        if event["kind"] == "check" and event.get("part"):
            self._start_checks.append(event)
            return
        self._show_start_checks()
        getattr(self, f"_show_{event['kind']}")(event)
        if self._printer.failure is not None:
            why = self._printer.failure.strerror
            raise ReportLost(f"stdout cannot be written: {why}; nothing more is printed")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._notebook is not None:
            self._notebook.close()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(one_line(text), style=style))

    def _print_rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows of text with aligned columns."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            self._print("  ".join(cells).rstrip())

    def show_decisions(self, decisions: Iterable[Sequence[str]]) -> None:
        """Print the decisions that are not printed yet: many are known long before the event ``start``."""
        if new := [row for row in map(tuple, decisions) if row not in self._decided]:
            self._decided.update(new)
            self._print_rows(new)

    def _show_start(self, event: Event) -> None:
        self._num_steps = event.get("num_steps")
        self.show_decisions(event.get("decisions", ()))
        if event.get("model"):
            trained, total = event.get("num_trained"), event.get("num_parameters")
            size = ""
            if trained and total:
                part = "all" if trained == total else f"{trained:,} ({trained / total:.2%})"
                size = f": {total:,} parameters, {part} trained"
            self._print(f"model  {event['model']}{size}")
        if event.get("data"):
            self._print(f"data  {event['data']}")
        for what in ("dropped", "cut"):
            lines = event.get(what, ())
            for line in lines[:LINES_SHOWN]:
                self._print(f"{what}  {line}", "yellow")
            if len(lines) > LINES_SHOWN:
                more = f"and {len(lines) - LINES_SHOWN:,} more: see events.jsonl"
                self._print(f"{what}  {more}", "yellow")

    def _show_step(self, event: Event) -> None:
        self._note_time(event)
        if not event.get("skipped"):
            shown = {key: event[key] for key in UPDATED if key in event}
            self._steps.append({key: event[key] for key in COUNTED} | shown)
        step, left = event["step"], None
        if self._num_steps is not None:
            a_step = statistics.fmean(self._seconds) + self._between / self._num_taken
            seconds = a_step * (self._num_steps - step) + self._evaluating
            left = timedelta(seconds=round(seconds))
        parts = step_parts(event, left, self._rollouts)
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        if self._notebook is not None:
            self._notebook.show(f"step {step}{total}  {line_of(parts)}", step, self._num_steps)
        elif self._console.is_terminal:
            self._draw(step, parts)
        elif step % self._every == 0 or step == self._num_steps or len(self._steps) == 1:
            self._print(f"step {step}{total}  {line_of(parts)}")

    def _note_time(self, event: Event) -> None:
        """Note how long a step took, and what came before it: evaluations and checkpoints are waited for, too."""
        self._seconds.append(event["seconds"])
        if self._num_taken:
            self._between += max(event["time"] - event["seconds"] - self._ended, 0.0)
        self._num_taken, self._ended = self._num_taken + 1, event["time"]

    def _draw(self, step: int, parts: Sequence[Part]) -> None:
        """Redraw the progress bar, which begins at the first step."""
        if self._progress is None:
            columns = (
                BarColumn(BAR),
                MofNCompleteColumn(),
                _StepOrPhase("{task.description}", markup=False),
            )
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("", total=self._num_steps)
            self._progress.start()
        assert self._task is not None
        count = len(f"{self._num_steps}/{self._num_steps}")
        text = line_of(parts, self._console.width - BAR - count - 2)
        self._progress.update(self._task, completed=step, description=text)

    def _show_rollout(self, event: Event) -> None:
        """Keep a rollout for the lines of the steps that train on it."""
        self._rollouts.append({key: event[key] for key in ROLLED if key in event})

    def _show_start_checks(self) -> None:
        """Show the checks before training, none of which failed: each warning, and the number of the others."""
        if not self._start_checks:
            return
        number = Counter(event["outcome"] for event in self._start_checks)
        seconds = sum(event["seconds"] for event in self._start_checks)
        counted = f"{number['passed']} passed, {number['skipped']} skipped in {seconds:.1f} s"
        self._print(f"checks  {counted}", STYLES["passed"])
        if left_out := [event["name"] for event in self._start_checks if event.get("left_out")]:
            text = f"checks  left out by name (checks.skip): {', '.join(left_out)}"
            self._print(text, STYLES["warning"])
        for event in self._start_checks:
            if event["outcome"] == "warning":
                evidence = "; ".join(event["evidence"][:EVIDENCE_SHOWN])
                text = f"{event['detail']}{f' ({evidence})' if evidence else ''}; {event['remedy']}"
                self._print(f"warning {event['name']}: {text}", STYLES["warning"])
        self._start_checks = []

    def _show_check(self, event: Event) -> None:
        outcome = event.get("outcome", "")
        value = "" if event.get("value") is None else f" {number(event['value'])}"
        detail = f"  ({event['detail']})" if event.get("detail") else ""
        self._print(
            f"check {event.get('name', '')}: {outcome}{value}{detail}", STYLES.get(outcome, "")
        )

    def _show_eval(self, event: Event) -> None:
        self._evals.append(event)
        if self._num_taken:  # one more comes at the end
            self._evaluating = max(event["time"] - self._ended, 0.0)
        fields = {
            name: value if low is None else f"{number(value)} [{number(low)}, {number(high)}]"
            for name, (value, low, high) in with_intervals(event).items()
        }
        self._print(f"eval  after step {event['step']}: {fields_text(fields)}")
        for sample in event.get("samples", ()):
            mark = {"stop": "", "length": " (cut)"}.get(sample["finish_reason"], " (failed)")
            answer = " ".join(sample["text"].split())[:WIDTH]
            wanted = " | ".join(sample["references"])[:WIDTH]
            self._print(f"      {answer!r}{mark}  for {wanted!r}  ({sample['place']})")

    def _show_best(self, event: Event) -> None:
        self._best = event
        measured_text = f"{event['name']} {number(event['value'])} after step {event['step']}"
        self._print(f"best  {measured_text}: {event.get('path', '')}")

    def _show_warning(self, event: Event) -> None:
        at = f" at step {event['step']}" if "step" in event else ""
        name = event.get("name", "")
        self._print(f"warning{at}: {event.get('detail') or name}", "yellow")
        if self._out is None or not at or name in NOT_OF_A_STEP or name in self._named:
            return
        self._named.add(name)
        out, step = shlex.quote(str(self._out)), event["step"]
        place = f"#/run/{quote(self._out.resolve().name, safe='')}/samples?step={step}"
        self._print(f"look  taut show --step {step} {out}, or taut page {out} and {place}", "dim")

    def _show_budget(self, event: Event) -> None:
        cut = f"{event['tokens_before']:,} to {event['tokens']:,} tokens a micro-batch"
        self._print(f"budget  from step {event['step']}: {cut}: {event['reason']}", "yellow")

    def _show_utilization(self, event: Event) -> None:
        """Show nothing: these numbers are for curves."""

    def _show_checkpoint(self, event: Event) -> None:
        self._print(f"checkpoint of step {event['step']}: {event.get('path', '')}")

    def _show_resume(self, event: Event) -> None:
        if event["from_step"]:
            self._print(f"resumed after step {event['from_step']}")
        else:
            self._print("resume: no checkpoint in out; from the start")

    def _show_end(self, event: Event) -> None:
        self.close()
        rows = summary(self._steps, self._evals, self._rollouts) if self._steps else []
        if event.get("ended_early"):
            rows.append(("ended", f"after step {event['step']}: {event['ended_early']}"))
        if event.get("divergence"):
            rows.append(("divergence", f"may have diverged: {event['divergence']}"))
        if event.get("learned_nothing"):
            rows.append(("learned", f"nothing: {event['learned_nothing']}"))
        if stop := event.get("stop"):  # a warning event has the details
            wanted = "" if stop["cause"] is None else f", expected {stop['wanted']:.0%}"
            text = f"{stop['ended']} of {stop['asked']} answers ended by themselves{wanted}"
            rows.append(("stops", text))
        if event.get("model"):
            rows.append(("model", event["model"]))
        if self._best is not None:
            step, value = self._best["step"], number(self._best["value"])
            text = f"{self._best['path']}: {self._best['name']} {value} after step {step}"
            if event.get("model"):
                same = step == event.get("step")
                text += f"; {Path(event['model']).name}/ is {'it' if same else 'the last one'}"
            rows.append(("best", text))
        if rows:
            self._print_rows(rows)
        rest = fields_text({key: event[key] for key in event if key not in LISTED})
        if rest:
            self._print(rest)


class _StepOrPhase(TextColumn):
    """The last step; in its place what is done now, if that takes longer than ``LONG`` seconds."""

    def render(self, task: Task) -> Text:
        phase = progress.current()
        # one that began before the bar is of something else
        if phase is None or phase.seconds > (task.elapsed or 0.0):
            return super().render(task)
        # after the last step every phase is worth a word: evaluation, the stop check, saving
        if phase.seconds < LONG and not task.finished:
            return super().render(task)
        return Text(one_line(phase.line()), no_wrap=True, overflow="ellipsis")


class Shown(NamedTuple):
    """How a line and the summary show a number of a rollout, or of a step that trains on rollouts."""

    rank: int
    """The rank of its ``Part``."""
    form: str
    """Format in a line; the summary takes the number's part of it."""


SHOWN = {
    "signal": Shown(4, "signal {:.0%}"),
    "length": Shown(6, "{:.0f} tokens"),
    "ends": Shown(5, "ends {:.0%}"),
    "turns": Shown(8, "{:.1f} turns"),
    "calls": Shown(8, "{:.1f} calls"),
    "kl": Shown(6, "kl {:.3g}"),
    "old/kl": Shown(6, "old/kl {:.3g}"),
    "clip": Shown(7, "clip {:.1%}"),
    "entropy": Shown(7, "entropy {:.3g}"),
}
"""In the order of a line."""


def of_rollout(rollout: Event) -> dict[str, float]:
    """Numbers shown of a rollout beside its reward: shares of its prompts, and means over its answers."""
    found = {}
    if rollout.get("groups") and "groups_with_signal" in rollout:
        found["signal"] = rollout["groups_with_signal"] / rollout["groups"]
    if "stopped" in rollout:
        found |= {"length": rollout["tokens_mean"], "ends": rollout["stopped"]}
    if "turns_mean" in rollout:
        found |= {
            "turns": rollout["turns_mean"],
            "calls": rollout["calls"] / rollout["completions"],
        }
    return found


def of_update(step: Event, rollout: Event) -> dict[str, float]:
    """Numbers shown of a step that trains on a rollout: the KL to the reference, or else to the policy at the time of
    the rollout; the share of tokens whose ratio is clipped; the entropy.
    """
    found = {}
    if (divergence := step.get("kl", rollout.get("kl"))) is not None:
        found["kl"] = divergence
    elif "old/kl" in step:
        found["old/kl"] = step["old/kl"]
    if "clip/low" in step or "clip/high" in step:
        found["clip"] = step.get("clip/low", 0.0) + step.get("clip/high", 0.0)
    if (entropy := step.get("entropy", step.get("entropy_estimate"))) is not None:
        found["entropy"] = entropy
    return found


def step_parts(event: Event, left: timedelta | None, rollouts: Sequence[Event]) -> list[Part]:
    """The parts of a step's line, in order. The step trains on the last of ``rollouts``."""
    parts = []
    rollout = rollouts[-1] if rollouts else {}
    has_loss = POLICY_GRADIENT not in event
    if "reward" in rollout:
        is_complete = rollout.get("rewarded") == rollout.get("completions")
        of = "" if is_complete else f" ({rollout['rewarded']} of {rollout['completions']})"
        parts.append(Part(f"reward {rollout['reward']:.3f}{of}", 2 if has_loss else 0))
    parts += [Part(SHOWN[k].form.format(v), SHOWN[k].rank) for k, v in of_rollout(rollout).items()]
    if event.get("skipped"):
        return [*parts, Part("skipped: no completion has a reward", 0)]
    # what was learned
    speed = event["num_tokens_unshared"] / max(event["seconds"], 1e-9)
    if has_loss:
        parts.append(Part(f"loss {event['loss']:.4f}", 0))
    parts += [
        Part(f"{key.split('/')[-1]} {event[key]:.3g}", 3) for key in HEADLINES if key in event
    ]
    if rollout:
        update = of_update(event, rollout)
        parts += [Part(SHOWN[k].form.format(v), SHOWN[k].rank) for k, v in update.items()]
    # how the step went: gradient, speed, time left, memory
    parts += [
        Part(f"grad {event['grad_norm']:.3g}", 9),
        Part(f"lr {event['learning_rate']:.2e}", 11),
        Part(f"{speed:,.0f} tok/s", 10),
    ]
    if left is not None:
        parts.append(Part(f"{left} left", 1))
    if event["num_tokens"] < event["num_tokens_unshared"]:
        shared = not_computed(event["num_tokens"], event["num_tokens_unshared"])
        parts.append(Part(f"{shared} of tokens shared", 12))
    peak, now = event.get("memory_bytes"), None  # of a GPU
    if not peak:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        now = allocator.resident_bytes()
    present = "" if now is None else f"{now / 1e9:.1f} GB, "
    return [*parts, Part(f"{present}peak {peak / 1e9:.1f} GB", 13)]


def line_of(parts: Sequence[Part], width: int | None = None) -> str:
    """The parts in one line; the least important are left out until it fits into ``width`` columns."""
    kept = list(parts)
    line = "  ".join(part.text for part in kept)
    while width is not None and len(kept) > 1 and len(line) > width:
        kept.remove(max(kept, key=lambda part: part.rank))
        line = "  ".join(part.text for part in kept)
    return line


def not_computed(num_tokens: int, num_tokens_unshared: int) -> str:
    """The percentage of tokens in shared prefixes, which are computed once."""
    return f"{1 - num_tokens / num_tokens_unshared:.0%}"


def number(value: Any) -> str:
    """A value as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def fields_text(event: Event) -> str:
    """The fields of an event that have no column of their own, in one line."""
    return "  ".join(
        f"{key} {number(value)}"
        for key, value in event.items()
        if key not in NOT_SHOWN and value is not None and not isinstance(value, list | tuple | dict)
    )


def summary(
    steps: Sequence[Event], evals: Sequence[Event], rollouts: Sequence[Event]
) -> list[tuple[str, str]]:
    """The rows of the summary."""
    seconds, computed, unshared, targets = (
        sum(step[key] for step in steps)
        for key in ("seconds", "num_tokens", "num_tokens_unshared", "num_targets")
    )
    # steps, loss and rollouts
    speed = unshared / max(seconds, 1e-9)
    rows = [("steps", f"{len(steps):,} in {timedelta(seconds=round(seconds))}")]
    if POLICY_GRADIENT not in steps[-1]:
        losses = steps[0]["loss"], steps[-1]["loss"]
        rows.append(("loss", f"{losses[0]:.4f} at the first step, {losses[1]:.4f} at the last"))
    if rollouts:
        rewards = [rollout["reward"] for rollout in rollouts if "reward" in rollout]
        if rewards:
            rows.append(("reward", f"{rewards[0]:.4f} at first, {rewards[-1]:.4f} at last"))
        rows.append(("rollouts", f"{len(rollouts):,}"))
        seen = [of_rollout(rollout) for rollout in rollouts]
        seen += [of_update(step, {}) for step in steps]
        for name, how in SHOWN.items():
            if values := [numbers[name] for numbers in seen if name in numbers]:
                form = next(word for word in how.form.split() if word.startswith("{"))
                change = f"{form.format(values[0])} at first, {form.format(values[-1])} at last"
                rows.append((name, change))
    # evaluations
    names: dict[str, None] = {}
    for event in evals:
        has_interval = [key for key in event if f"{key}_low" in event]
        shown = ("loss", *HEADLINES, *has_interval, "stopped")
        names |= dict.fromkeys(key for key in shown if key in event)
    for name in names:
        values = [event[name] for event in evals if event.get(name) is not None]
        title = "held-out loss" if name == "loss" else f"held-out {name}"
        rows.append((title, " -> ".join(f"{value:.4f}" for value in values)))
    # tokens
    target_text = f" ({counted(targets, 'targets')})" if targets else ""
    rows.append(("tokens", f"{unshared:,}{target_text}, {speed:,.0f} a second"))
    if computed < unshared:
        saved = not_computed(computed, unshared)
        rows.append(("computed", f"{computed:,}: {saved} of tokens are in shared prefixes"))
    return rows
