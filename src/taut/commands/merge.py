"""``taut merge MODEL adapter=DIR out=DIR``: a base model and a LoRA adapter -> one model directory.

Takes any LoRA adapter in peft's format, also with modules trained in full, trained embedding rows, and an enlarged
vocabulary. Refused: an ``out`` that exists, another kind of adapter, one with tensors that the base model has no place
for, or that leaves places empty. The result has the base's dtype, the stop set, and a contract. Adapter, merged and
reloaded model are compared before the result appears, as after training. An adapter that was trained on a quantised
base (the file next to it says so) is merged into the numbers that the codes stand for: on the base as it is it would
be another model, and how different is reported.

Golden prompts are rows of ``data``, else built-in ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from taut.config import configclass, home_path
from taut.data.cache import default_directory
from taut.data.dataset import DataConfig, build_renderer, read_rows
from taut.data.messages import Row
from taut.data.stop_tokens import derive_stop_set, described
from taut.errors import OutputError
from taut.evals.contract import FILE, ContractConfig, Origin, built_in_rows, choose_questions, seal
from taut.evals.reload import (
    Comparison,
    Trained,
    compare,
    load_adapted,
    room_for,
    samples_to_compare,
    score,
)
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.models.attention_backends import select
from taut.models.frozen import Storage
from taut.models.load import (
    checkpoint_dtype,
    has_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    stop_ids_in_files,
)
from taut.models.lora import adapter_settings, base_of, load_adapter
from taut.models.save import saving
from taut.models.scorer import Scorer
from taut.train import distributed
from taut.vision.content import ImagesConfig
from taut.vision.image_store import open_image_store


@configclass
class Merge:
    """Merge a base model and a LoRA adapter."""

    model: str
    """Directory (or hub name) of the base model."""
    adapter: str
    """Directory of the LoRA adapter."""
    out: str
    """The model directory to write; it must not exist."""
    data: str | None = None
    """Rows whose prompts become golden prompts of the contract; by default a few built-in ones."""
    template: str | None = None
    """A file with a chat template to use and save instead of the tokenizer's own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    contract: ContractConfig = ContractConfig()


@dataclass(frozen=True)
class Merged:
    """The result."""

    out: Path
    rank: str
    num_tensors: int
    """Tensors of the adapter."""
    num_new_rows: int
    """Rows added to the embedding tables."""
    dtype: torch.dtype
    stops: tuple[str, str]
    """The stop set and the reason."""
    checks: list[Comparison]
    quantise: str | None = None
    """How the base was quantised that the adapter was trained on."""
    unquantised: Comparison | None = None
    """The adapter on that base, compared with the adapter on the base as it is."""


def run(config: Merge) -> int:
    """Merge and print a summary."""
    merged = merge(config)
    dtype = str(merged.dtype).removeprefix("torch.")
    rows = f", {counted(merged.num_new_rows, 'rows')} added" if merged.num_new_rows else ""
    lines = [
        *(f"passed  {test.name}: {test.value:.3g} ({test.detail})" for test in merged.checks),
        f"merged  {counted(merged.num_tensors, 'tensors')} of rank {merged.rank} into {config.model}{rows}; saved in "
        f"{dtype}",
        f"stops   {merged.stops[0]} ({merged.stops[1]})",
        f"written {merged.out}, with {FILE}",
    ]
    if merged.unquantised is not None:
        lines.append(
            f"base    quantised as {merged.quantise} in training, and so merged: into the numbers that its codes stand "
            f"for. On the base as it is, logprobs would differ by up to {merged.unquantised.value:.3g} "
            f"({merged.unquantised.detail})"
        )
    Terminal(soft_wrap=True).lines(lines)
    return 0


def merge(config: Merge) -> Merged:
    """Write ``config.out``. Raises TautError; CheckFailed where the merged model differs from base plus adapter."""
    out, adapter = home_path(config.out), home_path(config.adapter)
    if out.exists():
        raise OutputError(f"out={out} exists; expected a new directory; name another, or remove it")
    settings = adapter_settings(adapter)
    base = load_config(config.model, config.trust_remote_code)
    place = str(adapter) if has_tokenizer(str(adapter)) else config.model
    tokenizer = load_tokenizer(place, config.trust_remote_code)
    image_store = open_image_store(
        config.model,
        base,
        tokenizer,
        ImagesConfig(),
        default_directory(),
        trust_remote_code=config.trust_remote_code,
    )
    renderer = build_renderer(DataConfig(template=config.template), tokenizer, image_store)
    stops = derive_stop_set(renderer, stop_ids_in_files(config.model, base))
    device = distributed.start(config.device).device
    dtype, storage = checkpoint_dtype(base), None
    trained_on = base_of(adapter)
    quantise = None if trained_on is None else trained_on.quantise
    if quantise is not None:
        whole = tuple(settings.get("modules_to_save") or ())
        storage = Storage(torch.float32, torch.float32, quantise, whole)
    model = load_model(
        config.model,
        dtype=torch.float32,
        device=device,
        attention=select("auto", device, torch.float32, base).implementation,
        trust_remote_code=config.trust_remote_code,
        storage=storage,
    )
    adapted, new_ids, num_tensors = load_adapter(model, adapter, settings)
    scorer = Scorer(adapted).eval()
    rows: Iterable[Row] = built_in_rows(renderer)
    samples = list(chain.from_iterable(renderer.render_all(list(rows))))
    samples = samples_to_compare(samples, [*new_ids, *stops.ids])
    if config.data is not None:
        rows = read_rows(DataConfig(train=config.data), "train")
    trained = Trained(scorer.model, None, samples, score(scorer, samples), dtype)
    unquantised = None
    if quantise is not None:
        what = f"the adapter on the base in {quantise}, and on the base as it is"
        trust, anew = config.trust_remote_code, room_for(scorer.model, scorer.device)
        scores = score(load_adapted(config.model, adapter, new_ids, anew, trust), samples)
        unquantised = compare("unquantised", what, trained, scores)
    origin = Origin(
        trained=trained,
        questions=choose_questions(rows, renderer, config.contract.prompts),
        stops=stops,
        config=config.contract,
        device=scorer.device,
        trust_remote_code=config.trust_remote_code,
    )
    checks: list[Comparison] = []
    with saving(
        scorer.model,
        tokenizer,
        out,
        stop_ids=stops.ids,
        template=renderer.template.template,
        dtype=dtype,
    ) as directory:
        seal(directory, origin, checks.append)
    return Merged(
        out=out,
        rank=str(settings.get("r")),
        num_tensors=num_tensors,
        num_new_rows=len(new_ids),
        dtype=dtype,
        stops=described(stops, renderer.template),
        checks=checks,
        quantise=quantise,
        unquantised=unquantised,
    )
