"""The cases, and the process that runs them: ``python -m on_gpu.bench LOG --device cuda [--tiny] [--cases NAME ...]``.

Each case is written to LOG when it begins and when it ends; what LOG says was begun is left out. Started by
``benchmarks/gpu.py``, which limits its time and starts it again after a case that took it down.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from on_gpu import log, measure
from on_gpu.sizes import SIZES, Fits, TooLarge, fit

Result = dict[str, Any]
LIBRARY = ("transformers", "tokenizers", "numpy")
"""What rows, models and the plain loop import."""
TAUT = (*LIBRARY, "pydantic", "httpx2", "anyio", "tenacity", "safetensors", "PIL", "jinja2")
"""What taut's training imports."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured."""

    name: str
    run: Callable[[torch.device, bool], Result]
    """(device, whether it is the self-test) -> what was measured."""
    needs: tuple[str, ...] = ()
    """Packages."""
    is_for_cuda: bool = False
    """Whether the kernel has no backward elsewhere."""


# -- training


TAUT_LABEL = "taut"
PLAIN = {"plain sdpa": "sdpa", "plain flash": "flash_attention_2"}
COMPILED = "taut compile"
TRL = "trl padded"


def train(
    size_name: str, tuning: str, kind: str, contender: str, device: torch.device, is_tiny: bool
) -> Result:
    """Training steps of one contender."""
    from on_gpu.rows import steps_of, work_of

    size = SIZES[size_name]
    is_lora, is_ours = tuning == "lora", contender in (TAUT_LABEL, COMPILED)
    fits = fit(size, device, is_lora=is_lora, is_chunked=is_ours)
    rows = 8 if is_tiny else 32 if size_name == "8B" else 64
    steps = steps_of(kind, rows, size.vocab)
    measure.forget_peak(device)
    found: Result = {"size": size_name, "tuning": tuning, "rows": kind, "contender": contender}
    found |= {"tokens_at_a_time": fits.tokens, "estimate_bytes": sum(fits.estimate)}
    print(f"  estimated {fits.estimate.line()} at {fits.tokens:,} tokens at a time", flush=True)
    if contender == TRL:
        from on_gpu import peers

        found |= peers.trl_seconds(size, device, steps, fits.tokens, is_lora=is_lora)
        return found | {"tokens_per_second": own_tokens(steps) / found["seconds"]}
    if is_ours:
        from on_gpu import ours

        scorer, found["attention"] = ours.scorer_of(
            size, device, is_lora=is_lora, is_compiled=contender == COMPILED
        )
        trainer = ours.trainer_of(scorer, steps, device, fits.tokens, kind)
        take, model = partial(ours.train_step, trainer), scorer.model
    else:
        from on_gpu import peers

        model = peers.model_of(size, device, PLAIN[contender], is_lora=is_lora)
        take = peers.loop(model, steps, device, fits.tokens, kind)
    found |= measure.steps(take, device, is_quick=is_tiny)
    found["tokens_per_second"] = own_tokens(steps) / found["seconds"]
    found["six_n"] = 6 * size.products * found["tokens_per_second"]
    found["counted"] = work_of(steps, model).products / found["seconds"]
    return found


def own_tokens(steps: list[Any]) -> float:
    """Tokens of the rows of a mean step."""
    return sum(len(row.ids) for rows in steps for row in rows) / len(steps)


# -- the rest


def rates(device: torch.device, is_tiny: bool) -> Result:
    return measure.rates(device, is_quick=is_tiny)


def attention(backend: str, layout: str, device: torch.device, is_tiny: bool) -> Result:
    """Forward and backward of one layer's attention: 32 heads of 128 over 8 of keys, in bfloat16."""
    import numpy as np
    from torch.nn.functional import scaled_dot_product_attention

    from taut.attention import flex, reference, varlen
    from taut.attention.layout import Call, Layout

    num_heads, num_kv, width = (4, 2, 16) if is_tiny else (32, 8, 128)
    whole = 512 if is_tiny else 16384
    if layout == "flat":  # eight samples
        ends = np.arange(1, 9) * (whole // 8)
        reach_T = np.repeat(ends, whole // 8)
    else:  # a prompt of half the tokens with eight completions
        prompt, branch = whole // 2, whole // 16
        ends = prompt + np.arange(1, 9) * branch
        reach_T = np.concatenate([np.full(prompt, whole), np.repeat(ends, branch)])
    dtype = torch.bfloat16
    make = partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    query = make(1, num_heads, whole, width)
    key, value = (make(1, num_kv, whole, width) for _ in range(2))
    num_pairs = Layout(reach_T).num_pairs()
    call = Call(width**-0.5)
    backends = {"reference": reference.attend, "varlen": varlen.attend, "flex": flex.attend}

    def act(layout: Layout) -> None:
        if backend == "sdpa, a sample alone":  # causal, as a padded batch without pads runs it
            shaped = [h.view(h.shape[1], 8, -1, width).transpose(0, 1) for h in (query, key, value)]
            out = scaled_dot_product_attention(*shaped, is_causal=True, enable_gqa=True)
        else:
            out = backends[backend](query, key, value, layout, call)
        out.sum().backward()

    measure.forget_peak(device)
    fresh = Layout(reach_T, device=device)
    seconds = measure.fastest(lambda: act(fresh), device, 2 if is_tiny else 10)
    first = measure.fastest(lambda: act(Layout(reach_T, device=device)), device, 2)
    products = 12 * num_pairs * num_heads * width
    return {
        "backend": backend,
        "layout": layout,
        "seconds": seconds,
        "new_layout_seconds": first,
        "flops": products / seconds,
        "peak_bytes": measure.peak_bytes(device),
        **measure.host_syncs(lambda: act(fresh), device),
        **measure.kernels(lambda: act(fresh), device),
    }


def generate(size_name: str, contender: str, device: torch.device, is_tiny: bool) -> Result:
    from importlib import import_module

    side = import_module("on_gpu.ours" if contender == TAUT_LABEL else "on_gpu.peers")
    measure.forget_peak(device)
    sizes = (2, 2, 8) if is_tiny else (16, 8, 128)
    found = {"size": size_name, "contender": contender, "prompts": sizes[0], "samples": sizes[1]}
    return found | side.generate(SIZES[size_name], device, *sizes)


def checkpoints(size_name: str, device: torch.device, is_tiny: bool) -> Result:
    from on_gpu import ours
    from on_gpu.rows import steps_of

    size = SIZES[size_name]
    fits: Fits = fit(size, device, is_lora=False, is_chunked=True)
    measure.forget_peak(device)
    scorer, _ = ours.scorer_of(size, device)
    steps = steps_of("packed", 8 if is_tiny else 32, size.vocab)
    trainer = ours.trainer_of(scorer, steps, device, fits.tokens, "packed")
    with tempfile.TemporaryDirectory() as place:
        return {"size": size_name, **ours.checkpoints(trainer, Path(place))}


# -- the list


def training(size: str, tuning: str, kind: str, *contenders: str) -> list[Case]:
    """A case for each contender."""
    needs = {
        TAUT_LABEL: TAUT,
        COMPILED: TAUT,
        "plain sdpa": LIBRARY,
        "plain flash": (*LIBRARY, "flash_attn"),
        TRL: (*LIBRARY, "trl", "datasets"),
    }
    peft = ("peft",) if tuning == "lora" else ()
    return [
        Case(
            f"{'grpo' if kind == 'grpo' else 'sft'} {size} {tuning} {kind}: {contender}",
            partial(train, size, tuning, kind, contender),
            needs[contender] + peft,
        )
        for contender in contenders
    ]


def cases(*, is_tiny: bool) -> list[Case]:
    """In the order of what is missed most where time runs out."""
    every = (TAUT_LABEL, *PLAIN, COMPILED, TRL)
    pair = every[:4]
    small, middle, large, huge = ("tiny",) * 4 if is_tiny else ("0.1B", "0.5B", "1.5B", "8B")
    listed = [
        Case("rates", rates),
        *(
            Case(
                f"attention {layout}: {backend}",
                partial(attention, backend, layout),
                ("numpy",),
                is_for_cuda=backend in ("varlen", "flex"),
            )
            for layout in ("flat", "tree")
            for backend in ("sdpa, a sample alone", "varlen", "reference", "flex")
            if not (layout == "tree" and "sdpa" in backend)
        ),
        *training(middle, "full", "packed", *every),
        *training(middle, "full", "shared", *every),
        *training(middle, "full", "grpo", *pair),
        *generation(middle),
        *training(huge, "lora", "packed", *pair),
        *training(large, "full", "packed", *pair),
        *training(large, "lora", "grpo", *pair),
        Case(f"checkpoint {middle}", partial(checkpoints, middle), (*TAUT, "cachetools")),
        *training(huge, "lora", "shared", *pair),
        *training(huge, "full", "packed", *pair),
        *training(large, "lora", "packed", *pair),
        *training(large, "full", "shared", *pair),
        *training(small, "full", "packed", *every),
        *training(small, "full", "shared", *pair),
    ]
    return list({case.name: case for case in listed}.values())  # the tiny ones are alike


def generation(size: str) -> list[Case]:
    return [
        Case(f"generate {size}: {TAUT_LABEL}", partial(generate, size, TAUT_LABEL), TAUT),
        Case(
            f"generate {size}: transformers",
            partial(generate, size, "transformers"),
            LIBRARY,
        ),
    ]


# -- the process


def run_case(case: Case, device: torch.device, *, is_tiny: bool) -> Result:
    """What was measured, or why it was not."""
    missing = [name for name in case.needs if find_spec(name) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    if case.is_for_cuda and device.type != "cuda":
        return {"skipped": "its kernel needs CUDA"}
    try:
        return case.run(device, is_tiny)
    except TooLarge as error:
        return {"skipped": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this case's result
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        places = " < ".join(f"{measure.shorten(f.filename)}:{f.lineno}" for f in reversed(frames))
        said = " ".join(str(error).split())[:600]
        return {"failed": f"{type(error).__name__}: {said} (at {places})"}
    finally:
        gc.collect()
        if device.type == "cuda" and not measure.is_broken(device):
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cases", nargs="*", default=[])
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")

    note = partial(log.note, arguments.log)
    begun = {entry.get("begun") for entry in log.read(arguments.log)}
    note(machine=measure.describe(device))
    for case in cases(is_tiny=arguments.tiny):
        if case.name in arguments.cases and case.name not in begun:
            print(case.name, flush=True)
            note(begun=case.name)
            found = run_case(case, device, is_tiny=arguments.tiny)
            note(case=case.name, **found)
            why = found.get("skipped") or found.get("failed")
            speed = found.get("tokens_per_second")
            said = f"{speed:,.0f} tokens/s" if speed else "done"
            print(f"  {f'left out: {why}' if why else said}", flush=True)
            if measure.is_broken(device):
                measure.leave()


if __name__ == "__main__":
    main()
