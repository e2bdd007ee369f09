"""``taut merge MODEL adapter=DIR out=DIR``: a base model and a LoRA adapter -> one model directory.

Takes any LoRA adapter in peft's format, also with modules trained in full, trained embedding rows, and an enlarged
vocabulary. Refuses an ``out`` that exists, another kind of adapter, and an adapter with tensors missing or without a
place in the base model. The result has the base's dtype, the stop set, and a contract. Adapter, merged and reloaded
model are compared before the result appears, as after training. An adapter that was trained on a quantized base (the
file next to it says so) is merged into the dequantized weights, because on the unquantized base it would be another
model; the difference is reported.

Golden prompts are rows of ``data``, else built-in ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from taut.commands.settings import Merge
from taut.config import home_path
from taut.data.dataset import build_renderer, read_rows
from taut.data.render.stop_tokens import derive_stop_set, described
from taut.data.rows.messages import Row
from taut.data.settings import DataConfig
from taut.data.store.cache import default_directory
from taut.errors import OutputError
from taut.evals.contract import FILE, SavedModelTest, built_in_rows, choose_questions
from taut.evals.round_trip import (
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
from taut.models.attention_backends import select_for_proof
from taut.models.load import (
    checkpoint_dtype,
    has_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    stop_ids_in_files,
)
from taut.models.lora.adapters import adapter_settings, base_of, load_adapter
from taut.models.quantized.frozen_storage import Storage
from taut.models.save import saving
from taut.models.scorer import Scorer
from taut.train import distributed
from taut.vision.image_store import open_image_store
from taut.vision.settings import ImagesConfig


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
    quantize: str | None = None
    """Quantization of the base that the adapter was trained on."""
    unquantized: Comparison | None = None
    """Comparison of the adapter on that base with the adapter on the unquantized base."""

    def __repr__(self) -> str:
        return f"Merged({self.out}: {counted(self.num_tensors, 'tensors')} of rank {self.rank})"


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
    if merged.unquantized is not None:
        lines.append(
            f"base    merged as quantized in training ({merged.quantize}), into the numbers of its codes; on the base "
            f"as it is, logprobs would differ by up to {merged.unquantized.value:.3g} ({merged.unquantized.detail})"
        )
    Terminal(soft_wrap=True).lines(lines)
    return 0


def merge(config: Merge) -> Merged:
    """Write ``config.out``. Raises TautError; CheckFailed if the merged model differs from base plus adapter."""
    out, adapter = home_path(config.out), home_path(config.adapter)
    if out.exists():
        raise OutputError(f"out={out} exists; expected a new directory; name another, or remove it")
    # base, tokenizer, template and stop set
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
    # the base as the adapter was trained on it
    device = distributed.start(config.device).device
    dtype, storage = checkpoint_dtype(base), None
    trained_on = base_of(adapter)
    quantize = None if trained_on is None else trained_on.quantize
    if quantize is not None:
        whole = tuple(settings.get("modules_to_save") or ())
        storage = Storage(torch.float32, torch.float32, quantize, whole)
    model = load_model(
        config.model,
        dtype=torch.float32,
        device=device,
        attention=select_for_proof(device, torch.float32, base),
        trust_remote_code=config.trust_remote_code,
        storage=storage,
    )
    # the adapter on it, which the merged model is compared with
    adapted, new_ids, num_tensors = load_adapter(model, adapter, settings)
    scorer = Scorer(adapted).eval()
    rows: Iterable[Row] = built_in_rows(renderer)
    samples = list(chain.from_iterable(renderer.render_all(list(rows))))
    samples = samples_to_compare(samples, [*new_ids, *stops.ids])
    if config.data is not None:
        rows = read_rows(DataConfig(train=config.data), "train")
    trained = Trained(scorer.model, None, samples, score(scorer, samples), dtype)
    # what the adapter would be on the unquantized base
    unquantized = None
    if quantize is not None:
        what = f"the adapter on the base in {quantize}, and on the base as it is"
        trust, anew = config.trust_remote_code, room_for(scorer.model, scorer.device)
        scores = score(load_adapted(config.model, adapter, new_ids, anew, trust), samples)
        unquantized = compare("unquantized", what, trained, scores)
    # saved, reloaded, compared and asked, before it appears
    test = SavedModelTest(
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
        test.run(directory, checks.append)
    return Merged(
        out=out,
        rank=str(settings.get("r")),
        num_tensors=num_tensors,
        num_new_rows=len(new_ids),
        dtype=dtype,
        stops=described(stops, renderer.template),
        checks=checks,
        quantize=quantize,
        unquantized=unquantized,
    )
