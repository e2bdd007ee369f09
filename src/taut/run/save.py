"""Save the results of a run.

    model/     the trained model, with its contract; not with save.merged=false
    adapter/   with LoRA, beside it or alone
    critic/    with a critic that has its own weights
    best/      the best model so far, during training; with save.merged=false an adapter

Each is written to a partial directory, compared with the model in training, and renamed when it is complete. Where
saving or a comparison fails at the end, the training state is saved; where a comparison cannot be made, whatever the
reason, what was written is kept as model.unproven/ too. All ranks call these functions; the writer writes.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from torch import Tensor

from taut.data.dataset import read_rows
from taut.data.rows.prompts import PromptSet
from taut.data.rows.schema import best_row
from taut.data.stream import StreamDataset
from taut.errors import CheckFailed, OutputError, TautError
from taut.evals.contract import (
    Question,
    SavedModelTest,
    choose_questions,
    complete_best_contract,
    write_best_contract,
)
from taut.evals.round_trip import (
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
from taut.methods.aux_models import save_critic
from taut.methods.method import RunConfig
from taut.models.lora.adapters import is_adapted, write_base
from taut.models.lora.merge import Whole, save_adapter
from taut.models.save import copy_processor, make_readable, saving, serving_tokenizer
from taut.models.scorer import Scorer
from taut.run.setup import Built
from taut.train import distributed
from taut.train.checkpoint import Checkpoints
from taut.train.run_dir import ADAPTER, CRITIC, MODEL, UNPROVEN


def choose_goldens(built: Built) -> list[Question]:
    """Choose the golden prompts, on the writer only; before training, so that a missing row is reported early."""
    run = built.run
    if not _has_goldens(run) or not built.trainer.ranks.is_writer:
        return []
    split: Literal["eval", "train"] = "eval" if run.data.eval else "train"
    data = built.inputs.train if built.inputs.eval is None else built.inputs.eval
    if isinstance(data, PromptSet):
        return choose_questions(data.questions(), built.inputs.renderer, run.contract.prompts)
    if isinstance(data, StreamDataset):
        rows = data.stream.first_rows()
    else:
        rows = read_rows(run.data, split, kind=run.row_kind)
    return choose_questions(map(best_row, rows), built.inputs.renderer, run.contract.prompts)


def _has_goldens(run: RunConfig) -> bool:
    return run.save.merged and run.contract.prompts > 0 and not run.has_scalar_head


def save_model(
    built: Built, directory: Path, questions: Sequence[Question], checkpoints: Checkpoints
) -> Path:
    """Save the trained model in ``directory``: ``model/``, with ``adapter/`` beside it where there is one; with
    save.merged=false ``adapter/``, and a ``model/`` of fewer steps is removed.

    Raises CheckFailed on all ranks, with the training state saved, where writing or comparing fails.
    """
    # the critic
    ranks, inputs, critic = built.trainer.ranks, built.inputs, built.scorer.critic
    if critic is not None:  # before the model, whose directory marks a run as complete
        try:
            save_critic(critic, directory.with_name(CRITIC), inputs, built.models, ranks)
        except OutputError as error:
            rescued = checkpoints.rescue(built.trainer.done, built.trainer.random)
            raise CheckFailed(f"{error}; {rescued}") from error

    # the model and the adapter, by the writer, to which the other ranks send their shards
    data = inputs.train if inputs.eval is None else inputs.eval
    samples = samples_to_compare(data, [*inputs.new_ids, *inputs.stops.ids])
    logps: list[Tensor] = []
    unscored: Exception | None = None
    try:
        logps = score(built.scorer, samples)
    except Exception as error:  # noqa: BLE001 (raised once the model is written)
        unscored = error

    def write(whole: Whole) -> None:
        trained = Trained(built.scorer.model, whole, samples, logps, built.models.saved_dtype)
        _write(built, directory, trained, questions, unscored)

    failure = ""
    try:
        distributed.run_with_whole_tensors(built.scorer.model, ranks, write)
    except TautError as error:
        # the text alone: the error holds the frames with the model that was compared
        failure = str(error)
    if failure:
        rescued = checkpoints.rescue(built.trainer.done, built.trainer.random)
        raise CheckFailed(f"{failure}; {rescued}")
    if ranks.is_writer:
        files.remove(directory.with_name(UNPROVEN))

    # with save.merged=false, a model/ that an earlier end of this run has left
    older = directory.with_name(MODEL)
    if ranks.is_writer and not built.run.save.merged and older.is_dir():
        detail = f"{older} is of fewer steps than {directory}: removed (save.merged=false)"
        built.trainer.emit("warning", name="model", detail=detail)
        files.remove_directory(older)
    return directory


@contextmanager
def _kept_if_not_compared(written: Path, result: Path) -> Iterator[None]:
    """Keep what is written as ``UNPROVEN`` where the block, which compares it, raises anything but a finding: a trained
    model must not be lost to what proves it.
    """
    try:
        yield
    except (TautError, OSError, SafetensorError):  # a finding, or told with the directory
        raise
    except Exception as error:
        unproven = result.with_name(UNPROVEN)
        files.remove(unproven)
        written.rename(unproven)
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).splitlines() or [""])[0]
        raise CheckFailed(
            f"the saved model cannot be compared with the trained one: {type(error).__name__}: {said} "
            f"({Path(place.filename).name}:{place.lineno}); {unproven} has it, complete and not compared"
        ) from error


def _write(
    built: Built,
    result: Path,
    trained: Trained,
    questions: Sequence[Question],
    unscored: Exception | None,
) -> None:
    """Write, compare and rename the merged model, the adapter, or both. Called on the writer. ``unscored``: why the
    trained model has no scores.
    """
    run, inputs, device = built.run, built.inputs, built.trainer.ranks.device
    emit = built.trainer.emit

    def emit_comparison(comparison: Comparison) -> None:
        outcome = "passed" if comparison.is_sound else "failed"
        name, value, detail = comparison.name, comparison.value, comparison.detail
        emit("check", name=name, outcome=outcome, value=value, detail=detail)

    with ExitStack() as stack:
        # write to partial directories
        if run.save.merged:
            model = stack.enter_context(_saving_model(built, result, trained.whole))
        adapted: Callable[[], Scorer] | None = None
        if is_adapted(trained.model):
            adapter = result.with_name(ADAPTER)
            written = stack.enter_context(_saving_adapter(built, adapter, trained.whole))

            def load() -> Scorer:
                """Load the adapter on a second copy of the base."""
                return load_adapted(
                    run.model,
                    written,
                    inputs.new_ids,
                    room_for(trained.model, device),
                    run.trust_remote_code,
                    run.new_head(),
                    built.models.loaded.storage,
                )

            adapted = load

        # compare; with a merged model also answer the golden prompts. What differs is raised, and nothing is renamed
        complete = model if run.save.merged else written
        with _kept_if_not_compared(complete, result):
            if unscored is not None:
                raise unscored
            if not run.save.merged:
                assert adapted is not None, "save.merged=false is refused without adapters"
                comparison = compare_adapted(trained, adapted())
                emit_comparison(comparison)
                require_sound([comparison])
                num_goldens = 0
                detail = "save.merged=false; `taut merge` writes the model and its contract"
            else:
                test = SavedModelTest(
                    trained=trained,
                    questions=questions,
                    stops=inputs.stops,
                    config=run.contract,
                    device=device,
                    trust_remote_code=run.trust_remote_code,
                    adapted=adapted,
                )
                began = time.perf_counter()
                contract = test.run(model, emit_comparison)
                seconds = time.perf_counter() - began
                num_goldens = len(contract.goldens)
                answered = f"golden prompts answered; {seconds:.1f} s with what is compared"
                detail = contract.note or answered
        outcome = "passed" if num_goldens else "skipped"
        emit("check", name="contract", outcome=outcome, value=num_goldens, detail=detail)


def _saving_model(
    built: Built, directory: Path, whole: Whole | None
) -> AbstractContextManager[Path]:
    inputs = built.inputs
    return saving(
        built.scorer.model,
        inputs.tokenizer,
        directory,
        stop_ids=inputs.stops.ids,
        template=inputs.renderer.template.template,
        dtype=built.models.saved_dtype,
        whole=whole,
    )


@contextmanager
def _saving_adapter(built: Built, directory: Path, whole: Whole | None) -> Iterator[Path]:
    """Write the adapter and its tokenizer to a partial directory, which replaces ``directory`` at the end of the block
    unless the block raises.
    """
    inputs, model = built.inputs, built.scorer.model
    template = inputs.renderer.template.template
    has_scalar = built.run.has_scalar_head
    served = serving_tokenizer(inputs.tokenizer, inputs.stops.ids, template, has_scalar=has_scalar)
    try:
        with files.replacing_directory(directory) as partial_directory:
            save_adapter(model, partial_directory, whole)
            write_base(partial_directory, built.run.model, built.run.quantize)
            copy_processor(model, partial_directory, has_template=template is not None)
            make_readable(partial_directory)
            served.save_pretrained(partial_directory)
            yield partial_directory
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{directory} cannot be written: {error}; expected room and permission for the adapter"
        ) from error


def save_best(built: Built, directory: Path, finish: Callable[[Path], None]) -> None:
    """Save the current model in ``directory``: merged, or with save.merged=false its adapter. ``finish`` is called with
    the partial directory before it is renamed.
    """
    run, ranks = built.run, built.trainer.ranks
    with distributed.whole_tensors(built.scorer.model, ranks) as whole:
        if whole is not None and run.save.merged:
            with _saving_model(built, directory, whole) as partial_directory:
                stops, trusts = built.inputs.stops, run.trust_remote_code
                write_best_contract(partial_directory, stops, run.contract, trusts)
                finish(partial_directory)
        elif whole is not None:
            with _saving_adapter(built, directory, whole) as partial_directory:
                finish(partial_directory)


def answer_for_best(built: Built, best: Path, questions: Sequence[Question]) -> None:
    """Add the best model's answers to golden prompts to its contract, after training."""
    run, trainer = built.run, built.trainer
    if trainer.ranks.is_writer and best.is_dir() and _has_goldens(run):
        use = room_for(built.scorer.model, trainer.ranks.device), run.trust_remote_code
        try:
            complete_best_contract(best, questions, built.inputs.stops, run.contract, use)
        except (TautError, OSError) as error:  # the model itself is saved
            trainer.emit("warning", name="best", detail=f"{best} has no golden answers: {error}")
    trainer.ranks.barrier()
