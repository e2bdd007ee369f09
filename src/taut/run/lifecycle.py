"""The life of a run, from its first look at ``out`` to ``model/``.

    look      may the run use ``out``, and where does it begin (start.py)? Nothing is written
    build     data (inputs.py), models and trainer (setup.py), evaluations; then the checks are asked
    claim     write resolved.json, which makes ``out`` a run; open the log; restore the checkpoint
    train     take all steps (taut/train/trainer.py); evaluate and save checkpoints between them
    finish    evaluate once more; find out whether the model ends its answers
    save      write model/ (save.py); then the last event

Everything that can be refused is refused before ``out`` is claimed. A resumed run starts from its newest checkpoint,
verified; a finished run is not changed. A run that ends early leaves a checkpoint of its last whole step where it can
(ending.py).

The checks and the planner examine what this room builds, so they are rooms above it: ``train`` gets the functions
that it calls of them as ``Advisers``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from taut.config import Decision, to_dict
from taut.data.growing import GrowingDataset
from taut.data.render.tokens import token_bytes
from taut.data.stream import StreamDataset
from taut.errors import CheckFailed, ConfigError, OutOfMemory, OutputError, TautError
from taut.evals.custom_metrics import TAKES, read_metrics
from taut.evals.stopping import StopCheck, prepare, unasked
from taut.evals.training_evals import (
    RESERVED,
    Evaluations,
    build_answering,
    drop_after,
    held_out,
    require_best,
    require_same_measure,
)
from taut.io import temporary
from taut.io.allocator import keep_freed_memory
from taut.methods.inputs import Inputs, engine_of
from taut.methods.method import RunConfig
from taut.methods.sources import Streamed
from taut.run import fingerprint
from taut.run.ending import (
    Result,
    end_interrupted,
    end_stopped,
    result_of_finished,
    why_nothing_learned,
)
from taut.run.inputs import load_inputs
from taut.run.origin import origin
from taut.run.reference_cache import keep_reference
from taut.run.save import answer_for_best, choose_goldens, save_best, save_model
from taut.run.setup import Built, build, decide_cadences
from taut.run.start import Start, begin, look
from taut.train import distributed
from taut.train.cadence import Cadence
from taut.train.checkpoint import Checkpoints, Memory
from taut.train.distributed import Ranks
from taut.train.hooks import Hooks, open_hooks
from taut.train.log import RunLog
from taut.train.log.custom_sink import load_sinks
from taut.train.monitors import ChangedSources, Divergence, Spikes, Untouched
from taut.train.oom import require_room
from taut.train.run_dir import (
    BEST,
    CHECKPOINTS,
    MARK,
    Lock,
    claim,
    complete,
    out_of,
    read_resolved,
    require_usable,
    step_of,
)
from taut.train.signals import Interrupt, Interrupts
from taut.train.trainer import run_steps


class Examination(Protocol):
    """The answers of checks."""

    def as_events(self) -> list[dict[str, Any]]:
        """The fields of an event for each check."""


class Advisers(NamedTuple):
    """Functions of the rooms above this one, which a run calls on every rank. None stands for an examination without
    checks.
    """

    check_nodes: Callable[[RunConfig, Ranks], Examination | None]
    """Asked before the data are read. Raises CheckFailed."""
    check_run: Callable[[Built], Examination | None]
    """Asked before ``out`` is claimed. Raises CheckFailed."""
    suggest_settings: Callable[[RunConfig, Inputs, Ranks, int | None], str]
    """Names settings that take less memory. Its last argument: the tokens of the micro-batch that did not fit, if
    known.
    """
    decide: Callable[
        [RunConfig, Inputs, Ranks, Mapping[str, Any] | None], tuple[RunConfig, list[Decision]]
    ]
    """Asked once the data are read: the run with the settings that follow from its memory, and the decisions. Its last
    argument: resolved.json of the run to resume.
    """


@dataclass(frozen=True)
class Prepared:
    """A run that is built and checked, and has written nothing yet."""

    built: Built
    start: Start
    lock: Lock
    log: RunLog
    answers: list[dict[str, Any]]
    """The fields of an event for each check that was asked."""
    evaluations: Evaluations
    stop_check: StopCheck
    hooks: Hooks
    suggest_settings: Callable[[int | None], str]

    def why_over(self) -> str | None:
        """Why the run ends before its last step, the same on all ranks; None if it goes on."""
        best = self.evaluations.best
        return (best and best.why_over) or self.hooks.why_over


def train(run: RunConfig, advisers: Advisers) -> Result:
    """Train a model by the method of the run (taut/methods).

    Raises TautError (found, expected, what to do) before anything is written; CheckFailed where a check or a monitor
    stops the run; Interrupted where a signal does, with the training state saved. With ``resume`` the run starts from
    its newest checkpoint; a finished run is not changed.
    """
    out = out_of(run.out)
    temporary.clear()
    with Interrupts.watching() as interrupts, ExitStack() as preparation:
        # until training begins there is nothing to save: a signal ends the process
        preparation.enter_context(interrupts.before_training())
        ranks = distributed.start(run.device, run.parallel)
        with ExitStack() as opened:
            # look: may the run use `out`? An existing run is locked, a new directory only once it is claimed
            require_usable(
                out, resume=run.resume, overwrite=run.overwrite, inputs=run.input_files()
            )
            lock = opened.enter_context(Lock(out))
            if ranks.is_writer and (out / MARK).is_file():
                lock.take()
            ranks.doing("comparing the nodes")
            of_nodes = advisers.check_nodes(run, ranks)

            # read the data; a resumed run keeps the names of its sources, and its day, which templates may print
            before = read_resolved(out) if run.resume and (out / MARK).is_file() else None
            day = None
            if before is not None:
                run = fingerprint.follow_sources(run, before)
                day = date.fromisoformat(before["day"]) if "day" in before else None
            log = RunLog(custom=load_sinks(run.log.sinks))
            tell = partial(log.decide, out=out, config=run.log) if ranks.is_writer else list
            tell(run.decisions)
            ranks.doing("reading the data")
            inputs = load_inputs(run, ranks, day, trains=True, tell=tell)
            if isinstance(inputs.train, StreamDataset):
                opened.callback(inputs.train.stream.reader.close)
            elif isinstance(inputs.train, GrowingDataset) and ranks.is_writer:
                opened.callback(inputs.train.helper.end)
                inputs.train.begin()
            run, decisions = advisers.decide(run, inputs, ranks, before)
            run, cadences = decide_cadences(run)
            inputs.decisions.extend([*decisions, *cadences])
            tell(inputs.decisions)
            start = look(run, out, before, inputs, ranks)

            if start.finished is not None:
                result = result_of_finished(run, out, start.finished)
            else:
                # build: a rank without room for the models raises; the others wait in a barrier, which is no collective
                suggest = partial(advisers.suggest_settings, run, inputs, ranks)
                hooks = open_hooks(run.hooks, ranks, out, to_dict(run))
                ranks.doing("loading the model")
                built = require_room(
                    partial(build, run, inputs, start.plan, ranks, log.emit, interrupts),
                    f"loading {run.model} on rank {ranks.rank}",
                    partial(suggest, None),
                )
                tell(built.decisions)
                ranks.barrier()

                # check: engine, rewards and evaluations are opened, so that a missing one is refused now
                source = opened.enter_context(closing(built.trainer.source))
                ranks.doing("checking the run")
                built.opened.extend(source.open())
                evaluations = prepare_evaluations(built, out)
                stop_check = prepare_stop_check(built)
                asked = [of_nodes, advisers.check_run(built)]
                answers = [event for one in asked if one is not None for event in one.as_events()]
                keep_reference(built)
                prepared = Prepared(
                    built, start, lock, log, answers, evaluations, stop_check, hooks, suggest
                )

                # from here on a signal saves the state
                preparation.close()
                with keep_freed_memory() if ranks.device.type == "cpu" else nullcontext():
                    result = require_room(
                        partial(execute, prepared),
                        f"rank {ranks.rank}, outside the forward and backward of a micro-batch",
                        lambda: f"{suggest(None)}; resume=true goes on from the newest checkpoint",
                    )
        distributed.stop(ranks)
    return result


def prepare_evaluations(built: Built, out: Path) -> Evaluations:
    """Prepare the measurements during training and at its end. Raises TautError for one that would fail later."""
    run, inputs, trainer = built.run, built.inputs, built.trainer
    measures = []
    custom = read_metrics(run.eval.metrics, trainer.ranks)
    of_samples, of_answers = (
        [metric for metric in custom if metric.takes == name] for name in TAKES
    )

    # held-out loss
    if of_samples and (inputs.eval is None or run.generates or run.has_scalar_head):
        raise ConfigError(
            f"{of_samples[0].code.label}: it takes samples of data.eval, and this run learns none; expected data.eval "
            "in a method that learns its answers; set it, or take answers that the model generates",
            code="eval.metrics/data.eval",
        )
    if inputs.eval is not None and not run.generates:
        measures.append(
            held_out(run.rows_of(inputs.eval), run.eval.every or 0, trainer, of_samples)
        )

    # rewards of answers to held-out prompts
    if run.has_scalar_head and (run.eval.answers.rewards or of_answers):
        raise ConfigError(
            "eval.answers.rewards or eval.metrics is set and a reward model writes no answers; expected none; take the "
            "key out"
        )
    make_engine = engine_of(inputs, built.models, trainer.ranks)
    answers = run.held_out_answers
    answering = build_answering(
        answers, run.data, inputs.renderer, make_engine, trainer, run.row_kind, of_answers
    )
    if answering is not None:
        measures.append(answering.as_evaluation())
        built.opened.extend(d for d in answering.decisions if d not in built.decisions)

    # one value by a name
    names = [*RESERVED, *(name for one in measures for name in one.names)]
    for metric in custom:
        if names.count(metric.name) > 1:
            raise ConfigError(
                f"{metric.code.label}: another value is called {metric.name}; expected a name of its own; rename it",
                code="eval.metrics",
            )

    # the best model by one of them
    if run.eval.best is None:
        if run.checkpoint.keep_best:
            raise ConfigError(
                "checkpoint.keep_best=true and eval.best is not set; expected the metric that says which is the best; "
                "set eval.best"
            )
        return Evaluations(measures, trainer.num_steps, None)
    chosen = require_best(run.eval.best, measures)
    best = chosen.best(run.eval.best, out / BEST, partial(save_best, built), trainer)
    if run.resume:
        require_same_measure(out / BEST, run.eval.best, best.measured)
    best.stop_after = run.eval.stop_after
    return Evaluations(measures, trainer.num_steps, best)


def prepare_stop_check(built: Built) -> StopCheck:
    """Prepare the test of whether the model ends its answers, which runs before the model is saved."""
    run, inputs = built.run, built.inputs
    data = inputs.train if inputs.eval is None else inputs.eval
    if run.has_scalar_head:
        return unasked(run.stop_check, built.trainer, run.seed, "a reward model writes nothing")
    questions = run.questions(data)
    engine = engine_of(inputs, built.models, built.trainer.ranks)
    check = prepare(run.stop_check, questions, inputs.stops.ids, engine, built.trainer, run.seed)
    return replace(check, is_taught=run.teaches_ends, remedy=run.ends_remedy)


def execute(prepared: Prepared) -> Result:
    """Claim ``out``, train, finish and save; or end early, with the last whole step saved where that can be."""
    built, start, lock, log = prepared.built, prepared.start, prepared.lock, prepared.log
    run, trainer, out = built.run, built.trainer, lock.out

    # claim: the files of a run, its log with every check that was asked, and the state that it resumes from
    if trainer.ranks.is_writer:
        claim_out(built, start, lock)
    trainer.ranks.barrier()
    recorder = trainer.recorder
    with log.open(out, run.log, [recorder, prepared.hooks], is_writer=trainer.ranks.is_writer):
        checkpoints = build_checkpoints(prepared)
        try:
            emit_start(built, prepared.answers)
            vocabulary = partial(token_bytes, built.inputs.renderer.tokenizer)
            recorder.open(out, vocabulary, start.from_step if run.resume else None, log.show)
            if lock.trouble:
                trainer.emit("warning", name="lock", detail=lock.trouble)
            begin(built, start, out, checkpoints)

            # train, finish, save
            with distributed.explaining(), trainer.meter.running():
                return train_and_save(prepared, checkpoints)

        # end early
        except Interrupt as interrupt:
            raise end_interrupted(trainer, str(interrupt), checkpoints) from None
        except TautError as error:
            final = end_stopped(built, error, checkpoints, prepared.suggest_settings)
            if final is error:
                raise
            raise final from error
        finally:
            checkpoints.close()


def claim_out(built: Built, start: Start, lock: Lock) -> None:
    """Take the directory, unless another run has begun there meanwhile, and write resolved.json."""
    run, out = built.run, lock.out
    if not lock.is_taken:  # the directory was no run when this one looked at it
        lock.take()
        if (out / MARK).is_file():
            raise OutputError(
                f"out={out}: another run began there while this one was made ready; expected no other; name another "
                "out, or give the command again, with resume=true to go on with that run"
            )
    if run.resume and start.num_steps_before != built.trainer.num_steps:
        drop_after(out / BEST, start.from_step)  # before resolved.json has the new number of steps
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


def build_checkpoints(prepared: Prepared) -> Checkpoints:
    """The checkpoints of a run, with every part whose state they hold beside the tensors."""
    built, start, best = prepared.built, prepared.start, prepared.evaluations.best
    trainer = built.trainer
    memories: dict[str, Memory] = {
        type(monitor).__name__: monitor
        for monitor in trainer.monitors
        if isinstance(monitor, Untouched | Spikes | Divergence)
    }
    if trainer.source.state is not None:
        kind = "stream" if isinstance(trainer.source, Streamed) else "online"
        memories[kind] = trainer.source.state
    if best is not None:
        memories["best"] = best
    if prepared.hooks.all:
        memories["hooks"] = prepared.hooks
    return Checkpoints(
        folder=prepared.lock.out / CHECKPOINTS,
        config=built.run.checkpoint,
        is_due=Cadence(built.run.checkpoint.every or 0, trainer).is_due,
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
        memories=memories,
        best_step=lambda: None if best is None else best.step,
        sync_records=trainer.recorder.sync,
        is_over=lambda: prepared.why_over() is not None,
        is_sound=lambda: not Divergence.of(trainer).is_suspected,
    )


def emit_start(built: Built, answers: list[dict[str, Any]]) -> None:
    """Emit the first event, and one for each check that was asked."""
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
    for answer in answers:
        trainer.emit("check", **answer)
    if not answers:
        trainer.emit("check", name="all", outcome="skipped", value=None, detail="check=off")


def train_and_save(prepared: Prepared, checkpoints: Checkpoints) -> Result:
    """Take the remaining steps, evaluate at the end, and save the model."""
    built, evaluations, out = prepared.built, prepared.evaluations, prepared.lock.out
    trainer, run, began = built.trainer, built.run, time.perf_counter()
    questions = choose_goldens(built)

    # train: after each step evaluate, look at the data files, ask the hooks, save a checkpoint if one is due
    def measure(step: int) -> None:
        trainer.ranks.doing(f"evaluating after step {step}")
        with trainer.interrupts.at_once(trainer.ranks):
            evaluations(step)

    data = [built.inputs.train, *([built.inputs.eval] if built.inputs.eval is not None else [])]
    watch = ChangedSources(data, trainer)
    after_step: list[Callable[[int], None]] = [measure, watch, prepared.hooks.agree, checkpoints]
    if isinstance(source := trainer.source, Streamed):

        def leave(step: int) -> None:
            """Forget rows of the stream that no later step needs, neither here nor after a resume."""
            newest = complete(checkpoints.folder)[-run.checkpoint.keep :]
            kept = [step_of(path) for path in newest]
            source.leave(step, min(kept, default=0 if run.checkpoint.every else step))

        after_step.append(leave)
    run_steps(trainer, after_step, prepared.why_over)
    ended_early = prepared.why_over() if trainer.done < trainer.num_steps else None

    # finish: measure the last weights. What fails here leaves the training state, and no model
    trainer.ranks.doing("evaluating at the end")
    with trainer.interrupts.at_once(trainer.ranks):
        try:
            metrics = evaluations.at_end(trainer.done)
            prepared.hooks.agree()
            trainer.ranks.doing("testing whether answers end")
            stops = prepared.stop_check()
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

        # save: model/ gets its name once it is compared with the model in training
        trainer.ranks.doing("writing the model")
        model = save_model(built, out / run.save.result, questions, checkpoints)
        if run.eval.best is not None:
            answer_for_best(built, out / BEST, questions)
    checkpoints.settle()
    watch.look()

    # the last event, which marks the run as finished
    train = built.inputs.train
    divergence, why = Divergence.of(trainer).found, why_nothing_learned(trainer, out)
    trainer.emit(
        "end",
        outcome="finished" if why is None else "learned_nothing",
        step=trainer.done,
        cursor=trainer.source.cursor(trainer.done),
        loss=trainer.loss,
        eval_loss=metrics.get("loss"),
        metrics=metrics,
        seconds=time.perf_counter() - began,
        model=str(model),
        stop=stops.as_fields() if stops is not None else None,
        divergence=divergence,
        **({"data": str(train.report)} if isinstance(train, GrowingDataset) else {}),
        **({} if why is None else {"learned_nothing": why}),
        **({} if ended_early is None else {"ended_early": ended_early}),
        fetched=[fetcher.as_fields() for fetcher in built.inputs.train.fetchers],
    )
    result = Result(out, model, trainer.done, trainer.loss, metrics, stops, divergence)
    return replace(result, ended_early=ended_early).judged(run, why)
