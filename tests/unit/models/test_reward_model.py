"""A model with a scalar head: loaded, read packed, saved and read by the library as the same number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.tiny_models import plain_model, save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from taut.data.packing import ALONE, pack
from taut.errors import AttentionError, ModelError
from taut.models import architecture
from taut.models.attention_backends import PREFIX, select
from taut.models.heads import check_head, scalar_head
from taut.models.load import freeze, load_config, load_model, load_skeleton, quiet_library
from taut.models.lora.adapters import apply_lora, choose_rows
from taut.models.lora.merge import save_adapter
from taut.models.precision import compute_context
from taut.models.reward_model import load_reward_model, reward_skeleton
from taut.models.save import saving
from taut.models.scorer import Scorer
from taut.models.self_test import library_scalars, run_self_test
from taut.models.settings import LoraConfig, NewHead
from taut.models.tokens import add_tokens, require_trained, untrained_rows
from taut.types import Sample, Wants

CPU = torch.device("cpu")
SCALAR = Wants(logp=False, scalar=True)
SEQUENCE_HEAD = NewHead()
SEQUENCE = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "phi3",
    "gpt_oss",
    "olmo2",
)
TOKEN = ("llama", "qwen2", "gemma2", "gpt_oss")


def open_reward(path: Path, head: NewHead | None = SEQUENCE_HEAD, **options: Any):
    dtype = options.pop("dtype", torch.float64)
    config = load_config(str(path))
    chosen = select("auto", CPU, dtype, config)
    return load_reward_model(
        str(path), head, dtype=dtype, device=CPU, attention=chosen.implementation, **options
    )


def sample(ids: list[int], name: str, reads: list[int] | None = None) -> Sample:
    nothing = np.empty(0, dtype=np.int64)
    read_at = None if reads is None else np.asarray(reads)
    return Sample(name, np.asarray(ids), nothing, nothing.astype(float), read_at_R=read_at)


def samples(reads: list[int] | None = None) -> list[Sample]:
    """Five, of which three begin alike; none ends with the pad of the tiny tokenizer."""
    random = np.random.default_rng(0)
    prompt = random.integers(5, 90, 20).tolist()
    tails = [random.integers(5, 90, size).tolist() for size in (4, 9, 1)]
    rows = [
        *[prompt + tail for tail in tails],
        random.integers(5, 90, 7).tolist(),
        random.integers(5, 90, 31).tolist(),
    ]
    return [sample(row, f"s{number}", reads) for number, row in enumerate(rows)]


def scores_of(
    model: torch.nn.Module, rows: list[Sample], dtype: torch.dtype, *, shared: bool = True
) -> torch.Tensor:
    """In the order of ``rows``, whatever the layout's."""
    packed = pack(rows) if shared else pack(rows, ALONE)
    with torch.no_grad(), compute_context(dtype, CPU):
        scalar_R = Scorer(model)(packed, wants=SCALAR).scalar_R
    order = {name: at for at, name in enumerate(packed.sample_ids)}
    found = [scalar_R[packed.row_R == order[row.id]] for row in rows]
    return torch.cat(found)


def save(model: torch.nn.Module, directory: Path, dtype: torch.dtype, stop: int = 2) -> Path:
    tokenizer = tiny_tokenizer()
    with saving(model, tokenizer, directory, stop_ids=[stop], template=None, dtype=dtype):
        pass
    return directory


def theirs(directory: Path, rows: list[Sample], auto: Any, dtype: torch.dtype) -> torch.Tensor:
    """The library's own logits of a batch that is padded on the right with the pad that was saved."""
    with quiet_library():
        model, report = auto.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    assert not any(report.values()), report
    model = model.to(dtype).eval()
    pad = model.config.pad_token_id
    width = max(row.num_tokens for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : row.num_tokens] = torch.from_numpy(row.ids_T)
        mask[number, : row.num_tokens] = 1
    with torch.no_grad(), compute_context(dtype, CPU):
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("name", SEQUENCE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_alone_shared_and_the_library_say_the_same(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """gpt_oss's experts differ between the library's eager and grouped products; here both are eager in float64."""
    tokenizer = tiny_tokenizer()
    base = save_tiny(name, tmp_path / "base", tokenizer, dtype=dtype)
    model = open_reward(base, dtype=dtype)
    rows = samples()
    tight = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    together = scores_of(model, rows, dtype)
    repeated = scores_of(model, rows, dtype, shared=False)
    alone = torch.cat([scores_of(model, [row], dtype) for row in rows])
    assert together.std() > 0.05, "the scores differ"
    torch.testing.assert_close(together, alone, atol=tight, rtol=tight)
    torch.testing.assert_close(together, repeated, atol=tight, rtol=tight)
    saved = save(model, tmp_path / "saved", dtype)
    logits = theirs(saved, rows, AutoModelForSequenceClassification, dtype)
    torch.testing.assert_close(together, logits.squeeze(-1), atol=tight, rtol=tight)
    again = scores_of(open_reward(saved, None, dtype=dtype), rows, dtype)
    torch.testing.assert_close(again, together, atol=tight, rtol=tight)


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize("bias", [True, False])
def test_a_process_model_is_a_token_class(tmp_path: Path, name: str, bias: bool) -> None:
    base = save_tiny(name, tmp_path / "base", tiny_tokenizer(), dtype=torch.float64)
    model = open_reward(base, NewHead("process", bias))
    if bias:
        torch.nn.init.constant_(scalar_head(model).bias, 0.3)
    reads = [1, 4, 6]
    rows = samples(reads)
    together = scores_of(model, rows, torch.float64)
    saved = save(model, tmp_path / "saved", torch.float64)
    logits = theirs(saved, rows, AutoModelForTokenClassification, torch.float64)
    torch.testing.assert_close(together, logits[:, reads, 0].flatten(), atol=1e-9, rtol=1e-9)
    again = scores_of(open_reward(saved, None), rows, torch.float64)
    torch.testing.assert_close(again, together, atol=1e-9, rtol=1e-9)


def test_a_sequence_head_with_a_bias_is_read_at_the_last_token_of_a_token_class(
    tmp_path: Path,
) -> None:
    base = save_tiny("llama", tmp_path / "base", tiny_tokenizer(), dtype=torch.float64)
    model = open_reward(base, NewHead(bias=True))
    torch.nn.init.constant_(scalar_head(model).bias, -0.7)
    rows = samples()
    saved = save(model, tmp_path / "saved", torch.float64)
    logits = theirs(saved, rows, AutoModelForTokenClassification, torch.float64)
    last = torch.stack([logits[i, row.num_tokens - 1, 0] for i, row in enumerate(rows)])
    torch.testing.assert_close(scores_of(model, rows, torch.float64), last, atol=1e-9, rtol=1e-9)


def test_the_backbone_is_taken_over_and_the_head_is_drawn_by_the_seed(tmp_path: Path) -> None:
    base = save_tiny("qwen2", tmp_path, tiny_tokenizer())
    before = torch.random.get_rng_state()
    first, again, other = (
        open_reward(base, NewHead(seed=seed), dtype=torch.float32) for seed in (7, 7, 8)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    whole = load_file(base / "model.safetensors")
    own = first.state_dict()
    assert own.keys() - whole.keys() == {"score.weight"}
    assert all(torch.equal(own[name], whole[name]) for name in own.keys() & whole.keys())
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    wide = open_reward(base, NewHead(seed=7)).score.weight.detach()
    assert torch.equal(wide.float(), first.score.weight), "the same numbers in every dtype"


def test_a_new_head_has_the_variance_of_one_over_d_plus_one(tmp_path: Path) -> None:
    base = save_tiny(
        "llama", tmp_path, hidden_size=1024, num_hidden_layers=1, num_attention_heads=2
    )
    weight = open_reward(base, dtype=torch.float32).score.weight.detach()
    assert float(weight.var()) * 1025 == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("name", ["granite", "cohere2", "lfm2"])
def test_an_architecture_without_such_a_class_is_refused_by_name(tmp_path: Path, name: str) -> None:
    base = save_tiny(name, tmp_path)
    model_type = load_config(str(base)).model_type
    with pytest.raises(ModelError, match=f"ForSequenceClassification for {model_type}"):
        open_reward(base)


@pytest.mark.parametrize("name", ["olmo2", "gemma3"])
def test_an_architecture_without_a_token_class_takes_no_bias(tmp_path: Path, name: str) -> None:
    base = save_tiny(name, tmp_path)
    with pytest.raises(ModelError, match="without a bias there may be one"):
        open_reward(base, NewHead(bias=True))


def test_what_is_no_reward_model_is_not_scored_with(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path)
    with pytest.raises(ModelError, match="has no scalar head; expected a reward model"):
        open_reward(base, None)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_reward_model_is_no_language_model(tmp_path: Path, name: str) -> None:
    """qwen2's head is tied to the embedding: the library would load it without a word."""
    base = save_tiny(name, tmp_path / "base", tiny_tokenizer())
    saved = save(open_reward(base, dtype=torch.float32), tmp_path / "saved", torch.float32)
    with pytest.raises(ModelError, match=r"is a reward model .*ForSequenceClassification"):
        load_model(str(saved), dtype=torch.float32, device=CPU, attention=PREFIX + "reference")
    with pytest.raises(ModelError, match="is a reward model"):
        load_skeleton(str(saved), load_config(str(saved)))


def test_what_a_reward_model_is_has_to_be_what_is_asked_for(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base", tiny_tokenizer(), dtype=torch.float64)
    sequence = save(open_reward(base), tmp_path / "sequence", torch.float64)
    with pytest.raises(ModelError, match="read at each step"):
        open_reward(sequence, NewHead("process"))
    with pytest.raises(ModelError, match=r"set reward\.bias=false"):
        open_reward(sequence, NewHead(bias=True))
    _change(sequence, id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    with pytest.raises(ModelError, match="2 labels"):
        open_reward(sequence, None)


def test_dropout_before_the_head_is_refused_and_what_is_not_said_is_none(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base", tiny_tokenizer(), dtype=torch.float64)
    token = save(open_reward(base, NewHead("process")), tmp_path / "token", torch.float64)
    _change(token, classifier_dropout=0.1)
    with pytest.raises(ModelError, match=r"dropout is 0\.1"):
        open_reward(token, None)
    _change(token, classifier_dropout=None)
    assert open_reward(token, None).dropout.p == 0


def test_a_checkpoint_that_lacks_its_head_is_refused(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path, tiny_tokenizer())
    _change(base, architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(ModelError, match=r"lacks 1 weight\(s\), score\.weight"):
        open_reward(base, NewHead())


def _change(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def test_the_pad_ends_no_answer(tmp_path: Path) -> None:
    """Where the turn ends with the tokenizer's own pad another is taken, and where there is none, none."""
    tokenizer = tiny_tokenizer()
    base = save_tiny("llama", tmp_path / "base", tokenizer)
    model = open_reward(base, dtype=torch.float32)
    pad = tokenizer.pad_token_id
    assert pad is not None
    saved = save(model, tmp_path / "a", torch.float32, stop=pad)
    config = json.loads((saved / "config.json").read_text())
    assert config["eos_token_id"] == pad
    assert config["pad_token_id"] != pad
    assert config["num_labels"] == 1 if "num_labels" in config else len(config["id2label"]) == 1
    assert config["problem_type"] == "regression"
    assert not (saved / "generation_config.json").exists()


@pytest.mark.parametrize("kind", ["sequence", "process"])
def test_the_head_trains_whole_beside_adapters(tmp_path: Path, kind: str) -> None:
    tokenizer = tiny_tokenizer()
    base = save_tiny("qwen2", tmp_path / "base", tokenizer, dtype=torch.float64)
    head = NewHead(kind, bias=kind == "process")
    lora = LoraConfig(rank=2)
    plain = open_reward(base, head)
    rows = choose_rows(plain, lora, needed=[3], ends=[3])
    assert list(rows) == ["model.embed_tokens"]
    model = apply_lora(plain, lora, rows=rows)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}
    assert len(trained) == (3 if kind == "process" else 2)
    assert {name.split(".")[-2] for name in trained if "score" in name} == {"default"}
    assert not any("lora" in name and "score" in name for name, _ in model.named_parameters())
    data = samples()
    before = scores_of(model, data, torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                random = torch.Generator().manual_seed(len(name))
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=random).double())
    after = scores_of(model, data, torch.float64)
    assert (before - after).abs().min() > 1e-4
    merged = plain_model(model)
    saved = save(model, tmp_path / "saved", torch.float64)
    reloaded = open_reward(saved, None)
    torch.testing.assert_close(
        scores_of(reloaded, data, torch.float64), after, atol=1e-9, rtol=1e-9
    )
    assert type(merged) is type(reloaded)
    save_adapter(model, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["task_type"] == ("TOKEN_CLS" if kind == "process" else "SEQ_CLS")
    assert settings["modules_to_save"].count("score") == 1
    fresh = open_reward(base, NewHead(kind, bias=kind == "process", seed=5))
    again = apply_lora(fresh, LoraConfig(adapter=str(tmp_path / "adapter")))
    torch.testing.assert_close(scores_of(again, data, torch.float64), after, atol=1e-9, rtol=1e-9)


def test_an_adapter_for_another_head_is_refused(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base", tiny_tokenizer(), dtype=torch.float64)
    model = apply_lora(open_reward(base), LoraConfig(rank=2))
    save_adapter(model, tmp_path / "adapter")
    language = load_model(
        str(base), dtype=torch.float64, device=CPU, attention=PREFIX + "reference"
    )
    with pytest.raises(ModelError, match="an adapter for SEQ_CLS; expected one for CAUSAL_LM"):
        apply_lora(language, LoraConfig(adapter=str(tmp_path / "adapter")))
    with pytest.raises(ModelError, match="it trains whole: leave it out"):
        apply_lora(open_reward(base), LoraConfig(rank=2, targets=["score"]))


def test_what_is_asked_of_a_language_model_has_an_answer_without_a_head(tmp_path: Path) -> None:
    base = save_tiny("qwen2", tmp_path, tiny_tokenizer(), dtype=torch.float64)
    model = open_reward(base)
    assert not architecture.has_head(model)
    assert not architecture.is_tied(model)
    assert architecture.table_names(model) == ["model.embed_tokens"]
    assert architecture.flops(model).per_target == 0
    assert architecture.flops(model).per_token > 0
    assert freeze(model, ["model.embed_tokens.weight"]) == ["model.embed_tokens.weight"]
    with pytest.raises(ModelError, match="frozen in the embedding"):
        require_trained(model, {3: "<|end|>: never trained"})
    assert untrained_rows(model, {3: "<|end|>"}) == {}
    rows = architecture.embedding(model).weight.shape[0]
    assert add_tokens(model, [rows]) == 1
    skeleton = reward_skeleton(str(base), load_config(str(base)), NewHead())
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}


@pytest.mark.parametrize("kind", ["sequence", "process"])
def test_the_proofs_are_made_on_the_scalar_head(tmp_path: Path, kind: str) -> None:
    model = open_reward(save_tiny("gemma2", tmp_path, tiny_tokenizer()), NewHead(kind))
    found = run_self_test(Scorer(model), compute_context(torch.float64, CPU), torch.float64, 256)
    assert max(found.neighbor, found.future, found.head) < 1e-9
    assert found.num_attention_layers == 2
    rows = samples([0, 3]) if kind == "process" else samples()
    with torch.no_grad(), compute_context(torch.float64, CPU):
        alone = torch.cat([library_scalars(model, row, CPU) for row in rows])
    torch.testing.assert_close(scores_of(model, rows, torch.float64), alone, atol=1e-9, rtol=1e-9)


def test_autocast_does_not_reach_the_scalar_head(tmp_path: Path) -> None:
    model = open_reward(save_tiny("llama", tmp_path, tiny_tokenizer()), dtype=torch.float32)
    with compute_context(torch.bfloat16, CPU):
        assert check_head(model) < 1e-5


def test_a_later_token_that_changes_an_earlier_number_is_found(tmp_path: Path) -> None:
    """Planted: the head's input is the mean of all hidden states."""
    model = open_reward(save_tiny("llama", tmp_path, tiny_tokenizer()))
    model.model.norm.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    with pytest.raises(AttentionError, match="a later token changes"):
        run_self_test(Scorer(model), compute_context(torch.float64, CPU), torch.float64, 256)
