"""``taut merge``: a base model and an adapter become the model the adapter was trained as."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.helpers.chat_runs import largest_difference, save_model, sft, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import taut
from taut.commands.merge import merge, run
from taut.commands.settings import Merge, Verify
from taut.commands.verify import verify
from taut.evals.contract import read_contract
from taut.models.load import quiet_library

NEW = [f"<|new{number}|>" for number in range(9)]
"""More than the tiny models have spare rows."""


def merged(base: Path, adapter: Path, out: Path, **keys: Any) -> Path:
    config = Merge(model=str(base), adapter=str(adapter), out=str(out), device="cpu", **keys)
    return merge(config).out


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen2", {"tokens__add": NEW}),
        ("llama", {"tokens__add": NEW, "lora__modules_to_save": ["embed_tokens", "lm_head"]}),
    ],
)
def test_merging_is_what_the_run_itself_saved(
    name: str,
    keys: dict[str, Any],
    train: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = save_model(tmp_path / name, name)
    wide: dict[str, Any] = {"dtype": "float32", "steps": 2, "optim__learning_rate": 1e-2}
    out = sft(base, train, tmp_path / "out", lora__rank=4, **wide, **keys).out
    config = Merge(
        model=str(base), adapter=str(out / "adapter"), out=str(tmp_path / "merged"), device="cpu"
    )
    assert run(config) == 0
    said = capsys.readouterr().out
    assert "of rank 4 into" in said
    assert "2 rows added; saved in float32" in said
    assert "passed  merge" in said
    found = tmp_path / "merged"
    assert largest_difference(weights(found), weights(out / "model")) == 0
    assert AutoTokenizer.from_pretrained(found).encode(NEW[0]) == AutoTokenizer.from_pretrained(
        out / "model"
    ).encode(NEW[0])
    goldens = read_contract(found).goldens
    assert goldens[0].prompt.id == "prompt 1 (built-in:1)"
    assert len(goldens) == 4
    found_now = verify(Verify(model=str(found), device="cpu"))
    assert {finding.outcome for finding in found_now} == {"passed"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's own call
def test_an_adapter_made_elsewhere(train: Path, tmp_path: Path) -> None:
    """With peft alone, in another dtype than the base's, and prompts of the user's."""
    base = save_model(tmp_path / "base", "llama", dtype=torch.bfloat16)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", use_rslora=True
    )
    with quiet_library():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        wrapped = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        wrapped.save_pretrained(tmp_path / "adapter")
        ids = torch.arange(12)[None] + 5
        wanted = wrapped.eval()(ids).logits
    out = merged(base, tmp_path / "adapter", tmp_path / "out", data=str(train))
    with quiet_library(), torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert found.dtype == torch.bfloat16
        now = found.float().eval()(ids).logits
    assert float((now - wanted).detach().abs().mean()) < 0.05
    assert read_contract(out).goldens[0].prompt.id == "prompt 1 (train.jsonl:1)"


@pytest.fixture(scope="module")
def adapter(model: Path, train: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapted") / "out"
    targets = ["q_proj", "v_proj"]
    return sft(model, train, out, steps=1, lora__rank=2, lora__targets=targets).out / "adapter"


def test_what_does_not_fit_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(taut.ModelError, match="lacks tensors for the model"):
        merged(deeper, adapter, out)
    flatter = save_model(tmp_path / "flatter", num_hidden_layers=1)
    with pytest.raises(taut.ModelError, match="has tensors that the model has no place for"):
        merged(flatter, adapter, out)
    wider = save_model(tmp_path / "wider", hidden_size=64)
    with pytest.raises(taut.ModelError, match="does not fit this model"):
        merged(wider, adapter, out)
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "IA3"}))
    with pytest.raises(taut.ModelError, match="is a IA3 adapter; expected LoRA"):
        merged(model, other, out)
    (other / "adapter_config.json").unlink()
    with pytest.raises(taut.ModelError, match=r"has no adapter_config\.json"):
        merged(model, other, out)
    assert not out.exists()


def test_a_directory_that_exists_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(taut.OutputError, match="exists; expected a new directory"):
        merged(model, adapter, tmp_path)


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_an_adapter_of_a_quantized_base_is_merged_into_what_it_was_trained_on(
    how: str, train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    base = save_model(tmp_path / "base", "llama")
    keys: dict[str, Any] = {"dtype": "float32", "steps": 2, "optim__learning_rate": 1e-2}
    out = sft(base, train, tmp_path / "out", lora__rank=4, quantize=how, **keys).out
    record = json.loads((out / "adapter" / "taut_base.json").read_text())
    assert record == {"model": str(base), "quantize": how}
    config = Merge(
        model=str(base), adapter=str(out / "adapter"), out=str(tmp_path / "merged"), device="cpu"
    )
    assert run(config) == 0
    said = capsys.readouterr().out
    assert f"base    merged as quantized in training ({how})" in said
    assert largest_difference(weights(tmp_path / "merged"), weights(out / "model")) == 0
