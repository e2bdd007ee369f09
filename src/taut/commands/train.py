"""``train``: the one function behind every training command and ``taut.NAME``.

    what is in out -> inputs -> models -> trainer -> checks -> claim out -> train -> evaluate -> save

Nothing is written to ``out`` before everything that can be refused has been checked. A resumed run starts from its
newest checkpoint, verified; a finished run is left as it is. A run that ends early leaves a checkpoint of its last
whole step where it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field
from typing_extensions import TypedDict

from taut.checks.examine import Examination, before_launch, before_training, require_known
from taut.config import first_problem, to_dict, user_path
from taut.data.order import Cursor
from taut.data.stream import StreamDataset
from taut.data.token_bytes import token_bytes
from taut.errors import (
    CheckFailed,
    ConfigError,
    DataError,
    DivergenceError,
    EngineError,
    Interrupted,
    ModelError,
    OutOfMemory,
    OutputError,
    StreamError,
    TautError,
    UserCodeError,
)
from taut.evals.during import (
    Best,
    Evaluations,
    build_answering,
    drop_after,
    held_out,
    require_best,
    require_same_measure,
)
from taut.evals.stopping import StopCheck, Stops, prepare, unasked
from taut.io import temporary
from taut.io.allocator import keep_freed_memory
from taut.io.notebook import html_table
from taut.methods.inputs import Inputs, Plan, engine_of
from taut.methods.method import RunConfig, Streamed
from taut.methods.online import OnlineMethod
from taut.plan.ways import memory_of, settings_that_help
from taut.run.fingerprint import TOLERANCE, identity_of, moved_servers, products_in, require_same
from taut.run.inputs import load_inputs
from taut.run.origin import origin
from taut.run.reference_cache import keep_reference
from taut.run.save import answer_for_best, choose_goldens, save_best, save_model
from taut.run.setup import Built, build, use_products
from taut.train import checkpoint, distributed
from taut.train.checkpoint import Checkpoints, Memory, Saved
from taut.train.distributed import Ranks
from taut.train.log import RunLog, all_events
from taut.train.log.events import newest_first
from taut.train.log.own import load_sinks
from taut.train.monitors import ChangedSources, Divergence, Spikes, Untouched
from taut.train.oom import require_room
from taut.train.run_dir import (
    ADAPTER,
    BEST,
    CHECKPOINTS,
    EVENTS,
    MARK,
    MODEL,
    Lock,
    claim,
    complete,
    read_resolved,
    require_usable,
    step_of,
)
from taut.train.signals import Interrupt, Interrupts
from taut.train.trainer import Trainer, go_on_from, run_steps, use_budget


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    out: Path
    model: Path
    """The trained model, in Hugging Face format; with save.merged=false the adapter."""
    steps: int
    loss: float
    """Training loss of the last step."""
    metrics: Mapping[str, float]
    """All measurements at the end: loss, stopped, and the rewards of eval.answers."""
    stops: Stops | None
    """Whether the model ends its answers; None where this was not measured."""
    divergence: str | None = None
    """A sign of divergence that was reported and still held after the last step."""
    notice: str | None = None
    """A message for the user: that the run was finished already."""

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss at the end, where data.eval was given."""
        return self.metrics.get("loss")

    @property
    def warning(self) -> str | None:
        """A message about a result that may not be usable."""
        warnings = []
        if self.divergence is not None:
            warnings.append(f"training may have diverged: {self.divergence}")
        if self.stops is not None and not self.stops.is_enough:
            warnings.append(f"{self.model} may not stop: {self.stops}")
        return "; ".join(warnings) or None

    def _repr_html_(self) -> str:
        rows = [
            ("model", self.model),
            ("steps", f"{self.steps:,}"),
            ("training loss", self.loss),
            *((f"held-out {name}", value) for name, value in self.metrics.items()),
            ("stops", self.stops),
            ("warning", self.warning),
            ("notice", self.notice),
        ]
        return html_table(str(self.out), (), [row for row in rows if row[1] is not None])


def train(run: RunConfig) -> Result:
    """Train a model by the method of the run (taut/methods).

    Raises TautError (found, expected, what to do) before anything is written; CheckFailed where a check or a monitor
    stops the run; Interrupted where a signal does, with the training state saved. With ``resume`` the run starts from
    its newest checkpoint; a finished run is left as it is.
    """
    if run.out is None:
        raise ConfigError("out is not set; expected a directory; set out=DIR")
    require_known(run.checks.skip)
    temporary.clear()
    out = user_path(run.out, "out")
    with (
        Interrupts.watching() as interrupts,
        ExitStack() as open_until_the_end,
        ExitStack() as preparation,
    ):
        preparation.enter_context(interrupts.before_training())
        ranks = distributed.start(run.device, run.parallel)
        require_usable(out, resume=run.resume, overwrite=run.overwrite, inputs=run.input_files())
        with Lock(out) as lock:
            if ranks.is_writer and (out / MARK).is_file():
                lock.take()
            ranks.doing("comparing the nodes")
            of_nodes = before_launch(run, ranks)
            before = read_resolved(out) if run.resume and (out / MARK).is_file() else None
            day = None if before is None else before.get("day")
            ranks.doing("reading the data")
            day = None if day is None else date.fromisoformat(day)
            inputs = load_inputs(run, ranks, day, trains=True)
            if isinstance(inputs.train, StreamDataset):
                open_until_the_end.callback(inputs.train.stream.reader.close)
            start = look(run, out, before, inputs, ranks)
            if start.finished is None:
                log = RunLog(own=load_sinks(run.log.sinks))
                ranks.doing("loading the model")
                built = _build(run, inputs, start.plan, ranks, log, interrupts)
                with closing(built.trainer.source) as source:
                    ranks.doing("checking the run")
                    built.opened.extend(source.open())
                    evaluations, stop_check = _evaluations(built, out), _stop_check(built)
                    examination = before_training(built)
                    if examination is not None and of_nodes is not None:
                        examination = examination.after(of_nodes)
                    keep_reference(built)
                    preparation.close()  # from here on a signal saves the state
                    on_cpu = ranks.device.type == "cpu"
                    with keep_freed_memory() if on_cpu else nullcontext():
                        work = built, start, lock, log, examination, evaluations, stop_check
                        result = require_room(
                            partial(execute, *work),
                            f"rank {ranks.rank}, outside the forward and backward of a micro-batch",
                            lambda: (
                                f"{_settings_that_help(run, inputs, ranks, None)}; resume=true "
                                "goes on from the newest checkpoint"
                            ),
                        )
            else:
                end, model = start.finished, out / run.save.result
                notice = (
                    f"{out} is finished: {end['step']} steps, the result is in {model}; nothing was changed; "
                    "raise steps or epochs to train on"
                )
                result = Result(
                    out, model, end["step"], end["loss"], end["metrics"], None, notice=notice
                )
        distributed.stop(ranks)
    return result


class Finish(TypedDict):
    """The event with which a run finishes, as far as it is read back."""

    step: Annotated[int, Field(ge=0)]
    cursor: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
    loss: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Where a run begins: at step 1, at a checkpoint, or at its end. A finished run is recognised by its last event, so
    a damaged checkpoint does not matter where none is needed.
    """

    plan: Plan
    identity: Mapping[str, Any]
    saved: Saved | None = None
    """The checkpoint to resume from; None: step 1."""
    rounding: list[str] = field(default_factory=list)
    """Differences that make numbers equal up to rounding only."""
    schedule: list[str] = field(default_factory=list)
    """Differences that change the learning rate of the coming steps."""
    moved: list[str] = field(default_factory=list)
    """Reward servers whose address has changed."""
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that are damaged."""
    finished: Finish | None = None
    """The last event of a run that is finished."""
    num_steps_before: int | None = None
    """Number of steps when the run was last started or resumed."""

    @property
    def from_step(self) -> int:
        return 0 if self.saved is None else self.saved.step


def _build(
    run: RunConfig,
    inputs: Inputs,
    plan: Plan,
    ranks: Ranks,
    log: RunLog,
    interrupts: Interrupts,
) -> Built:
    """The models and the trainer of a run. Raises OutOfMemory where there is no room for them, on that rank alone: the
    others wait in no collective.
    """
    make = partial(build, run, inputs, plan, ranks, log.emit, interrupts)
    ways = partial(_settings_that_help, run, inputs, ranks, None)
    built = require_room(make, f"loading {run.model} on rank {ranks.rank}", ways)
    ranks.barrier()
    return built


def _settings_that_help(
    run: RunConfig, inputs: Inputs, ranks: Ranks, num_tokens: int | None
) -> str:
    try:
        return settings_that_help(run, memory_of(run, inputs, ranks, num_tokens))
    except ModelError as error:
        return f"what its settings take is not known: {error}"


def look(
    run: RunConfig, out: Path, before: Mapping[str, Any] | None, inputs: Inputs, ranks: Ranks
) -> Start:
    """Where ``run`` begins. Raises TautError where it does not fit the run in ``out``; writes nothing. ``before``: that
    run's resolved.json; None: there is none to resume.
    """
    if before is None:
        _use_products(run, ranks, {})
        return Start(run.plan(inputs.train), identity_of(run, inputs, ranks))
    end = _finish(out, run.save.result)
    if end is not None:
        plan = _plan(run, inputs, Cursor(*end["cursor"]), out)
        if plan.num_steps == end["step"]:
            if "identity" not in before:
                raise OutputError(
                    f"{out / MARK} has no 'identity'; expected what the run wrote; bring it back from a copy"
                )
            mine = identity_of(run, inputs, ranks)
            changed = require_same(before["identity"], mine, out).schedule
            if changed:
                raise ConfigError(
                    f"resume=true: {out} is finished after step {end['step']}, so that {'; '.join(changed)} would "
                    "change nothing; expected more steps or epochs too; raise them, or begin a new run from "
                    f"{out / run.save.result}"
                )
            return Start(plan, mine, finished=end)
    skip_damaged = run.checkpoint.skip_damaged
    saved, damaged = checkpoint.find_newest(out / CHECKPOINTS, ranks, skip_damaged=skip_damaged)
    if end is not None and saved is None:
        raise ConfigError(
            f"resume=true: {out} is finished after step {end['step']} and has no checkpoint to train on from; expected "
            f"steps={end['step']}; begin a new run from {out / run.save.result}, with checkpoint.every set"
        )
    if saved is None and run.save.merged and _finish(out, ADAPTER) is not None:
        raise ConfigError(
            f"resume=true: {out} is finished, with {out / ADAPTER} but no {MODEL} and no checkpoint to write one from; "
            f"expected save.merged=false; to get the model: taut merge {run.model} adapter={out / ADAPTER} out=DIR"
        )
    num_steps = before.get("num_steps")
    identity = {} if saved is None else saved.meta.identity.model_dump()
    _use_products(run, ranks, identity)
    mine = identity_of(run, inputs, ranks)
    if saved is None:
        plan = run.plan(inputs.train)
        return Start(plan, mine, damaged=damaged, num_steps_before=num_steps)
    _, rounding, schedule = require_same(identity, mine, saved.path)
    return Start(
        plan=_plan(run, inputs, Cursor(*saved.meta.cursor), saved.path),
        identity=mine,
        saved=saved,
        rounding=rounding,
        schedule=schedule,
        moved=moved_servers(identity, mine),
        damaged=damaged,
        num_steps_before=num_steps,
    )


def _use_products(run: RunConfig, ranks: Ranks, identity: Mapping[str, Any]) -> None:
    """Choose the libraries of products. ``identity``: of the checkpoint that is resumed; empty: there is none."""
    stored, whose = products_in(identity), "the checkpoint"
    recording = run.recording if stored is None and isinstance(run, OnlineMethod) else None
    if recording is not None:
        stored, whose = products_in(recording.resolved.get("identity", {})), str(recording.out)
    use_products(run, ranks, stored, whose)


def _finish(out: Path, result: str) -> Finish | None:
    """The event with which the run finished, if it is the last one and ``result`` exists."""
    path = out / EVENTS
    last = next(newest_first(path), None) if path.is_file() and (out / result).is_dir() else None
    if last is None or last["kind"] != "end" or last.get("outcome") != "finished":
        return None
    try:
        return pydantic.TypeAdapter(Finish).validate_python(last, strict=True)
    except pydantic.ValidationError as error:
        raise OutputError(
            f"{path}: its last event: {first_problem(error)}; expected what the run wrote; bring the file back from a "
            "copy, or remove that line to go on from the newest checkpoint"
        ) from error


def _plan(run: RunConfig, inputs: Inputs, cursor: Cursor, where: Path) -> Plan:
    """The steps of a run that has reached ``cursor``, which must not be beyond its end."""
    plan = run.plan(inputs.train, cursor)
    step = cursor.step
    if step > plan.num_steps or plan.source.cursor(step).samples < cursor.samples:
        raise ConfigError(
            f"resume=true: {where} is beyond the end of this run, step {plan.num_steps}; "
            f"expected steps={step} or more; raise steps or epochs"
        )
    return plan


def _stop_check(built: Built) -> StopCheck:
    """The test, before the model is saved, of whether the model ends its answers."""
    run, inputs = built.run, built.inputs
    data = inputs.train if inputs.eval is None else inputs.eval
    if run.has_scalar_head:
        return unasked(run.stop_check, built.trainer, run.seed, "a reward model writes nothing")
    questions = run.questions(data)
    engine = engine_of(inputs, built.models, built.trainer.ranks)
    check = prepare(run.stop_check, questions, inputs.stops.ids, engine, built.trainer, run.seed)
    return replace(check, is_taught=run.teaches_ends, remedy=run.ends_remedy)


def _evaluations(built: Built, out: Path) -> Evaluations:
    """The measurements during training. Raises TautError for those that would fail later."""
    run, inputs, trainer = built.run, built.inputs, built.trainer
    measures = []
    if inputs.eval is not None and not run.generates:
        measures.append(held_out(run.rows_of(inputs.eval), run.eval.every, trainer))
    if run.has_scalar_head and run.eval.answers.rewards:
        raise ConfigError(
            "eval.answers.rewards is set and a reward model writes no answers; expected none; take the key out"
        )
    answers, make_engine = run.held_out_answers, engine_of(inputs, built.models, trainer.ranks)
    renderer, kind = inputs.renderer, run.row_kind
    answering = build_answering(answers, run.data, renderer, make_engine, trainer, kind)
    if answering is not None:
        measures.append(answering.as_evaluation())
        built.opened.extend(d for d in answering.decisions if d not in built.decisions)
    if run.eval.best is None:
        if run.checkpoint.keep_best:
            raise ConfigError(
                "checkpoint.keep_best=true and eval.best is not set; expected the metric that says which is the best; "
                "set eval.best"
            )
        return Evaluations(measures, trainer.num_steps, None)
    measured = require_best(run.eval.best, measures).measured
    if run.resume:
        require_same_measure(out / BEST, run.eval.best, measured)
    best = Best(run.eval.best, measured, out / BEST, partial(save_best, built), trainer)
    return Evaluations(measures, trainer.num_steps, best)


def execute(
    built: Built,
    start: Start,
    lock: Lock,
    log: RunLog,
    examination: Examination | None,
    evaluations: Evaluations,
    stop_check: StopCheck,
) -> Result:
    """Claim the directory of ``lock``, train, evaluate and save. ``examination``: the checks' findings; None: they are
    turned off.
    """
    run, trainer, out = built.run, built.trainer, lock.out
    if trainer.ranks.is_writer:
        _claim(built, start, lock)
    trainer.ranks.barrier()
    recorder = trainer.recorder
    with log.open(out, run.log, is_writer=trainer.ranks.is_writer, listener=recorder):
        checkpoints = _checkpoints(built, out, start, evaluations)
        try:
            _emit_start(built, examination)
            vocabulary = partial(token_bytes, built.inputs.renderer.tokenizer)
            recorder.open(out, vocabulary, start.from_step if run.resume else None, log.show)
            _begin(built, start, lock, checkpoints)
            with distributed.explaining(), trainer.meter.running():
                return _run(built, out, checkpoints, evaluations, stop_check)
        except Interrupt as interrupt:
            raise _interrupted(trainer, str(interrupt), checkpoints) from None
        except TautError as error:
            final = _stopped(built, error, checkpoints)
            if final is error:
                raise
            raise final from error
        finally:
            checkpoints.close()


def _claim(built: Built, start: Start, lock: Lock) -> None:
    """Take the directory, unless another run has since begun there, and write resolved.json."""
    run, out = built.run, lock.out
    if not lock.is_taken:  # it was no run
        lock.take()
        if (out / MARK).is_file():
            raise OutputError(
                f"out={out}: another run began there while this one was made ready; expected no other; name another "
                "out, or give the command again, with resume=true to go on with that run"
            )
    if run.resume and start.num_steps_before != built.trainer.num_steps:
        drop_after(out / BEST, start.from_step)  # before the new number stands in resolved.json
    resolved = {
        "taut": version("taut"),
        "method": run.method,
        "directory": str(Path.cwd()),
        "config": to_dict(run),
        "decisions": [decision._asdict() for decision in built.decisions],
        "num_steps": built.trainer.num_steps,
        "day": str(built.inputs.renderer.template.day),
        "data": built.inputs.train.fingerprint,
        "identity": start.identity,
    }
    claim(out, resolved, overwrite=run.overwrite)


def _checkpoints(built: Built, out: Path, start: Start, evaluations: Evaluations) -> Checkpoints:
    trainer, best = built.trainer, evaluations.best
    memories: dict[str, Memory] = {
        type(monitor).__name__: monitor
        for monitor in trainer.monitors
        if isinstance(monitor, Untouched | Spikes | Divergence)
    }
    if trainer.source.state is not None:
        kind = "stream" if isinstance(trainer.source, Streamed) else "online"
        memories[kind] = trainer.source.state
    return Checkpoints(
        folder=out / CHECKPOINTS,
        config=built.run.checkpoint,
        scorer=built.scorer,
        optimizer=trainer.optimizer,
        num_steps=trainer.num_steps,
        ranks=trainer.ranks,
        emit=trainer.emit,
        notes=lambda step: {
            "cursor": trainer.source.cursor(step),
            "loss": trainer.loss,
            "identity": start.identity,
        },
        memories=memories if best is None else {**memories, "best": best},
        best_step=lambda: None if best is None else best.step,
        sync_records=trainer.recorder.sync,
        is_sound=lambda: not _divergence(trainer).is_suspected,
    )


def _emit_start(built: Built, examination: Examination | None) -> None:
    data, trainer = built.inputs.train.report, built.trainer
    sets = [built.inputs.train.described("train")]
    if built.inputs.eval is not None:
        sets.append(built.inputs.eval.described("eval"))
    trainer.emit(
        "start",
        version=version("taut"),
        model=built.run.model,
        num_steps=trainer.num_steps,
        num_ranks=trainer.ranks.size,
        num_samples=data.num_samples,
        data=str(data),
        dropped=[f"{incident.place}: {incident.reason}" for incident in data.dropped],
        cut=[f"{incident.place}: {incident.reason}" for incident in data.cut],
        decisions=built.decisions,
        num_parameters=sum(p.numel() for p in built.scorer.parameters()),
        num_trained=sum(parameter.numel() for parameter in trainer.trained),
        **origin(trainer.ranks),
        sets=sets,
    )
    if examination is None:
        trainer.emit("check", name="all", outcome="skipped", value=None, detail="check=off")
        return
    for answered in examination.answered:
        finding = answered.finding
        trainer.emit(
            "check",
            name=answered.name,
            part=examination.part,
            outcome=finding.outcome,
            value=finding.number,
            unit=finding.unit,
            detail=finding.says,
            evidence=finding.evidence,
            remedy=finding.remedy,
            notes=finding.notes,
            left_out=answered.is_left_out,
            seconds=answered.seconds,
        )


def _begin(built: Built, start: Start, lock: Lock, checkpoints: Checkpoints) -> None:
    """Restore the checkpoint, and log how the run differs from the one that wrote it."""
    trainer, saved, out = built.trainer, start.saved, lock.out
    if lock.trouble:
        trainer.emit("warning", name="lock", detail=lock.trouble)
    if not built.run.resume:
        checkpoints.prepare()
        return
    from_step = start.from_step
    if trainer.ranks.is_writer:
        checkpoint.set_aside(out / CHECKPOINTS, from_step)
    checkpoints.prepare()
    is_measured = True
    if saved is not None:
        checkpoints.resume(saved)
        is_measured = saved.meta.is_measured
        go_on_from(trainer, from_step, saved.meta.loss, is_measured=is_measured)
    written = all_events(out / EVENTS) if trainer.ranks.is_writer else []
    cuts = [event for event in written if event["kind"] == "budget"]
    trainer.fit.replay(trainer.ranks.gather(cuts)[0])
    use_budget(trainer, from_step, is_reported=True)
    is_at_end = from_step == trainer.num_steps  # what is measured there comes after its checkpoint
    trainer.emit("resume", from_step=from_step, is_measured=is_measured and not is_at_end)
    for text in start.damaged:
        trainer.emit(
            "warning",
            name="checkpoint",
            detail=f"{text}; going on from an earlier one, this one is kept as damaged-step-*",
        )
    if start.schedule:
        detail = f"{'; '.join(start.schedule)}: active from step {from_step + 1} on"
        trainer.emit("warning", name="schedule", detail=detail)
    if start.moved:
        detail = f"{'; '.join(start.moved)}: asked there from step {from_step + 1} on"
        trainer.emit("warning", name="address", detail=detail)
    if start.rounding:
        limit = TOLERANCE[str(start.identity["dtype"])]
        detail = (
            f"{'; '.join(start.rounding)}: losses will be those of the uninterrupted run to {limit:g} of their value, "
            "not bit for bit"
        )
        trainer.emit("warning", name="exactness", detail=detail, tolerance=limit)


def _run(
    built: Built,
    out: Path,
    checkpoints: Checkpoints,
    evaluations: Evaluations,
    stop_check: StopCheck,
) -> Result:
    trainer, run = built.trainer, built.run
    questions = choose_goldens(built)
    began = time.perf_counter()

    def measure(step: int) -> None:
        trainer.ranks.doing(f"evaluating after step {step}")
        with trainer.interrupts.at_once(trainer.ranks):
            evaluations(step)

    data = [built.inputs.train, *([built.inputs.eval] if built.inputs.eval is not None else [])]
    watch = ChangedSources(data, trainer)
    after_step: list[Callable[[int], None]] = [measure, watch, checkpoints]
    if isinstance(source := trainer.source, Streamed):

        def leave(step: int) -> None:
            """Let go of what no step needs that is yet to come, here or after a resume."""
            newest = complete(checkpoints.folder)[-run.checkpoint.keep :]
            kept = [step_of(path) for path in newest]
            source.leave(step, min(kept, default=0 if run.checkpoint.every else step))

        after_step.append(leave)
    run_steps(trainer, after_step)
    trainer.ranks.doing("evaluating at the end")
    with trainer.interrupts.at_once(trainer.ranks):
        try:
            metrics, stops = evaluations.at_end(), stop_check()
        except OutOfMemory:
            raise
        except TautError as error:
            if trainer.ranks.size > 1:  # the others may not have failed, and would not save
                raise
            state = checkpoints.rescue(trainer.done, trainer.random)
            raise type(error)(f"{error}; {state}") from error
        trainer.interrupts.agree(trainer.ranks)
        if run.stop_check.required and stops is not None and not stops.is_enough:
            state = checkpoints.rescue(trainer.done, trainer.random)
            raise CheckFailed(f"{stops}; stop_check.required=true, so no model is written; {state}")
        trainer.ranks.doing("writing the model")
        model = save_model(built, out / run.save.result, questions, checkpoints)
        if run.eval.best is not None:
            answer_for_best(built, out / BEST, questions)
    checkpoints.settle()
    watch.look()
    divergence = _divergence(trainer).found
    trainer.emit(
        "end",
        outcome="finished",
        step=trainer.done,
        cursor=trainer.source.cursor(trainer.done),
        loss=trainer.loss,
        eval_loss=metrics.get("loss"),
        metrics=metrics,
        seconds=time.perf_counter() - began,
        model=str(model),
        stop=stops.as_fields() if stops is not None else None,
        divergence=divergence,
        fetched=[fetched.as_fields() for fetched in built.inputs.train.fetched],
    )
    return Result(out, model, trainer.done, trainer.loss, metrics, stops, divergence)


def _interrupted(trainer: Trainer, signal: str, checkpoints: Checkpoints) -> Interrupted:
    """Save the last whole step of an interrupted run; returns the error that ends the run."""
    if trainer.done == 0:
        reason = f"{signal} before the first step was over; nothing was to be saved"
    else:
        reason = f"{signal}: the state after step {trainer.done}"
        try:
            reason += f" is in {_save(trainer, checkpoints)}"
        except OutputError as error:
            reason += f" could not be saved: {error}"
            trainer.emit("end", outcome="stopped", step=trainer.done, reason=reason)
            raise OutputError(f"interrupted by {reason}") from error
    trainer.emit("end", outcome="interrupted", step=trainer.done, reason=reason)
    return Interrupted(f"interrupted by {reason}; the same command with resume=true goes on")


def _stopped(built: Built, error: TautError, checkpoints: Checkpoints) -> TautError:
    """Save the last whole step of a failed run where its state is sound; returns the error that ends the run.

    It is sound where memory, the engine, the rewards or a stream are at fault. Where training has diverged, checkpoints
    of diverged weights lose their names.
    """
    trainer, ranks, kept = built.trainer, built.trainer.ranks, ""
    is_outside = isinstance(
        error, EngineError | CheckFailed | ConfigError | DataError | UserCodeError
    )
    if isinstance(error, DivergenceError):
        checkpoints.settle_or_warn()
        if ranks.is_writer:
            checkpoint.set_aside(checkpoints.folder, _divergence(trainer).sound_step)
        ranks.barrier()
        kept = _newest(checkpoints)
    elif isinstance(error, OutOfMemory):
        if error.num_tokens is not None:
            ways = _settings_that_help(built.run, built.inputs, ranks, error.num_tokens)
            error = OutOfMemory(f"{error}; {ways}")
        if ranks.size > 1:  # the others are in the middle of the step, and would not save
            kept = f"{_newest(checkpoints)}; resume=true goes on from there"
        elif trainer.done:
            kept = _try_to_save(trainer, checkpoints)
        else:
            kept = "nothing was to be saved: the first step was not over"
    elif (
        built.run.generates
        and is_outside
        and ranks.size == 1
        and 0 < trainer.done < trainer.num_steps
    ):
        trainer.source.reject()
        kept = _try_to_save(trainer, checkpoints)
    elif isinstance(error, StreamError) and 0 < trainer.done < trainer.num_steps:
        kept = _try_to_save(trainer, checkpoints)
    final = type(error)(f"{error}; {kept}") if kept else error
    trainer.emit("end", outcome="stopped", step=trainer.done, reason=str(final))
    return final


def _newest(checkpoints: Checkpoints) -> str:
    paths = complete(checkpoints.folder)
    return f"the newest checkpoint is {paths[-1]}" if paths else "there is no checkpoint yet"


def _try_to_save(trainer: Trainer, checkpoints: Checkpoints) -> str:
    state = f"the state after step {trainer.done}"
    try:
        return f"{state} is in {_save(trainer, checkpoints)}; resume=true goes on from there"
    except OutputError as error:
        return f"{state} could not be saved: {error}; {_newest(checkpoints)}"


def _save(trainer: Trainer, checkpoints: Checkpoints) -> Path:
    """Save the last whole step, as it was before anything that follows it."""
    is_measured = trainer.followed == trainer.done
    checkpoints.settle_or_warn()  # one that failed before does not keep this one from being tried
    return checkpoints.save(trainer.done, wait=True, is_measured=is_measured, random=trainer.random)


def _divergence(trainer: Trainer) -> Divergence:
    return next(monitor for monitor in trainer.monitors if isinstance(monitor, Divergence))
