"""What a run leaves behind: ``model/`` and ``adapter/`` at its end, ``best/`` meanwhile, each complete and proven; and
``critic/``, complete. With save.merged=false there is no ``model/``, and ``best/`` is an adapter.

A model is written beside its place, its contract into it, and takes its place when both are there. Where the end cannot
be written or proven, the training state is kept. Under several ranks all of them call; one writes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from torch import Tensor

from taut.data.dataset import read_rows
from taut.data.prompts import PromptSet
from taut.data.schema import best_row
from taut.errors import CheckFailed, OutputError, TautError
from taut.evals.contract import Origin, Question, answer_best, choose_questions, seal, seal_best
from taut.evals.reload import (
    Comparison,
    Trained,
    compare_adapted,
    load_adapted,
    require_sound,
    room_for,
    samples_to_compare,
    score,
)
from taut.io import files
from taut.models.heads import Critic
from taut.models.lora import is_adapted, save_adapter
from taut.models.save import copy_processor, make_readable, saving, serving_tokenizer
from taut.models.scorer import Scorer
from taut.rl.critic import save_critic
from taut.run.setup import Built
from taut.train import distributed
from taut.train.checkpoint import Checkpoints
from taut.train.run_dir import ADAPTER, CRITIC, MODEL
from taut.train.trainer import Trainer


def choose_goldens(built: Built) -> list[Question]:
    """The golden prompts, chosen before training: a row that is gone is told now. For the writer only."""
    run = built.run
    is_asked = run.save.merged and run.contract.prompts and not run.has_scalar_head
    if not is_asked or not built.trainer.ranks.is_writer:
        return []
    split: Literal["eval", "train"] = "eval" if run.data.eval else "train"
    data = built.inputs.train if built.inputs.eval is None else built.inputs.eval
    if isinstance(data, PromptSet):
        return choose_questions(data.questions(), built.inputs.renderer, run.contract.prompts)
    rows = map(best_row, read_rows(run.data, split, kind=run.row_kind))
    return choose_questions(rows, built.inputs.renderer, run.contract.prompts)


def save_model(
    built: Built, directory: Path, questions: Sequence[Question], checkpoints: Checkpoints
) -> Path:
    """Write what the run trained: the model (merged) to ``directory`` and, with adapters, ``adapter/`` next to it; with
    save.merged=false ``directory`` is ``adapter/``, alone, and the ``model/`` of fewer steps is removed. Each takes its
    place once it is proven.

    Where that cannot be done or proven, the training state is kept and the run fails, on all ranks.
    """
    ranks, inputs = built.trainer.ranks, built.inputs
    if built.scorer.critic is not None:
        _save_critic(built, built.scorer.critic, directory.with_name(CRITIC), checkpoints)
    data = inputs.train if inputs.eval is None else inputs.eval
    samples = samples_to_compare(data, [*inputs.new_ids, *inputs.stops.ids])
    logps = score(built.scorer, samples)
    state = distributed.full_state_dict(built.scorer.model, ranks)
    failure = ""
    if ranks.is_writer:
        sharded = state if ranks.size > 1 else None
        trained = Trained(built.scorer.model, sharded, samples, logps, built.models.saved_dtype)
        try:
            _write(built, directory, trained, questions)
        except TautError as error:
            failure = str(error)
    failure = ranks.gather(failure)[0]
    if failure:
        raise CheckFailed(
            f"{failure}; {checkpoints.rescue(built.trainer.done, built.trainer.random)}"
        )
    older = directory.with_name(MODEL)
    if ranks.is_writer and not built.run.save.merged and older.is_dir():
        detail = f"{older} is of fewer steps than {directory}: removed (save.merged=false)"
        built.trainer.emit("warning", name="model", detail=detail)
        files.remove_directory(older)
    return directory


def _save_critic(built: Built, critic: Critic, directory: Path, checkpoints: Checkpoints) -> None:
    """Before the model, whose directory says that a run is complete."""
    inputs = built.inputs
    try:
        save_critic(
            critic,
            directory,
            inputs.tokenizer,
            built.trainer.ranks,
            stop_ids=inputs.stops.ids,
            template=inputs.renderer.template.template,
            dtype=built.models.saved_dtype,
        )
    except OutputError as error:
        rescued = checkpoints.rescue(built.trainer.done, built.trainer.random)
        raise CheckFailed(f"{error}; {rescued}") from error


def _write(built: Built, result: Path, trained: Trained, questions: Sequence[Question]) -> None:
    """Write, prove and put in place the merged model, the adapter, or both; the writer does this for all ranks."""
    run, inputs, device = built.run, built.inputs, built.trainer.ranks.device
    with ExitStack() as stack:
        model = (
            stack.enter_context(_saving_model(built, result, trained.state))
            if run.save.merged
            else None
        )
        adapted: Callable[[], Scorer] | None = None
        if is_adapted(trained.model):
            adapter = result.with_name(ADAPTER)
            adapted = partial(
                load_adapted,
                run.model,
                stack.enter_context(_saving_adapter(built, adapter, trained.state)),
                inputs.new_ids,
                device,
                run.trust_remote_code,
                run.new_head(),
            )
        if model is None:
            assert adapted is not None, "save.merged=false is refused without adapters"
            comparison = compare_adapted(trained, adapted())
            _emit(built.trainer, comparison)
            require_sound([comparison])
            _emit_contract(
                built.trainer,
                0,
                "save.merged=false; `taut merge` writes the model and its contract",
            )
            return
        origin = Origin(
            trained=trained,
            questions=questions,
            stops=inputs.stops,
            config=run.contract,
            device=device,
            trust_remote_code=run.trust_remote_code,
            adapted=adapted,
        )
        began = time.perf_counter()
        contract = seal(model, origin, partial(_emit, built.trainer))
        seconds = time.perf_counter() - began
        answered = f"golden prompts answered; {seconds:.1f} s with what is compared"
        _emit_contract(built.trainer, len(contract.goldens), contract.note or answered)


def _saving_model(
    built: Built, directory: Path, state: Mapping[str, Tensor] | None
) -> AbstractContextManager[Path]:
    inputs = built.inputs
    return saving(
        built.scorer.model,
        inputs.tokenizer,
        directory,
        stop_ids=inputs.stops.ids,
        template=inputs.renderer.template.template,
        dtype=built.models.saved_dtype,
        state_dict=state,
    )


@contextmanager
def _saving_adapter(
    built: Built, directory: Path, state: Mapping[str, Tensor] | None
) -> Iterator[Path]:
    """Write the adapter and its tokenizer; they replace ``directory`` when the block ends. Where it raises, nothing is
    replaced.
    """
    inputs, model = built.inputs, built.scorer.model
    beside = directory.with_name(f".{directory.name}.partial")
    template = inputs.renderer.template.template
    has_scalar = built.run.has_scalar_head
    served = serving_tokenizer(inputs.tokenizer, inputs.stops.ids, template, has_scalar=has_scalar)
    try:
        with _naming(directory):
            shutil.rmtree(beside, ignore_errors=True)
            save_adapter(model, beside, state)
            copy_processor(model, beside, has_template=template is not None)
            make_readable(beside)
            served.save_pretrained(beside)
        yield beside
        with _naming(directory):
            files.replace_directory(beside, directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Turn an error of the file system into an OutputError that names the adapter's directory."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{directory} cannot be written: {error}; expected room and permission for the adapter"
        ) from error


def _emit(trainer: Trainer, found: Comparison) -> None:
    outcome = "passed" if found.is_sound else "failed"
    trainer.emit("check", name=found.name, outcome=outcome, value=found.value, detail=found.detail)


def _emit_contract(trainer: Trainer, num_goldens: int, detail: str) -> None:
    outcome = "passed" if num_goldens else "skipped"
    trainer.emit("check", name="contract", outcome=outcome, value=num_goldens, detail=detail)


def save_best(built: Built, directory: Path, finish: Callable[[Path], None]) -> None:
    """Write the model as it is now (merged, or its adapter alone: save.merged); it takes its place once ``finish`` has
    completed it.
    """
    run, ranks = built.run, built.trainer.ranks
    whole = distributed.full_state_dict(built.scorer.model, ranks)
    state = whole if ranks.size > 1 else None
    if ranks.is_writer and run.save.merged:
        with _saving_model(built, directory, state) as partial_directory:
            seal_best(partial_directory, built.inputs.stops, run.contract, run.trust_remote_code)
            finish(partial_directory)
    elif ranks.is_writer:
        with _saving_adapter(built, directory, state) as partial_directory:
            finish(partial_directory)
    ranks.barrier()


def answer_for_best(built: Built, best: Path, questions: Sequence[Question]) -> None:
    """The best model's answers to the golden prompts, into its contract: once, when the best is known."""
    run, trainer = built.run, built.trainer
    is_asked = run.save.merged and run.contract.prompts and not run.has_scalar_head
    if trainer.ranks.is_writer and best.is_dir() and is_asked:
        use = room_for(built.scorer.model, trainer.ranks.device), run.trust_remote_code
        try:
            answer_best(best, questions, built.inputs.stops, run.contract, use)
        except (TautError, OSError) as error:  # the model itself is in place
            trainer.emit("warning", name="best", detail=f"{best} has no golden answers: {error}")
    trainer.ranks.barrier()
