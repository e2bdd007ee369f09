"""A saved model is the trained one and says what it answers; ``taut verify`` finds whatever is changed afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.chat_runs import (
    chats,
    column,
    events,
    largest_difference,
    save_model,
    sft,
    weights,
    write_rows,
)
from tests.helpers.slow_cases import slow_except
from torch import Tensor, nn
from transformers import AutoTokenizer

import taut
from taut.commands.settings import Verify
from taut.commands.verify import Finding, run, verify
from taut.evals import contract, round_trip
from taut.evals.contract import read_contract
from taut.models.lora.merge import plain_groups
from taut.models.scorer import Scorer
from taut.run import save

WIDE: dict[str, Any] = {"dtype": "float32", "steps": 2, "optim__learning_rate": 1e-2}
TABLES = {"qwen2": ["embed_tokens"], "llama": ["embed_tokens", "lm_head"]}
NEW = [f"<|new{number}|>" for number in range(9)]
"""More than the tiny models have spare rows."""


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def replay(directory: Path, **keys: Any) -> dict[str, Finding]:
    return {
        found.name: found for found in verify(Verify(model=str(directory), device="cpu", **keys))
    }


def failed(directory: Path, **keys: Any) -> set[str]:
    """The questions that failed; all of them were asked."""
    found = replay(directory, **keys)
    assert {"template", "stop set", "prompts", "continuations", "logprobs", "stops"} <= set(found)
    return {name for name, finding in found.items() if finding.outcome == "failed"}


def change_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def test_the_contract_says_what_the_model_is_and_answers(finished: Path) -> None:
    found = read_contract(finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found.versions.keys() == {"taut", "torch", "transformers", "tokenizers"}
    assert found.facts.dtype == "float32"
    assert found.facts.template == contract.template_digest(tokenizer.chat_template)
    assert found.facts.eos == {file: [end] for file in ("tokenizer", "config", "generation_config")}
    assert [(stop.id, stop.token) for stop in found.stops] == [(end, "<|im_end|>")]
    assert len(found.goldens) == 4
    for golden in found.goldens:
        messages = golden.prompt.messages
        assert messages is not None
        assert [message["role"] for message in messages] == ["system", "user"]
        again = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert golden.prompt.ids == again["input_ids"]
        assert golden.finish_reason == "stop"
        assert golden.ids[-1] == end
        assert len(golden.ids) == len(golden.logp) == len(golden.margin)
        assert min(golden.margin) > 0, "the greedy token beats every other"
    assert "/" not in "".join(golden.prompt.id for golden in found.goldens), "no path of a machine"
    assert [check.name for check in found.checks] == ["weights", "reload"]


def test_an_untouched_model_verifies(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Verify(model=str(finished), device="cpu")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("passed") for line in lines)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_another_dtype_verifies_within_its_tolerance(finished: Path, dtype: str) -> None:
    assert failed(finished, dtype=dtype) == set()


def test_a_template_that_was_changed(copied: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", "assistant: ")
    tokenizer.save_pretrained(copied)
    assert failed(copied) == {"template", "prompts"}
    assert "at token" in replay(copied)["prompts"].detail
    assert run(Verify(model=str(copied), device="cpu")) == 1


def test_an_end_token_that_was_changed(copied: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["eos_token_id"] = 480

    change_json(copied / "generation_config.json", change)
    assert failed(copied) == {"stop set", "generation_config"}
    assert "eos of generation_config is [480]" in replay(copied)["stop set"].detail


def test_a_stop_set_that_was_saved_wrong_is_told_and_rewritten(copied: Path) -> None:
    """Saved by a release that took another token for the end of a turn."""
    other = AutoTokenizer.from_pretrained(copied)
    other.eos_token = "<|endoftext|>"
    other.save_pretrained(copied)
    index = other.eos_token_id

    def taught(tree: dict[str, Any]) -> None:
        tree["stops"] = [{"id": index, "token": "<|endoftext|>", "reason": "ends a turn"}]
        tree["facts"]["eos"] = {file: [index] for file in tree["facts"]["eos"]}
        tree["facts"]["generation_config"]["eos_token_id"] = [index]

    change_json(copied / contract.FILE, taught)
    for name in ("config.json", "generation_config.json"):
        change_json(copied / name, lambda tree: tree.update(eos_token_id=[index]))
    found = replay(copied)["stop set"]
    assert found.outcome == "failed" and "rewrite_stops=true" in found.detail
    assert failed(copied, rewrite_stops=True) == set()
    end = other.convert_tokens_to_ids("<|im_end|>")
    written = read_contract(copied)
    assert written.stops[0].id == end
    assert all(ids[0] == end for ids in written.facts.eos.values())
    assert AutoTokenizer.from_pretrained(copied).eos_token == "<|im_end|>"


def test_a_tokenizer_that_stops_elsewhere(copied: Path) -> None:
    """Its template ends turns with another token: answers would go on."""
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|endoftext|>")
    tokenizer.save_pretrained(copied)
    for name in ("config.json", "generation_config.json"):
        change_json(copied / name, lambda tree: tree.update(eos_token_id=480))
    found = failed(copied)
    assert {"template", "stop set", "prompts", "stops"} <= found
    assert "was stop after" in replay(copied)["stops"].detail


def test_a_weight_that_was_changed(copied: Path) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3] += 0.3
    save_file(tensors, file, metadata={"format": "pt"})
    assert "logprobs" in failed(copied)
    assert not {"template", "tokenizer", "stop set", "prompts"} & failed(copied)


def test_a_tokenizer_with_a_token_more(copied: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.add_tokens(["cat"])
    tokenizer.save_pretrained(copied)
    assert {"tokenizer", "prompts"} <= failed(copied)


def test_weights_in_another_dtype(copied: Path) -> None:
    change_json(copied / "config.json", lambda tree: tree.update(dtype="bfloat16"))
    assert "dtype" in failed(copied)


def test_a_near_tie_is_told_and_is_no_failure(copied: Path) -> None:
    """As if another token had been as likely when the contract was made."""

    def part(tree: dict[str, Any]) -> None:
        golden = tree["goldens"][0]
        golden["ids"][1] = 5
        golden["margin"][1] = 1e-4

    change_json(copied / "contract.json", part)
    found = replay(copied)
    assert found["continuations"].outcome == "passed"
    assert "1 part at a near-tie (margin 0.0001 nats)" in found["continuations"].detail

    change_json(
        copied / "contract.json", lambda tree: tree["goldens"][0]["margin"].__setitem__(1, 3.0)
    )
    found = replay(copied)
    assert found["continuations"].outcome == "failed"
    assert "prompt 1 (few.jsonl:1) at token 1" in found["continuations"].detail


def test_a_directory_without_a_contract_is_refused(copied: Path) -> None:
    (copied / "contract.json").unlink()
    with pytest.raises(taut.ModelError, match=r"has no contract\.json") as caught:
        verify(Verify(model=str(copied), device="cpu"))
    assert caught.value.exit_code == 2
    for text, reason in (("[]", "is not a contract"), ('{"format": 9}', "has format 9")):
        (copied / "contract.json").write_text(text)
        with pytest.raises(taut.ModelError, match=reason):
            read_contract(copied)


def test_what_has_no_contract_is_told_apart(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(taut.ModelError, match=r"did you mean .*/model\?"):
        read_contract(finished.parent)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(taut.ModelError, match="taut merge BASE ADAPTER"):
        read_contract(tmp_path)


def test_no_golden_prompts_where_none_are_wanted(model: Path, train: Path, tmp_path: Path) -> None:
    found = sft(model, train, tmp_path / "out", steps=1, contract__prompts=0).model
    assert read_contract(found).note == "contract.prompts=0"
    assert replay(found)["continuations"].outcome == "skipped"


def test_text_and_held_out_rows_are_asked_as_text(model: Path, train: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "the cat", "completion": " ran"}, {"text": "a big red house and then"}]
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    keys: dict[str, Any] = {"steps": 1, "contract__prompts": 5, "contract__max_new_tokens": 3}
    found = sft(model, train, tmp_path / "out", data__eval=str(held_out), **keys).model
    goldens = read_contract(found).goldens
    assert [golden.prompt.text for golden in goldens] == ["the cat", "a big red house and then"]
    assert [len(golden.ids) for golden in goldens] == [3, 3]
    assert failed(found) == set()


ROWS: dict[str, Any] = {"tokens__add": NEW}
ADAPTED: list[tuple[str, dict[str, Any]]] = [
    (name, keys) for name in ("qwen2", "llama") for keys in ({}, ROWS, {**ROWS, "whole": True})
]


@pytest.mark.parametrize(
    ("name", "keys"),
    slow_except([("qwen2", ROWS), ("llama", ROWS), ("llama", {**ROWS, "whole": True})], ADAPTED),
)
def test_adapter_merged_and_reloaded_are_one_model(
    name: str, keys: dict[str, Any], train: Path, tmp_path: Path
) -> None:
    """Tied (qwen2) and not; new tokens as rows that train by themselves, and in tables trained whole."""
    if keys.get("whole"):
        keys = {**keys, "lora__modules_to_save": TABLES[name]}
        del keys["whole"]
    base = save_model(tmp_path / name, name)
    out = sft(base, train, tmp_path / "out", lora__rank=4, **WIDE, **keys).out
    found = {event["name"]: event for event in events(out, "check")}
    for check in ("weights", "merge", "reload", "adapter"):
        assert found[check]["outcome"] == "passed"
        assert found[check]["value"] < 1e-4
    assert {check.name for check in read_contract(out / "model").checks} == {
        "weights",
        "merge",
        "reload",
        "adapter",
    }
    assert failed(out / "model") == set()


@pytest.mark.parametrize("lora__rank", [0, 4])
def test_rounding_to_the_saved_dtype_is_told_apart(
    lora__rank: int, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters the model is read back a layer at a time, its answers too."""
    monkeypatch.setattr(round_trip, "WHOLE", 0 if lora__rank else round_trip.WHOLE)
    base = save_model(tmp_path / "model", dtype=torch.bfloat16)
    out = sft(base, train, tmp_path / "out", lora__rank=lora__rank, **WIDE).out
    found = {event["name"]: event["value"] for event in events(out, "check")}
    assert found["weights"] == 0
    assert found["merge"] < 1e-4
    assert 1e-3 < found["reload"] < 0.2
    assert {value.dtype for value in weights(out / "model").values()} == {torch.bfloat16}
    assert failed(out / "model") == set(), "goldens are of the weights as saved"


def plant_a_lost_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that loses what was learned of one token."""

    def losing(model: nn.Module, whole: Any = None) -> Iterator[dict[str, torch.Tensor]]:
        for group in plain_groups(model, whole):
            for name, tensor in group.items():
                if name.endswith("embed_tokens.weight"):
                    group[name] = tensor.index_fill(0, torch.tensor([482]), 0.0)
            yield group

    for module in ("taut.evals.round_trip", "taut.models.save"):
        monkeypatch.setattr(f"{module}.plain_groups", losing)


def test_a_merge_that_loses_a_row_stops_the_run_and_keeps_what_there_was(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_a_lost_row(monkeypatch)
    with pytest.raises(
        taut.CheckFailed, match=r"merge: the saved model is not the trained one: .* the largest"
    ) as caught:
        sft(model, train, tmp_path / "out", lora__rank=4, **WIDE)
    out = tmp_path / "out"
    assert caught.value.exit_code == 1
    assert not (out / "model").exists()
    assert not list(out.glob(".model*"))
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["latest", "step-000002"]
    assert "step-000002" in str(caught.value)
    assert {event["name"]: event["outcome"] for event in events(out, "check")}["merge"] == "failed"
    assert events(out, "end")[0]["outcome"] == "stopped"
    monkeypatch.undo()
    again = sft(model, train, out, lora__rank=4, **WIDE, resume=True)
    assert failed(again.model) == set()
    assert column(again.out, "step") == [1, 2]


def test_weights_that_are_not_written_as_they_are_are_named(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoiled(*arguments: Any) -> Scorer:
        scorer = round_trip.load_anew(*arguments)
        with torch.no_grad():
            scorer.model.get_parameter(name)[0, 0] += 1e-6
        return scorer

    monkeypatch.setattr(contract, "load_anew", spoiled)
    with pytest.raises(taut.CheckFailed, match=f"weights: .*{name}"):
        sft(model, train, tmp_path / "out", steps=1)


def test_a_good_model_stays_where_a_later_save_fails(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    keys: dict[str, Any] = {"lora__rank": 4, **WIDE, "checkpoint__every": 1}
    sft(model, train, out, **keys)
    before = weights(out / "model")
    plant_a_lost_row(monkeypatch)
    with pytest.raises(taut.CheckFailed):
        sft(model, train, out, **(keys | {"steps": 3}), resume=True)
    assert all(torch.equal(value, before[name]) for name, value in weights(out / "model").items())
    assert read_contract(out / "model").goldens


def test_a_model_with_code_of_its_own_is_sealed_and_verified(tmp_path: Path) -> None:
    model = save_model(tmp_path / "llama", "llama")
    (model / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    names = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnModel"}
    own = {auto: f"modeling_own.{name}" for auto, name in names.items()}
    change_json(
        model / "config.json", lambda tree: tree.update(model_type="own_llama", auto_map=own)
    )
    train = write_rows(tmp_path / "few.jsonl", chats(4, seed=5))
    saved = sft(model, train, tmp_path / "out", trust_remote_code=True, **WIDE).model
    assert failed(saved, trust_remote_code=True) == set()


def test_what_was_trained_is_kept_where_it_cannot_be_saved(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Scorer:
        raise taut.ModelError("planted: it cannot be loaded")

    monkeypatch.setattr(contract, "load_anew", refuse)
    with pytest.raises(taut.CheckFailed, match=r"planted.*; training state: .*step"):
        sft(model, train, tmp_path / "out", steps=1)
    assert not (tmp_path / "out" / "model").exists()
    monkeypatch.undo()
    assert sft(model, train, tmp_path / "out", steps=1, resume=True).model.is_dir()


@pytest.mark.parametrize("place", [save, round_trip], ids=["trained", "saved"])
def test_what_cannot_be_compared_is_kept(
    place: ModuleType, model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot be compiled, a GPU without room for a second model: the trained weights are on the disk,
    complete, under a name that says that nothing proved them; a resumed run proves and replaces them.
    """

    def fall(*_: Any) -> list[Tensor]:
        raise RuntimeError("planted: no C compiler\nand more lines")

    out = tmp_path / "out"
    monkeypatch.setattr(place, "score", fall)
    pattern = r": RuntimeError: planted: no C compiler \(test_contract.*:\d+\); .*unproven has it.*; training"
    with pytest.raises(taut.CheckFailed, match=pattern):
        sft(model, train, out, steps=1)
    assert not (out / "model").exists()
    assert largest_difference(weights(out / "model.unproven"), weights(model)) > 0
    monkeypatch.undo()
    assert sft(model, train, out, steps=1, resume=True).model.is_dir()
    assert not (out / "model.unproven").exists()
