"""Questions about runs, and their answers as JSON values.

    runs = Answers(find_runs([Path("runs")]))
    runs.answer("runs")
    runs.answer("run/grpo/rollouts?step=12")

A question is a path with parameters; docs/runs.md lists them. A run has the name that ``find_runs`` gives it: no part
of a question is ever a path on the disk. Every answer is bounded: ``num_left`` counts the entries that a list leaves
out.

Several threads may ask; of each run one question at a time is answered. Raises Unknown for a run, step, sample, group
or question that does not exist, and other TautErrors where a file of the run cannot be read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote

from taut.errors import DataError, OutputError, TautError, redacted_in
from taut.io import files
from taut.run.recorded import Recorded, Row, answer_text, prompt_text, why_unlearned
from taut.run.states import RunState, differing, find, settings_in_words, state_of
from taut.train.log.events import NOT_CURVES, Event, to_json, with_intervals
from taut.train.run_dir import ADAPTER, BEST, EVENTS, MODEL, read_resolved
from taut_tools.page.curves import bucketed
from taut_tools.page.history import History

Answer = dict[str, Any]

POINTS, MOST_POINTS = 1000, 5000
"""Default and maximum points of a curve."""
MOST_CURVES, MOST_NAMES = 64, 2000
"""Maximum curves of an answer, and names in a list of curves."""
MOST_ALARMS, MOST_EVALS, MOST_PLACES, MOST_SAMPLES, MOST_STEPS = 500, 2000, 200, 1000, 50
"""Maximum entries in a list of alarms, evaluations, dropped or cut rows, samples, or steps of a prompt."""
PROMPT_SHOWN, TEXT_SHOWN = 200, 500
"""Maximum characters of a prompt in a list of groups, and of an answer in a list of steps."""
REPEATS = "data.repeats"
"""Check that is shown as duplicates."""
CONTRACT = "contract.json"
"""File in a model's directory (taut/evals/contract.py)."""

HEADLINES = (
    *("train/rewards/accuracy", "train/rewards/margin", "train/accuracy", "train/score/margin"),
    *("train/divergence", "train/score/error", "rollout/groups_with_signal", "rollout/stopped"),
    *("rollout/tokens_mean", "train/old/kl_k1", "train/kl", "train/entropy"),
    *("train/entropy_estimate", "train/clip/high", "rollout/turns_mean", "rollout/calls"),
)
"""Curves that matter, in order, after the loss or the reward and the metrics of answers."""
COMMON = ("train/grad_norm", "train/learning_rate", "train/num_tokens")
"""Curves of every method, after ``HEADLINES``."""
NUM_HEADLINES = 8
OUTCOMES = ("failed", "warning", "passed", "skipped")
NO_METRIC = ("num_samples", "num_tokens", "num_prompts", "tokens_mean")
"""Fields of an evaluation that do not measure quality."""


class Unknown(OutputError):
    """A question without an answer."""


class Parameters:
    """The parameters of a question, decoded as they are read."""

    def __init__(self, query: str) -> None:
        pairs = (part.partition("=") for part in query.split("&") if part)
        self._raw = {name: value for name, _, value in pairs}

    def text(self, key: str) -> str:
        return unquote(self._raw.get(key, ""))

    def texts(self, key: str) -> list[str]:
        """The texts of a list, whose own commas are written as %2C."""
        return [unquote(part) for part in self._raw.get(key, "").split(",") if part]

    def number(self, key: str) -> int | None:
        if key not in self._raw:
            return None
        try:
            return int(self.text(key))
        except ValueError:
            raise Unknown(f"found {key}={self.text(key)[:40]!r}; expected an integer") from None


class Answers:
    """Answers to questions about runs. ``is_live``: whether runs may change."""

    def __init__(self, outs: Mapping[str, Path], *, is_live: bool = False) -> None:
        self.is_live = is_live
        self._runs: dict[str, Run] = {}
        self.use(outs)

    def use(self, outs: Mapping[str, Path]) -> None:
        """Answer questions about these runs from now on, given as name -> directory."""
        before = {run.out: run for run in self._runs.values()}
        self._runs = {name: before.get(out) or Run(name, out) for name, out in outs.items()}

    @property
    def runs(self) -> Mapping[str, Run]:
        return self._runs

    def read_ahead(self) -> None:
        """Read the events of the newest run, which is most of the work of the first question about it."""
        written: dict[float, Run] = {}
        for run in self._runs.values():
            with suppress(OSError):  # no events yet, or removed
                written[(run.out / EVENTS).stat().st_mtime] = run
        if written:
            run = written[max(written)]
            with run.lock, suppress(TautError):  # raised again for the first question
                _ = run.history

    def answer(self, question: str) -> Answer:
        """Answer a question, in JSON types."""
        path, _, query = question.partition("?")
        parameters = Parameters(query)
        if path == "runs":
            return self._list()
        if path == "compare":
            from taut_tools.page.compare import compare

            return _json(compare([self.run(name) for name in parameters.texts("runs")]))
        name, _, topic = path.removeprefix("run/").rpartition("/")
        if not path.startswith("run/") or topic not in TOPICS:
            raise Unknown(
                f"found the question {path[:80]!r}; expected runs, compare or run/NAME/{'|'.join(TOPICS)}"
            )
        run = self.run(unquote(name))
        with run.lock:
            return _json(TOPICS[topic](run, parameters))

    def run(self, name: str) -> Run:
        if name not in self._runs:
            known = ", ".join(list(self._runs)[:5])
            raise Unknown(
                f"found the run {name[:80]!r}; expected one of {len(self._runs)}, such as {known}"
            )
        return self._runs[name]

    def _list(self) -> Answer:
        states = {name: state_of(run.out) for name, run in self._runs.items()}
        differs = map(settings_in_words, differing(list(states.values())))
        listed = [
            {**listing(name, state), "differs": settings}
            for (name, state), settings in zip(states.items(), differs, strict=True)
        ]
        listed.sort(key=lambda entry: -entry["written"])
        return _json({"version": version("taut"), "is_live": self.is_live, "runs": listed})


class Run:
    """The records of a run that were read, and the lock that a question about it holds."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.lock = threading.Lock()

    @property
    def history(self) -> History:
        """The events of the run up to now."""
        if (self.out / EVENTS).exists():
            self._history.update()
        return self._history

    @cached_property
    def _history(self) -> History:
        return History(self.out)

    @cached_property
    def recorded(self) -> Recorded:
        return Recorded(self.out)

    @property
    def resolved(self) -> dict[str, Any]:
        found: dict[str, Any] = redacted_in(read_resolved(self.out))
        return found


def find_runs(places: Sequence[Path]) -> dict[str, Path]:
    """Find runs in directories, by names that stay as other runs appear: the path below the directory, after the name
    of the directory if there are several. A run that is given itself has its own name.
    """
    found: dict[str, Path] = {}
    for place in dict.fromkeys(place.resolve() for place in places):
        for out in find(place):
            below = out.relative_to(place).as_posix()
            name = (
                out.name if out == place else below if len(places) == 1 else f"{place.name}/{below}"
            )
            if found.get(name, out) != out:
                name = out.as_posix().strip("/")  # two directories of one name
            if out not in found.values():
                found[name] = out
    return found


def listing(name: str, state: RunState) -> Answer:
    """The entry of a run in a list."""
    return {
        "name": name,
        "out": str(state.out),
        "method": state.method,
        "state": state.state,
        "step": state.step,
        "num_steps": state.num_steps,
        "loss": state.loss if state.reward is None else None,
        "reward": state.reward,
        "held_out": state.held_out,
        "best": state.best,
        "seconds": state.seconds,
        "written": state.written,
        "reason": state.reason,
        "resumes_after": state.resumes_after,
    }


# -- events


def overview(run: Run, _: Parameters) -> Answer:
    history, state = run.history, state_of(run.out)
    evals = evaluations(history.kept["eval"])
    best = history.kept["best"]
    alarms = history.kept["warning"]
    decisions = [] if state.state == "damaged" else run.resolved.get("decisions", [])
    start = {
        k: v
        for k, v in history.start.items()
        if k not in ("kind", "decisions", "dropped", "cut", "sets")
    }
    return {
        **listing(run.name, state),
        "started": history.started,
        "start": start,
        "decisions": decisions,
        "headline": headline(history.curves),
        "curves": sorted(history.curves)[:MOST_NAMES],
        "num_unlisted": max(0, len(history.curves) - MOST_NAMES),
        "evals": evals[-MOST_EVALS:],
        "best": _fields(best[-1]) if best else None,
        "alarms": [alarm(event) for event in alarms[-MOST_ALARMS:]],
        "num_left": max(0, len(alarms) - MOST_ALARMS),
        "resumes": [_fields(event) for event in history.kept["resume"][-MOST_ALARMS:]],
        "end": None if history.end is None else _fields(history.end),
    }


def headline(curves: Collection[str]) -> list[str]:
    """The curves that matter most, in order; not the loss of a policy, which says nothing by itself."""
    measured = [name for name in curves if f"{name}_low" in curves]  # of answers, with an interval
    is_policy = any(name.startswith("rollout/") for name in curves)
    first = ("rollout/reward",) if is_policy else ("train/loss", "eval/loss")
    wanted = dict.fromkeys((*first, *measured, *HEADLINES, *COMMON))
    return [name for name in wanted if name in curves][:NUM_HEADLINES]


def evaluations(events: Sequence[Event]) -> list[Answer]:
    """Metrics of evaluations, with their intervals if there are any."""
    found = []
    for event in events:
        for name, (value, low, high) in with_intervals(event).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in NOT_CURVES and name not in NO_METRIC:
                found.append(
                    {"step": event["step"], "name": name, "value": value, "low": low, "high": high}
                )
    return found


def alarm(event: Event) -> Answer:
    """A warning, with the samples that it names."""
    ids = event.get("sample_ids", [])
    return {
        "step": event.get("step"),
        "name": event.get("name"),
        "detail": event.get("detail"),
        "sample_ids": ids[:MOST_SAMPLES],
        "time": event.get("time"),
    }


def curves(run: Run, parameters: Parameters) -> Answer:
    history = run.history
    known = history.curves
    names = parameters.texts("names") or sorted(known)
    missing = [name for name in names if name not in known]
    if missing:
        raise Unknown(
            f"{run.name} has no curve {missing[0][:80]!r}; expected one of its {len(known)} curves"
        )
    points = parameters.number("points") or POINTS
    chosen = {name: history.column(name) for name in names[:MOST_CURVES]}
    points = max(1, min(points, MOST_POINTS))
    return bucketed(chosen, points, parameters.number("from"), parameters.number("to"))


def checks(run: Run, _: Parameters) -> Answer:
    found = list(run.history.checks.values())
    names = ("name", "detail", "remedy", "evidence", "notes", "value", "unit", "seconds", "part")
    groups = [
        {
            "outcome": outcome,
            "checks": [
                {name: event.get(name) for name in names}
                for event in found
                if event.get("outcome") == outcome
            ],
        }
        for outcome in OUTCOMES
    ]
    return {"groups": groups}


# -- samples


def steps(run: Run, _: Parameters) -> Answer:
    recorded = run.recorded
    return {
        "steps": recorded.token_steps,
        "rollouts": recorded.rollout_steps,
        "last": run.history.last_step,
    }


def samples(run: Run, parameters: Parameters) -> Answer:
    history = run.history
    step = _step(run, parameters, run.recorded.token_steps or [history.last_step])
    event = history.step_event(step)
    if event is None:
        raise Unknown(
            f"{run.name} has no step {step}; expected one of its steps 1 to {history.last_step}"
        )
    why = {row["sample_id"]: row["why"] for row in run.recorded.tokens(step, ["sample_id", "why"])}
    ids = event.get("sample_ids", [])
    nll = event.get("sample_nll") or [None] * len(ids)
    listed = [
        {"id": i, "nll": value, "is_recorded": i in why, "why": why.get(i)}
        for i, value in zip(ids, nll, strict=False)
    ]
    # The highest loss comes first, and recorded samples stay in a long list.
    listed.sort(key=lambda sample: -_order(sample["nll"]))
    kept = listed[:MOST_SAMPLES] + [s for s in listed[MOST_SAMPLES:] if s["is_recorded"]]
    return {
        "step": step,
        "loss": event.get("loss"),
        "grad_norm": event.get("grad_norm"),
        "num_targets": event.get("num_targets"),
        "samples": kept,
        "num_left": len(listed) - len(kept),
    }


def sample(run: Run, parameters: Parameters) -> Answer:
    recorded = run.recorded
    step, wanted = _step(run, parameters, recorded.token_steps), parameters.text("id")
    row = next((row for row in recorded.tokens(step) if row["sample_id"] == wanted), None)
    if row is None:
        raise Unknown(
            f"{run.name} has no tokens of {wanted[:80]!r} at step {step}; expected a sample that is recorded there"
        )
    elsewhere = sorted(
        {
            at
            for table in recorded.token_tables
            for batch in table.read(["step", "sample_id"])
            for at, i in zip(batch["step"].to_pylist(), batch["sample_id"].to_pylist(), strict=True)
            if i == wanted
        }
    )
    return {
        "step": step,
        "id": wanted,
        "why": row["why"],
        "pieces": recorded.pieces(row["ids_T"]),
        "ids": row["ids_T"],
        "target_at": row["target_at_N"],
        "loss": None if row["logp_N"] is None else [-value for value in row["logp_N"]],
        "weight": row["weight_N"],
        "entropy": row["entropy_N"],
        "streams": dict(row["streams"]),
        "read_at": row["read_at_R"],
        "scalar": row["scalar_R"],
        "values": dict(row["values"]),
        "num_shared": row["num_shared"],
        "shared_with": row["shared_with"],
        "pictures": row["pictures"],
        "steps": elsewhere,
    }


# -- rollouts

OF_GROUPS = (
    "step",
    "group",
    "prompt_id",
    "prompt",
    "is_kept",
    "reward",
    "sampled_at_N",
    "finish_reason",
    "index",
    "sample_id",
    "rewards",
    "advantage_N",
)


def rollouts(run: Run, parameters: Parameters) -> Answer:
    step = _step(run, parameters, run.recorded.rollout_steps)
    rows = run.recorded.rollouts(step, OF_GROUPS)
    trained = _trained_on(run, step)
    found = groupby(rows, key=lambda row: row["group"])
    groups = [_listed(list(group), trained) for _, group in found]
    return {
        "step": step,
        "groups": groups[:MOST_SAMPLES],
        "num_left": max(0, len(groups) - MOST_SAMPLES),
    }


def _trained_on(run: Run, step: int) -> set[str] | None:
    """Ids of the samples of a step's rollout that were trained on, or None while no step has trained on it."""
    events = [run.history.step_event(number) for number in _steps_on(run, step)]
    known = [event for event in events if event is not None]
    return {name for event in known for name in event.get("sample_ids", ())} if known else None


def _steps_on(run: Run, step: int) -> range:
    """The steps that train on the rollout of a step, as far as the run has come."""
    last, steps = run.history.last_step, run.recorded.rollout_steps
    return range(step, next((other for other in steps if other > step), last + 1))


def _recorded_at(run: Run, step: int) -> dict[str, int]:
    """The first step at which the tokens of each sample of a step's rollout are recorded in training."""
    recorded, steps = run.recorded, _steps_on(run, step)
    return {
        row["sample_id"]: number
        for number in reversed([one for one in recorded.token_steps if one in steps])
        for row in recorded.tokens(number, ["sample_id"])
    }


def _listed(group: Sequence[Row], trained: set[str] | None) -> Answer:
    """The entry of a group in the list of a step's groups."""
    first, rewards = group[0], [row["reward"] for row in group]
    known = [reward for reward in rewards if reward is not None]
    return {
        "group": first["group"],
        "prompt_id": first["prompt_id"],
        "prompt": prompt_text(first)[:PROMPT_SHOWN],
        "rewards": rewards,
        "mean": fmean(known) if known else None,
        "is_kept": first["is_kept"],
        "why_nothing": why_unlearned(group, trained),
        "num_tokens": [len(row["sampled_at_N"] or ()) for row in group],
        "finish": [row["finish_reason"] for row in group],
    }


def group(run: Run, parameters: Parameters) -> Answer:
    recorded = run.recorded
    step = _step(run, parameters, recorded.rollout_steps)
    number = parameters.number("group") or 0
    rows = [row for row in recorded.rollouts(step) if row["group"] == number]
    if not rows:
        raise Unknown(
            f"{run.name} has no group {number} at step {step}; expected one of that step's groups"
        )
    first, recorded_at = rows[0], _recorded_at(run, step)
    prompt = json.loads(first["prompt"])
    return {
        "step": step,
        "group": number,
        "prompt_id": first["prompt_id"],
        "place": first["place"],
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "asked": recorded.asked(first),
        "is_text": isinstance(prompt, str),
        "references": first["references"],
        "is_kept": first["is_kept"],
        "why_nothing": why_unlearned(rows, _trained_on(run, step)),
        "answers": [
            {**_answer(row, recorded), "recorded_at": recorded_at.get(row["sample_id"])}
            for row in rows
        ],
    }


def _answer(row: Row, recorded: Recorded) -> Answer:
    """A trajectory, with its sampled tokens among those of the environment."""
    sampled_at = row["sampled_at_N"] or []
    begin = sampled_at[0] if sampled_at else len(row["ids_T"])
    return {
        "sample_id": row["sample_id"],
        "index": row["index"],
        "reward": row["reward"],
        "parts": [{"reply": None, **part} for part in row["rewards"] or ()],
        "text": row["text"],
        "messages": json.loads(row["messages"]),
        "pieces": recorded.pieces(row["ids_T"][begin:]),
        "sampled_at": [at - begin for at in sampled_at],
        "logp": row["logp_N"],
        "advantage": row["advantage_N"],
        "version": row["version_N"],
        **{
            name: row[name]
            for name in ("finish_reason", "error", "num_turns", "num_calls", "num_malformed_calls")
        },
        "num_tokens": len(sampled_at),
    }


OF_PROMPTS = (
    "step",
    "group",
    "prompt_id",
    "prompt",
    "index",
    "reward",
    "text",
    "messages",
    "finish_reason",
)


def prompt(run: Run, parameters: Parameters) -> Answer:
    wanted = parameters.text("id")
    rows, num_left = run.recorded.rollouts_of(wanted, OF_PROMPTS, MOST_STEPS)
    if not rows:
        raise Unknown(
            f"{run.name} has no rollouts of the prompt {wanted[:80]!r}; expected the id of one that was sampled"
        )
    groups = [
        list(group) for _, group in groupby(rows, key=lambda row: (row["step"], row["group"]))
    ]
    return {
        "prompt_id": wanted,
        "prompt": prompt_text(rows[0]),
        "steps": [_at_step(group) for group in groups],
        "num_left": num_left,
    }


def _at_step(group: Sequence[Row]) -> Answer:
    known = [row["reward"] for row in group if row["reward"] is not None]
    return {
        "step": group[0]["step"],
        "group": group[0]["group"],
        "mean": fmean(known) if known else None,
        "answers": [
            {
                "index": row["index"],
                "reward": row["reward"],
                "text": answer_text(row)[:TEXT_SHOWN],
                "finish_reason": row["finish_reason"],
            }
            for row in group
        ],
    }


# -- data and model


def data(run: Run, _: Parameters) -> Answer:
    history = run.history
    start, found = history.start, history.checks
    others = [e for name, e in found.items() if name.startswith("data.") and name != REPEATS]
    return {
        "summary": start.get("data"),
        "sets": start.get("sets") or [_train_set(start)],
        "duplicates": _check(found.get(REPEATS)),
        "checks": [_check(event) for event in others if event.get("outcome") != "skipped"],
    }


def _train_set(start: Event) -> Answer:
    """The training set in the start event of an older version."""
    listed: Answer = {}
    for name in ("dropped", "cut"):
        lines = [line.partition(": ") for line in start.get(name, ())]
        listed[f"num_{name}"] = len(lines)
        listed[name] = [{"place": place, "reason": why} for place, _, why in lines[:MOST_PLACES]]
    return {"name": "train", "num_samples": start.get("num_samples"), **listed}


def _check(event: Event | None) -> Answer | None:
    names = ("name", "outcome", "detail", "evidence", "remedy", "notes", "value", "unit")
    return None if event is None else {name: event.get(name) for name in names}


def model(run: Run, _: Parameters) -> Answer:
    history = run.history
    contract: Answer = {}
    for folder in (MODEL, BEST, ADAPTER):
        path = run.out / folder / CONTRACT
        try:
            contract = files.read_json(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"cannot read {path}: {reason}; expected what the run wrote; bring it back from a copy"
            ) from error
        break
    goldens = contract.pop("goldens", []) if isinstance(contract, dict) else []
    end = history.end or {}
    return {
        "contract": contract,
        "stop": end.get("stop"),
        "stop_check": _check(history.checks.get("stop")),
        "goldens": [
            {
                "id": golden["prompt"]["id"],
                "prompt": golden["prompt"].get("messages") or golden["prompt"].get("text"),
                "text": golden["answer"],
                "logp": golden["logp"],
                "margin": golden["margin"],
                "finish_reason": golden["finish_reason"],
            }
            for golden in goldens
        ],
    }


TOPICS: dict[str, Callable[[Run, Parameters], Answer]] = {
    topic.__name__: topic
    for topic in (
        overview,
        curves,
        checks,
        steps,
        samples,
        sample,
        rollouts,
        group,
        prompt,
        data,
        model,
    )
}
"""Questions about one run."""


# -- values


def _step(run: Run, parameters: Parameters, recorded: Sequence[int]) -> int:
    """The requested step, or else the newest recorded one."""
    step = parameters.number("step")
    if step is not None:
        return step
    if not recorded:
        raise Unknown(
            f"{run.name} has no record of this; expected a run that records it (log.tokens, log.rollouts)"
        )
    return recorded[-1]


def _order(nll: Any) -> float:
    """The loss by which samples are sorted: infinite if it is not a number, since that may be the fault."""
    return float(nll) if isinstance(nll, int | float) and nll == nll else float("inf")


def _fields(event: Event) -> Answer:
    return {key: value for key, value in event.items() if key != "kind"}


def _json(answer: Answer) -> Answer:
    found: Answer = to_json(answer)
    return found
