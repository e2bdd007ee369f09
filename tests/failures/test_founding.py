"""The founding cases F1, F2 and F5, planted the way people met them; F4's causes are in tests/e2e/test_stopping.py.

The guard of F1 and F2 is the library's own, as it stood in its FlashAttention models: with a cache in use, a batch
whose last column holds a pad is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import PLAIN, chats, column, events, save_model, sft, write_rows
from tests.helpers.tiny_models import logits_of, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from taut.attention.layout import Layout
from taut.data.packing import ALONE, pack
from taut.data.render.render import Renderer
from taut.data.rows.messages import read_conversation
from taut.errors import CheckFailed, ModelError
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.models import attention_backends, load
from taut.models.scorer import Scorer
from taut.types import Completion, Prompt, Sample

PAD = 0
Logps = Callable[[Sample], Tensor]


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The kernel's refusal, put back into the library's Qwen2; the list holds what each forward was called with."""
    seen: list[dict[str, Any]] = []
    forward = Qwen2Model.forward

    def guarded(self: Any, *args: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        mask = keywords.get("attention_mask")
        use_cache = keywords.get("use_cache")
        has_cache = self.config.use_cache if use_cache is None else use_cache
        if mask is not None and has_cache and not mask[:, -1].all():
            raise ValueError("batched generation with padding_side='right'")
        return forward(self, *args, **keywords)

    monkeypatch.setattr(Qwen2Model, "forward", guarded)
    return seen


def rectangle(paths: list[np.ndarray]) -> dict[str, Tensor]:
    """What a collator makes of them: right-padded ids and a mask."""
    most = max(ids_T.size for ids_T in paths)
    ids = torch.full((len(paths), most), PAD)
    mask = torch.zeros(len(paths), most, dtype=torch.long)
    for row, ids_T in enumerate(paths):
        ids[row, : ids_T.size], mask[row, : ids_T.size] = torch.from_numpy(ids_T), 1
    return {"input_ids": ids, "attention_mask": mask}


def samples_of(model: Path, data: list[dict[str, Any]]) -> list[Sample]:
    renderer = Renderer(load.load_tokenizer(str(model)))
    rows = [read_conversation(row["messages"], f"row {at}") for at, row in enumerate(data)]
    return [sample for some in renderer.render_all(rows) for sample in some]


def library_logps(model: Path) -> Logps:
    """logp_N of a sample run alone by the library as it is loaded by anybody."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    loaded.double()

    @torch.no_grad()
    def logps(sample: Sample) -> Tensor:
        logits = loaded(torch.from_numpy(sample.ids_T)[None], use_cache=False).logits[0]
        return targets_of(logits, sample)

    return logps


def targets_of(logits_TV: Tensor, sample: Sample) -> Tensor:
    every = torch.log_softmax(logits_TV.double(), dim=-1)
    return every[sample.target_at_N - 1, sample.ids_T[sample.target_at_N]]


def mean_loss(samples: list[Sample], logps: Logps) -> float:
    return -float(torch.cat([logps(sample) for sample in samples]).mean())


def test_f1_held_out_rows_of_all_lengths_are_scored_after_training(
    tmp_path: Path, guard: list[dict[str, Any]]
) -> None:
    """OpenRLHF#351: training works (checkpointing turns the cache off), and the first evaluation is refused."""
    model = save_model(tmp_path / "model", dtype=torch.float64)
    held_out = chats(7, seed=1)
    samples = samples_of(model, held_out)
    assert len({sample.num_tokens for sample in samples}) > 3
    theirs = AutoModelForCausalLM.from_pretrained(model)
    theirs.config.use_cache = True
    batch = rectangle([sample.ids_T for sample in samples])
    theirs(**batch, use_cache=False)  # a training step
    with pytest.raises(ValueError, match="padding_side='right'"):
        theirs.eval()(**batch)

    guard.clear()
    result = sft(
        model,
        write_rows(tmp_path / "train.jsonl", chats(12)),
        tmp_path / "out",
        steps=2,
        data__eval=str(write_rows(tmp_path / "eval.jsonl", held_out)),
        eval__every=1,
    )
    assert len(guard) > 4
    assert all(call.get("attention_mask") is None for call in guard)
    assert not any(call["use_cache"] for call in guard)
    found = events(tmp_path / "out", "eval")[-1]
    assert found["num_samples"] == len(held_out)
    wanted = mean_loss(samples, library_logps(result.model))
    assert found["loss"] == pytest.approx(wanted, abs=1e-6)


def test_f2_completions_that_end_at_different_tokens_are_scored_as_they_are(
    guard: list[dict[str, Any]],
) -> None:
    """OpenRLHF#303, #333: what follows the first EOS is made pad, and the scoring forward is refused."""
    model = tiny_model("qwen2")
    prompts = [Prompt(f"p{size}", np.arange(3, 3 + size)) for size in (4, 9, 6)]
    stops = likely(model)
    model.set_attn_implementation(attention_backends.PREFIX + "reference")
    scorer = Scorer(model)
    engine = LocalEngine(scorer, tiny_tokenizer(), stops, context=100)
    found = engine.generate(prompts, Sampling(n=3, max_new_tokens=10))
    assert len({completion.ids_N.size for completion in found}) > 3
    for completion in found:
        assert not np.isin(completion.ids_N[:-1], stops).any()  # nothing follows the end
        assert (completion.finish_reason == "stop") == (int(completion.ids_N[-1]) in stops)
    by_id = {prompt.id: prompt for prompt in prompts}
    paths = [path_of(by_id[completion.prompt_id], completion) for completion in found]
    with torch.no_grad():
        together = scorer(pack(paths)).logp_N
        alone = {path.id: scorer(pack([path], ALONE)).logp_N for path in paths}
    packed = pack(paths)
    for row, name in enumerate(packed.sample_ids):
        assert (together[packed.row_N == row] - alone[name]).abs().max() < 1e-9
    for path, completion in zip(paths, found, strict=True):
        assert np.abs(alone[path.id].numpy() - completion.logp_N).max() < 1e-6
    assert all(call.get("attention_mask") is None for call in guard)

    theirs = tiny_model("qwen2")
    theirs.config.use_cache = True
    with pytest.raises(ValueError, match="padding_side='right'"):
        theirs(**rectangle([path.ids_T for path in paths]))


def likely(model: Any) -> tuple[int, ...]:
    """Tokens the model is fond of, so that some completions end and some do not."""
    with torch.no_grad():
        mean = logits_of(model, 64).softmax(-1).mean(0)
    return tuple(mean.argsort(descending=True)[:6].tolist())


def path_of(prompt: Prompt, completion: Completion) -> Sample:
    ids_T = np.concatenate([prompt.ids_T, completion.ids_N])
    at_N = np.arange(prompt.ids_T.size, ids_T.size)
    return Sample(f"{prompt.id}/{completion.index}", ids_T, at_N, np.ones(at_N.size))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows its 16 chats: only there does a leak show in the loss."""
    place = tmp_path_factory.mktemp("learned")
    rows = write_rows(place / "train.jsonl", chats(16))
    more = {"steps": 60, "batch__samples_per_step": 16, "optim__learning_rate": 1e-2}
    model = save_model(place / "model", dtype=torch.float64)
    return sft(model, rows, place / "out", **PLAIN, **more).model


def flat_loss(model: Path, samples: list[Sample]) -> float:
    """Padding-free training as it was met: flat ids, positions that restart, and the cache at its default."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    loaded.config.use_cache = True
    ids = torch.from_numpy(np.concatenate([sample.ids_T for sample in samples]))[None]
    places = torch.cat([torch.arange(sample.num_tokens) for sample in samples])[None]
    with torch.no_grad():
        logits_TV = loaded(ids, position_ids=places).logits[0]
    starts = np.cumsum([0, *(sample.num_tokens for sample in samples)])
    rows = zip(starts, samples, strict=False)
    every = [targets_of(logits_TV[at : at + one.num_tokens], one) for at, one in rows]
    return -float(torch.cat(every).mean())


def test_f5_the_first_loss_is_that_of_the_samples_alone_however_many(
    learned: Path, tmp_path: Path
) -> None:
    """trl#2834: the first loss is far too high, more so the more samples lie beside each other."""
    rows = chats(16)
    samples = samples_of(learned, rows)
    logps = library_logps(learned)
    truth, theirs = mean_loss(samples, logps), flat_loss(learned, samples)
    few = flat_loss(learned, samples[:2]) - mean_loss(samples[:2], logps)
    assert theirs > truth + 0.3
    assert theirs - truth > few

    data = write_rows(tmp_path / "train.jsonl", rows)
    out = tmp_path / "out"
    sft(learned, data, out, steps=1, batch__samples_per_step=16, batch__share_prefixes=False)
    assert column(out, "num_tokens") == [sum(sample.num_tokens for sample in samples)]
    assert column(out, "loss")[0] == pytest.approx(truth, abs=1e-6)


def test_f5_a_request_that_does_not_reach_the_model_is_refused(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the library loads the model with its own attention, whatever was asked for."""
    real = AutoModelForCausalLM.from_pretrained

    def forgetful(*args: Any, attn_implementation: str = "", **keywords: Any) -> Any:
        assert attn_implementation
        return real(*args, **keywords)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forgetful)
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="uses the attention sdpa; expected taut_reference"):
        sft(learned, write_rows(tmp_path / "train.jsonl", chats(16)), out, steps=1)
    assert not out.exists()


def test_f5_samples_that_run_together_stop_the_run_before_it_updates(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the kernel is told nothing of where samples begin. Refused before; without the checks, at step 1."""
    plain = attention_backends.BACKENDS["reference"]

    def joined(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Any) -> Tensor:
        whole = Layout(np.full(layout.num_tokens, layout.num_tokens))
        return plain(query, key, value, whole, call)

    monkeypatch.setitem(attention_backends.BACKENDS, "reference", joined)
    data = write_rows(tmp_path / "train.jsonl", chats(16))
    alone: dict[str, Any] = {"steps": 1, "batch__share_prefixes": False}
    with pytest.raises(CheckFailed, match=r"^attention.neighbor: "):
        sft(learned, data, tmp_path / "out", **alone)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckFailed, match=r"step 1: the logprobs of .* nothing was updated"):
        sft(learned, data, tmp_path / "unchecked", check="off", **alone)
    assert events(tmp_path / "unchecked", "step") == []
