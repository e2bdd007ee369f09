"""taut's local engine: ``python generate_taut.py JOB.json``, as ``taut generate`` opens it."""

from __future__ import annotations

import time
from typing import Any

import generation
import numpy as np
from generation import Job, Made, Work

from taut.attention.layout import Layout
from taut.inference.factory import open_engine
from taut.inference.local import LocalEngine
from taut.inference.settings import ModelUse, Sampling
from taut.models.cpu import cpu_matmul
from taut.types import Prompt


class Taut:
    def __init__(self, job: Job) -> None:
        opened = open_engine(ModelUse(model=job["model"], dtype=job["dtype"], device="cpu"))
        assert isinstance(opened.engine, LocalEngine)
        self.cpu_matmul = cpu_matmul.active().name
        self.engine, self.seed = opened.engine, job["seed"]
        self.engine.stop_ids = frozenset()  # every completion has the length the case says
        self.prefill_seconds = 0.0
        self._watch(self.engine.scorer)

    def _watch(self, scorer: Any) -> None:
        """Time the forwards over prompts, which have a layout."""
        next_logits = scorer.next_logits

        def timed(ids_T: Any, position_ids: Any, layout: Any, *others: Any) -> Any:
            start = time.perf_counter()
            logits_RV = next_logits(ids_T, position_ids, layout, *others)
            if isinstance(layout, Layout):
                self.prefill_seconds += time.perf_counter() - start
            return logits_RV

        scorer.next_logits = timed

    def __call__(self, work: Work) -> Made:
        prompts = [
            Prompt(f"prompt:{number}", np.asarray(ids), max_new_tokens=length)
            for number, (ids, length) in enumerate(zip(work.prompts, work.new_tokens, strict=True))
        ]
        sampling = Sampling(
            n=work.num_samples,
            max_new_tokens=max(work.new_tokens),
            temperature=0 if work.is_greedy else 1,
            seed=self.seed,
        )
        self.prefill_seconds = 0.0
        done = iter(self.engine.generate(prompts, sampling))
        made = Made([], self.prefill_seconds, cpu_matmul=self.cpu_matmul)
        for _ in prompts:
            some = [next(done) for _ in range(work.num_samples)]
            made.completions.append([one.ids_N.tolist() for one in some])
            made.logp.append([one.logp_N.tolist() for one in some if one.logp_N is not None])
        return made


generation.run(Taut)
