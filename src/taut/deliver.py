"""What a run leaves behind: ``model/`` and ``adapter/`` at its end, ``best/`` meanwhile, each complete and proven; and
``critic/``, complete.

A model is written beside its place, its contract into it, and takes its place when both are there. Where the end cannot
be written or proven, the training state is kept. Under several ranks all of them call; one writes.

May import run and what is below it. ``api`` imports it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from taut import durable, parallel
from taut.build import Built
from taut.checkpoint import Checkpoints
from taut.contract import Origin, answer_best, seal, seal_best
from taut.data.dataset import read_rows
from taut.data.preferences import best_row
from taut.data.prompt_set import PromptSet
from taut.errors import CheckFailed, OutputError, TautError
from taut.golden import Question, choose_questions
from taut.loop import Job
from taut.methods.critic import save_critic
from taut.models.critic import Critic
from taut.models.lora import is_adapted, save_adapter
from taut.models.processor_files import copy_processor
from taut.models.save import make_readable, saving, serving_tokenizer
from taut.outdir import CRITIC
from taut.reloaded import Comparison, Trained, load_adapted, room_for, samples_to_compare, score


def choose_goldens(built: Built) -> list[Question]:
    """The golden prompts, chosen before training: a row that is gone is told now. For the writer only."""
    run = built.run
    is_asked = run.contract.prompts and run.objective.head is None
    if not is_asked or not built.job.ranks.is_writer:
        return []
    split: Literal["eval", "train"] = "eval" if run.data.eval else "train"
    data = built.inputs.train if built.inputs.eval is None else built.inputs.eval
    if isinstance(data, PromptSet):
        return choose_questions(data.questions(), built.inputs.renderer, run.contract.prompts)
    rows = map(best_row, read_rows(run.data, split, kind=run.objective.kind))
    return choose_questions(rows, built.inputs.renderer, run.contract.prompts)


def save_model(
    built: Built, directory: Path, questions: Sequence[Question], checkpoints: Checkpoints
) -> Path:
    """Write the model (merged), which takes its place once it is proven, and, with adapters, ``adapter/`` beside it.

    Where that cannot be done or proven, the training state is kept and the run fails, on all ranks.
    """
    ranks, inputs = built.job.ranks, built.inputs
    if built.scorer.critic is not None:
        _save_critic(built, built.scorer.critic, directory.with_name(CRITIC), checkpoints)
    data = inputs.train if inputs.eval is None else inputs.eval
    samples = samples_to_compare(data, [*inputs.new_ids, *inputs.stops.ids])
    logps = score(built.scorer, samples)
    state = parallel.whole_state_dict(built.scorer.model, ranks)
    failure = ""
    if ranks.is_writer:
        sharded = state if ranks.size > 1 else None
        trained = Trained(built.scorer.model, sharded, samples, logps, built.saved_dtype)
        try:
            _write(built, directory, trained, questions)
        except TautError as error:
            failure = str(error)
    failure = ranks.gather(failure)[0]
    if failure:
        raise CheckFailed(f"{failure}; {checkpoints.rescue(built.job.done, built.job.random)}")
    return directory


def _save_critic(built: Built, critic: Critic, directory: Path, checkpoints: Checkpoints) -> None:
    """Before the model, whose directory says that a run is complete."""
    inputs = built.inputs
    try:
        save_critic(
            critic,
            directory,
            inputs.tokenizer,
            built.job.ranks,
            stop_ids=inputs.stops.ids,
            template=inputs.renderer.template.template,
            dtype=built.saved_dtype,
        )
    except OutputError as error:
        rescued = checkpoints.rescue(built.job.done, built.job.random)
        raise CheckFailed(f"{error}; {rescued}") from error


def _write(built: Built, model: Path, trained: Trained, questions: Sequence[Question]) -> None:
    """What the writer does for all."""
    run, inputs, device = built.run, built.inputs, built.job.ranks.device
    adapter, adapted = model.with_name("adapter"), None
    if is_adapted(trained.model):
        _write_adapter(built, adapter, trained)
        adapted = partial(
            load_adapted,
            run.model,
            adapter,
            inputs.new_ids,
            device,
            run.trust_remote_code,
            run.objective.head,
        )
    origin = Origin(
        trained=trained,
        questions=questions,
        stops=inputs.stops,
        config=run.contract,
        device=device,
        trust_remote_code=run.trust_remote_code,
        adapted=adapted,
    )
    with saving(
        trained.model,
        inputs.tokenizer,
        model,
        stop_ids=inputs.stops.ids,
        template=inputs.renderer.template.template,
        dtype=trained.dtype,
        state_dict=trained.state,
    ) as directory:
        began = time.perf_counter()
        contract = seal(directory, origin, partial(_emit, built.job))
        seconds = time.perf_counter() - began
        built.job.emit(
            "check",
            name="contract",
            outcome="passed" if contract.goldens else "skipped",
            value=len(contract.goldens),
            detail=contract.note
            or f"golden prompts answered; {seconds:.1f} s with what is compared",
        )


def _write_adapter(built: Built, directory: Path, trained: Trained) -> None:
    inputs, beside = built.inputs, directory.with_name(f".{directory.name}.partial")
    template = inputs.renderer.template.template
    try:
        shutil.rmtree(beside, ignore_errors=True)
        save_adapter(trained.model, beside, trained.state)
        copy_processor(trained.model, beside, has_template=template is not None)
        make_readable(beside)
        has_scalar = built.run.objective.head is not None
        served = serving_tokenizer(
            inputs.tokenizer, inputs.stops.ids, template, has_scalar=has_scalar
        )
        served.save_pretrained(beside)
        durable.replace_directory(beside, directory)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{directory} cannot be written: {error}; expected room and permission for the adapter"
        ) from error


def _emit(job: Job, found: Comparison) -> None:
    outcome = "passed" if found.is_sound else "failed"
    job.emit("check", name=found.name, outcome=outcome, value=found.value, detail=found.detail)


def save_best(built: Built, directory: Path, finish: Callable[[Path], None]) -> None:
    """Write the model as it is now, merged; it takes its place once ``finish`` has completed it."""
    inputs, ranks = built.inputs, built.job.ranks
    state = parallel.whole_state_dict(built.scorer.model, ranks)
    if ranks.is_writer:
        with saving(
            built.scorer.model,
            inputs.tokenizer,
            directory,
            stop_ids=inputs.stops.ids,
            template=inputs.renderer.template.template,
            dtype=built.saved_dtype,
            state_dict=state if ranks.size > 1 else None,
        ) as partial_directory:
            run = built.run
            seal_best(partial_directory, inputs.stops, run.contract, run.trust_remote_code)
            finish(partial_directory)
    ranks.barrier()


def answer_for_best(built: Built, best: Path, questions: Sequence[Question]) -> None:
    """The best model's answers to the golden prompts, into its contract: once, when the best is known."""
    run, job = built.run, built.job
    is_asked = run.contract.prompts and run.objective.head is None
    if job.ranks.is_writer and best.is_dir() and is_asked:
        use = room_for(built.scorer.model, job.ranks.device), run.trust_remote_code
        try:
            answer_best(best, questions, built.inputs.stops, run.contract, use)
        except (TautError, OSError) as error:  # the model itself is in place
            job.emit("warning", name="best", detail=f"{best} has no golden answers: {error}")
    job.ranks.barrier()
