"""The imported run beside a framework: ``python beside_taut.py JOBS.json``.

A job's words are those of ``taut import``; what it writes is ``run.toml``, which is run then. Where its folder has
``rollouts.jsonl``, the engine draws the tokens that the framework drew there, phase by phase.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from forks import run_all
from torch import Tensor

from taut.cli import main
from taut.commands import train as _train  # noqa: F401 - loaded before the processes divide
from taut.inference.local import LocalEngine, Row, policy_logits
from taut.inference.settings import Sampling
from taut.types import Prompt

Phase = dict[tuple[int, ...], list[list[int]]]
"""The ids of a prompt -> those of its completions."""


def run(words: list[str]) -> None:
    rollouts = Path("rollouts.jsonl")
    phases = list(read_phases(rollouts)) if rollouts.exists() else []
    replay(phases)
    with Path("run.toml").open("w") as written, redirect_stdout(written):
        code = main(words)
    assert code == 0, "the recipe is not imported whole"
    method = tomllib.loads(Path("run.toml").read_text())["method"]
    code = main([method, "run.toml", "out=taut", "device=cpu"])
    assert code == 0, code
    assert not phases, f"{len(phases)} phases were not asked for: other prompts were sampled"


def read_phases(path: Path) -> Iterator[Phase]:
    for line in path.read_text().splitlines():
        rows = json.loads(line)
        phase: Phase = {}
        for prompt_ids, ids in zip(rows["prompt"], rows["completion"], strict=True):
            phase.setdefault(tuple(prompt_ids), []).append(ids)
        yield phase


def replay(phases: list[Phase]) -> None:
    """The engine computes as ever, and draws the tokens of the next phase for the phase's prompts. What the checks
    before a run sample is its own.
    """
    generate, draw, now = LocalEngine.generate, LocalEngine._draw, Phase()

    def begin(
        engine: LocalEngine, prompts: Sequence[Prompt], sampling: Sampling, *args: Any, **kw: Any
    ) -> Any:
        now.clear()
        asked = {tuple(prompt.ids_T.tolist()): sampling.n for prompt in prompts}
        if phases and asked == {ids: len(answers) for ids, answers in phases[0].items()}:
            now.update(phases.pop(0))
        return generate(engine, prompts, sampling, *args, **kw)

    def draw_again(
        engine: LocalEngine, logits_BV: Tensor, rows: Sequence[Row], sampling: Sampling
    ) -> None:
        if not now:
            draw(engine, logits_BV, rows, sampling)
            return
        policy_BV = policy_logits(logits_BV, sampling, []).log_softmax(-1)
        plain_BV = logits_BV.log_softmax(-1)
        for row, policy_V, plain_V in zip(rows, policy_BV, plain_BV, strict=True):
            ids = now[tuple(row.prompt.ids_T.tolist())][row.index]
            row.ids.append(ids[len(row.ids)])
            row.logp.append(float(policy_V[row.ids[-1]]))
            row.logp_one.append(float(plain_V[row.ids[-1]]))
            if len(row.ids) == len(ids):
                row.finish = "stop" if ids[-1] in engine.stop_ids else "length"

    LocalEngine.generate, LocalEngine._draw = begin, draw_again  # type: ignore[method-assign]


torch.set_num_threads(1)
run_all(run)
