"""``taut teach MODEL data.train=FILE out=FILE``: a teacher's top logprobs of a data set, for ``taut distill``.

Writes the most likely tokens at every target with their logprobs, as JSON lines (data/store/top_logprobs.py), so that a
teacher that does not fit into memory next to its student runs once, and a teacher that runs one sample at a time can
teach too.

Samples are rendered as in the later training run: by the student's tokenizer and template, with the same settings under
``data``. Held-out data take a second call, with the held-out file as ``data.train``. Refuses an ``out`` that exists,
and a teacher whose tokenizer differs. The file appears complete or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track

from taut.commands.reading import print_decisions, write_errors
from taut.config import Decision, user_path
from taut.data.dataset import Dataset, load_dataset
from taut.data.packing import ALONE, PackPolicy, pack
from taut.data.store.top_logprobs import Top, line_of
from taut.errors import ConfigError, OutputError
from taut.inference.factory import one_device
from taut.io import files
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.methods.method import RunConfig
from taut.methods.teacher import require_context
from taut.models.architecture import head, run_backbone
from taut.models.attention_backends import select
from taut.models.cpu import cpu_matmul
from taut.models.load import context_length, load_config, load_model
from taut.models.precision import compute_context, resolve_dtype
from taut.models.self_test import one_sample_reasons
from taut.models.teacher import likeliest
from taut.models.tokens import require_same_tokenizer
from taut.run.inputs import load_language, load_stops
from taut.train.distributed import thread_decisions
from taut.vision.image_store import require_same_processor
from taut_tools.teach.settings import Teach


class Taught(NamedTuple):
    """The result."""

    out: Path
    num_samples: int
    num_targets: int
    mass: float
    """Mean probability of the tokens listed per target."""
    decisions: list[Decision]


def run(config: Teach) -> int:
    """Teach and print a summary."""
    taught = teach(config)
    console = Terminal(soft_wrap=True)
    print_decisions(console, taught.decisions)
    line = (
        f"written {taught.out}: the {config.top} likeliest tokens at {counted(taught.num_targets, 'targets')} of "
        f"{counted(taught.num_samples, 'samples')}; they have {taught.mass:.2%} of the teacher's probability"
    )
    console.lines([line])
    return 0


def teach(config: Teach) -> Taught:
    """Write the teacher's top logprobs to ``config.out``. Raises TautError before the first forward if this is
    impossible.
    """
    out = user_path(config.out, "out")
    fault = ""
    if out.exists():
        fault = " exists; expected a new file; name another, or remove it"
    elif not out.parent.is_dir():
        fault = f": there is no directory {out.parent}; expected one; make it"
    if fault:
        raise OutputError(f"out={out}{fault}")
    if config.data.eval:
        raise ConfigError(
            "data.eval is set, and a file is made of data.train only; take it out, and give the held-out file as "
            "data.train in a second call"
        )
    device = one_device(config.device)
    # samples as the student will render them
    learner = RunConfig(
        model=config.student or config.model,
        data=config.data,
        trust_remote_code=config.trust_remote_code,
    )
    language = load_language(learner)
    vocabulary = require_same_tokenizer(
        config.model, language.tokenizer, "model", config.trust_remote_code, may_have_more=False
    )
    num_ids = 1 + max(vocabulary.values())
    if config.top > num_ids:
        too_many = f"top={config.top}; expected at most the tokenizer's {num_ids:,} ids; lower it"
        raise ConfigError(too_many)
    stops = load_stops(learner, language)
    data = load_dataset(
        config.data,
        "train",
        language.renderer.stopping_at(stops.ids),
        learner.longest_sample(language.config),
    )
    # the teacher takes the same pictures, and is long enough
    image_store, trust = language.renderer.image_store, config.trust_remote_code
    settings = load_config(config.model, trust)
    if image_store is not None and data.report.num_pictures:
        require_same_processor(
            config.model, settings, language.tokenizer, image_store, "model", trust
        )
    longest = data.lengths.longest
    require_context(f"model={config.model}", context_length(settings), longest)
    # the teacher
    chosen = resolve_dtype(config.dtype, device)
    dtype = chosen.dtype
    attention = select(config.attention, device, dtype, settings)
    cpu_matmul.use(cpu_matmul.select(config.cpu_matmul, device, dtype))
    model = load_model(
        config.model,
        dtype=dtype,
        device=device,
        attention=attention.implementation,
        trust_remote_code=trust,
        is_narrow=True,
    )
    model.train(False)
    # how samples are packed
    alone = one_sample_reasons(model, longest)
    decisions = [
        Decision("dtype", str(dtype).removeprefix("torch."), chosen.reason),
        Decision("attention", attention.name, attention.reason),
        *thread_decisions(device),
        *cpu_matmul.active().decisions,
        *(Decision("packing", "one sample at a time", reason) for reason in alone),
    ]
    policy = ALONE if alone else PackPolicy()
    groups = list(_groups(data, 1 if alone else config.tokens_per_microbatch))
    console = Terminal(stderr=True)
    groups_shown = track(
        groups, "teaching", console=console, transient=True, disable=not console.is_terminal
    )
    # one forward per group; a line per sample
    sums = np.zeros(2)
    with write_errors(out, "; nothing is kept"), files.writing(out) as file:
        for group in groups_shown:
            samples = data[group.start : group.stop]
            packed = pack(samples, policy)
            with torch.no_grad(), compute_context(dtype, device):
                moved, hidden_TD = run_backbone(model, packed)
                hidden_ND = hidden_TD.index_select(0, moved.predictor_N)
                listed = likeliest(hidden_ND, head(model), config.top, num_ids)
            ids_Nk, logp_Nk = (tensor.cpu().numpy() for tensor in listed)
            rows = {name: row for row, name in enumerate(packed.sample_ids)}
            for sample in samples:
                is_own_N = (packed.row_N == rows[sample.id]).numpy()
                top = Top(ids_Nk[is_own_N], logp_Nk[is_own_N])
                file.write(line_of(sample, top))
                sums += (np.exp(top.logp_Nk).sum(), sample.num_targets)
    return Taught(out, len(data), int(sums[1]), float(sums[0] / sums[1]), decisions)


def _groups(data: Dataset, max_tokens: int) -> Iterator[range]:
    """Groups of consecutive samples of at most so many tokens; a longer sample is a group by itself."""
    start, tokens = 0, 0
    lengths = (length for length_S in data.sizes("tokens") for length in length_S.tolist())
    for index, length in enumerate(lengths):
        if tokens + length > max_tokens and index > start:
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    yield range(start, len(data))
