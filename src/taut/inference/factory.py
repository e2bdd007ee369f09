"""A model directory and an engine's settings -> an engine that is ready, with all that goes with it.

``ModelUse`` is the head of the configuration of every command that uses a finished model (generate, eval, chat,
verify). The local engine's weights are kept in the dtype it computes in, since nothing is trained; the model passes the
same start-up checks as in training. Models for which answers would not be exact are refused: layers with state across
tokens, by name, and RoPE beyond the length up to which it does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, home_path
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import StopSet, derive_stop_set, described
from taut.data.render.template_files import read_template
from taut.data.store.cache import default_directory
from taut.errors import ConfigError
from taut.inference.engine import Engine
from taut.inference.local import LocalEngine, require_stateless
from taut.inference.settings import JudgeUse, ModelUse
from taut.inference.vllm import ServerEngine
from taut.models import architecture
from taut.models.attention_backends import activate_flash_attention, select
from taut.models.cpu import cpu_matmul
from taut.models.load import (
    checkpoint_dtype,
    context_length,
    has_tokenizer,
    load_config,
    load_model,
    load_skeleton,
    load_tokenizer,
    stop_ids_in_files,
)
from taut.models.lora.adapters import adapter_settings, load_adapter
from taut.models.precision import ChosenDtype, backward_context, resolve_dtype
from taut.models.quantized.frozen_storage import storage_of
from taut.models.quantized.quantized_layers import format_of
from taut.models.scorer import Scorer
from taut.models.self_test import run_self_test
from taut.train import distributed
from taut.vision.image_store import open_image_store

PROVED = 64
"""Tokens of the self-test's longest sample for a model without a context length."""


@dataclass(frozen=True)
class OpenEngine:
    """An engine and what its prompts are made with. ``with`` closes it."""

    engine: Engine
    renderer: Renderer
    stops: StopSet
    context: int | None
    """Tokens prompt and completion may have together."""
    decisions: list[Decision]
    close: Callable[[], None] = lambda: None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.renderer.tokenizer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Rendering:
    """Tokenizer, template and stop set: a model without its weights."""

    config: PreTrainedConfig
    renderer: Renderer
    stops: StopSet
    decisions: list[Decision]


def open_renderer(use: ModelUse) -> Rendering:
    """Load tokenizer, template and stop set, which is quick: prompts can be read before the weights."""
    config = load_config(use.model, use.trust_remote_code)
    decisions: list[Decision] = []
    # The tokenizer: the adapter's, if it has one.
    tokenizer_path = use.model
    if use.adapter is not None and has_tokenizer(use.adapter):
        tokenizer_path = use.adapter
        decisions.append(Decision("tokenizer", use.adapter, "the adapter brings its own"))
    tokenizer = load_tokenizer(tokenizer_path, use.trust_remote_code)
    renderer = renderer_of(
        use,
        config,
        tokenizer,
        variables=use.chat_template_kwargs,
        control_tokens=use.control_tokens,
    )
    stops = derive_stop_set(renderer, stop_ids_in_files(use.model, config))
    decisions.append(Decision("stop", *described(stops, renderer.template)))
    return Rendering(config, renderer, stops, decisions)


def renderer_of(
    use: ModelUse | JudgeUse,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path | None = None,
    **options: Any,
) -> Renderer:
    """The renderer of a finished model, with its store of images. ``directory``: for copies of pictures; by default the
    cache's; ``options``: further ones of Renderer.
    """
    image_store = open_image_store(
        use.model,
        config,
        tokenizer,
        use.images,
        directory or default_directory(),
        use.trust_remote_code,
        key="images",
    )
    template = read_template(use.template, tokenizer, "template", is_of_run=False)
    return Renderer(tokenizer, template, key="template", image_store=image_store, **options)


def open_engine(use: ModelUse, rendering: Rendering | None = None) -> OpenEngine:
    """The engine that ``use`` asks for, ready to generate. ``rendering``: of the same ``use``, if it is open already.

    Raises TautError where it cannot be opened.
    """
    rendering = open_renderer(use) if rendering is None else rendering
    config, renderer, stops = rendering.config, rendering.renderer, rendering.stops
    tokenizer = renderer.tokenizer
    if use.engine == "server":
        assert use.urls is not None
        context = context_length(config)
        server = ServerEngine.open(use.urls, use.server, tokenizer, stops.ids, context, section="")
        decisions = [*rendering.decisions, *server.decisions]
        return OpenEngine(server, renderer, stops, server.context, decisions, server.close)
    # The local engine: what it can compute exactly, and by which kernels.
    skeleton = load_skeleton(use.model, config, use.trust_remote_code)
    require_stateless(skeleton, f"model={use.model}")
    context, decisions = exact_context(config, skeleton, "the sequence's length")
    device = one_device(use.device)
    dtype = inference_dtype(use.dtype, device, "on a CPU, unless another is asked for")
    chosen = select(use.attention, device, dtype.dtype, config)
    flash = activate_flash_attention(chosen.name, device, config)
    cpu_matmul.use(cpu_matmul.select(use.cpu_matmul, device, dtype.dtype, engine=dtype.dtype))
    # Load the model, with its adapter merged.
    storage = None
    if format_of(config) == "bitsandbytes" and use.adapter is None:
        storage = storage_of(checkpoint_dtype(config), dtype.dtype, device, "auto")
    model = load_model(
        use.model,
        dtype=dtype.dtype,
        device=device,
        attention=chosen.implementation,
        trust_remote_code=use.trust_remote_code,
        is_narrow=use.adapter is None,
        storage=storage,
    )
    if use.adapter is not None:  # merged in full precision, then narrowed
        adapter = home_path(use.adapter)
        wrapped: Any = load_adapter(model, adapter, adapter_settings(adapter)).model
        model = wrapped.merge_and_unload(safe_merge=True)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype.dtype)
    # Prove that packed and alone agree.
    scorer = Scorer(model.requires_grad_(False)).eval()
    compute = partial(inference_context, dtype.dtype)
    run_self_test(scorer, compute(), dtype.dtype, context or PROVED)
    engine = LocalEngine(
        scorer, tokenizer, stops.ids, context=context, compute=compute, config=use.local
    )
    decisions = [
        *rendering.decisions,
        *decisions,
        Decision("dtype", str(dtype.dtype).removeprefix("torch."), dtype.reason),
        Decision("attention", chosen.name, chosen.reason),
        *flash,
        *distributed.thread_decisions(device),
        *cpu_matmul.active().decisions,
    ]
    return OpenEngine(engine, renderer, stops, context, decisions)


def exact_context(
    config: PreTrainedConfig, skeleton: nn.Module, dependence: str
) -> tuple[int | None, list[Decision]]:
    """The longest sequence that is computed exactly. ``dependence``: the quantity that longer RoPE angles depend on."""
    context, rope = context_length(config), architecture.length_dependent_rope(skeleton)
    if rope is not None and (context is None or context > rope[1]):
        reason = f"{rope[0]} RoPE depends on {dependence} beyond it"
        return rope[1], [Decision("context", str(rope[1]), reason)]
    return context, []


def one_device(requested: str) -> torch.device:
    """The device of a command that runs as one process. Raises ConfigError under several ranks."""
    ranks = distributed.start(requested)
    if ranks.size > 1:
        distributed.stop(ranks)
        raise ConfigError(
            f"started as {ranks.size} processes; expected one, since all would write the same; "
            "start it without torchrun"
        )
    return ranks.device


def inference_dtype(requested: str | None, device: torch.device, cpu_reason: str) -> ChosenDtype:
    """The requested dtype; by default float32 on a CPU (for ``cpu_reason``), else bfloat16 where the GPU has it."""
    if requested is None and device.type == "cpu":
        return ChosenDtype(torch.float32, cpu_reason)
    return resolve_dtype(requested, device)


def inference_context(dtype: torch.dtype) -> Any:
    """The context of a forward pass: the weights are in the dtype computed in, so there is no autocast."""
    return nullcontext() if dtype == torch.bfloat16 else backward_context(dtype)
