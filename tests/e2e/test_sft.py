"""``taut.sft`` from a JSONL file to a model directory, on tiny random models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import (
    PLAIN,
    QUIET,
    SENTENCE,
    chats,
    column,
    decisions,
    events,
    largest_difference,
    save_model,
    sft,
    weights,
    words_of,
    write_rows,
)
from tests.helpers.forked_processes import run
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, FOLLOWING, LEAKING
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import taut
from taut.checks import CHECKS
from taut.config import from_mapping
from taut.data.dataset import build_renderer, load_dataset
from taut.data.settings import DataConfig
from taut.models.load import quiet_library
from taut.models.precision import compute_context

STEP_FIELDS = {
    "step": int,
    "loss": float,
    "grad_norm": float,
    "learning_rate": float,
    "num_targets": int,
    "num_tokens": int,
    "num_tokens_unshared": int,
    "seconds": float,
    "sample_ids": list,
}
"""The contract other tools rely on."""

Go = Callable[..., taut.Result]


@pytest.fixture
def go(model: Path, train: Path, tmp_path: Path) -> Go:
    """``go(name, **keys)`` runs into ``tmp_path/name``."""
    return lambda name="out", **keys: sft(model, train, tmp_path / name, **{**PLAIN, **keys})


def load_plain(directory: Path) -> PreTrainedModel:
    """As a user without taut loads it."""
    with quiet_library():
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto",
            experts_implementation="eager",  # the only ones in float64
        )
    return found.eval().double()  # the rotation's buffers too


def mean_loss(directory: Path, rows: Path) -> float:
    """-log p of the assistant's tokens, through transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    data = load_dataset(
        DataConfig(train=str(rows)), "train", build_renderer(DataConfig(), tokenizer), 200
    )
    model, total, count = load_plain(directory), 0.0, 0
    with torch.no_grad(), compute_context(torch.float64, torch.device("cpu")):
        for sample in data:
            logp = model(torch.from_numpy(sample.ids_T)[None]).logits[0].log_softmax(-1)
            for at in sample.target_at_N:
                total -= float(logp[at - 1, sample.ids_T[at]])
            count += sample.num_targets
    return total / count


def test_files_and_events_of_a_run(go: Go, train: Path) -> None:
    result = go(steps=5, check="quick", contract__prompts=4)
    out = result.out
    assert {path.name for path in out.iterdir()} == {
        ".lock",
        "resolved.json",
        "events.jsonl",
        "tokens",
        "model",
    }
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    is_slow = {"utilization"}  # comes with a step after 15 seconds
    assert set(kinds) - is_slow == {"start", "check", "step", "end"}
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert {name: type(step[name]) for name in STEP_FIELDS} == STEP_FIELDS
        assert len(step["sample_ids"]) == 6
        assert step["num_tokens"] < step["num_tokens_unshared"]
    asked = {line["name"]: line["outcome"] for line in lines if line.get("part") == "quick"}
    assert list(asked) == [name for name, check in CHECKS.items() if check.part == "quick"]
    assert set(asked.values()) <= {"passed", "skipped"}
    checks = {
        line["name"]: line["outcome"]
        for line in lines
        if line["kind"] == "check" and line["name"] not in asked
    }
    assert checks == dict.fromkeys(
        [
            "first_step",
            "weights",
            "reload",
            "contract",
        ],
        "passed",
    ) | {"stop": "skipped"}  # tests.helpers.chat_runs.QUIET asks for none
    assert result.loss == steps[-1]["loss"] == lines[-1]["loss"]
    resolved = json.loads((out / "resolved.json").read_text())
    assert resolved["config"]["steps"] == 5
    assert resolved["config"]["batch"]["samples_per_step"] == 6
    assert resolved["num_steps"] == 5
    assert {"dtype", "attention"} <= decisions(out).keys()
    assert str(train) in column(out, "sample_ids")[0][0]


def test_the_first_loss_is_the_mean_over_all_targets_of_the_step(
    go: Go, model: Path, train: Path
) -> None:
    result = go(epochs=1.0, batch__samples_per_step=23)
    assert column(result.out, "loss") == pytest.approx([mean_loss(model, train)], rel=1e-9)


def test_the_saved_model_is_the_trained_one_and_loads_anywhere(
    go: Go, model: Path, train: Path
) -> None:
    result = go(steps=3, data__eval=str(train))
    assert result.eval_loss == pytest.approx(mean_loss(result.model, train), rel=1e-9)
    assert result.eval_loss != pytest.approx(mean_loss(model, train), rel=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert tokenizer.chat_template
    config = load_plain(result.model).generation_config
    assert (
        tokenizer.convert_tokens_to_ids("<|im_end|>") in torch.tensor(config.eos_token_id).flatten()
    )


def test_evaluation_every_so_often_and_at_the_end(go: Go, train: Path) -> None:
    result = go(steps=5, data__eval=str(train), eval__every=2)
    found = events(result.out, "eval")
    assert [event["step"] for event in found] == [2, 4, 5]
    assert {event["num_samples"] for event in found} == {23}
    assert found[-1]["loss"] == result.eval_loss


def test_sharing_changes_neither_plan_nor_numbers(go: Go) -> None:
    runs = [
        go("shared", steps=4),
        go("apart", steps=4, batch__share_prefixes=False),
        go("split", steps=4, batch__tokens_per_microbatch=90),
        go("recomputed", steps=4, activation_checkpointing=True),
        go("all", steps=4, activation_checkpointing=True, batch__share_prefixes=False),
    ]
    first = runs[0]
    for other in runs[1:]:
        for name in ("loss", "grad_norm"):
            assert column(other.out, name) == pytest.approx(column(first.out, name), rel=1e-9)
        assert column(other.out, "sample_ids") == column(first.out, "sample_ids")
        unshared = column(other.out, "num_tokens_unshared")
        assert unshared == column(first.out, "num_tokens_unshared")
        # AdamW divides by the root of tiny second moments, which magnifies rounding.
        assert largest_difference(weights(other.model), weights(first.model)) < 1e-7
    assert column(runs[1].out, "num_tokens") == column(runs[1].out, "num_tokens_unshared")


def test_steps_go_round_and_epochs_end(go: Go) -> None:
    endless = column(go("steps", steps=5).out, "sample_ids")
    assert [len(step) for step in endless] == [6] * 5
    flat = [name for step in endless for name in step]
    assert len(set(flat[:23])) == 23
    ended = column(go("epochs", epochs=1.0).out, "sample_ids")
    assert [len(step) for step in ended] == [6, 6, 6, 5]
    assert [name for step in ended for name in step] == flat[:23]


def test_documents_are_kept_in_one_step(model: Path, tmp_path: Path) -> None:
    rows = []
    for document in range(4):
        for question, row in enumerate(chats(3, seed=document)):
            row["messages"][0]["content"] = f"document {document} " + "the cat sat on the mat " * 12
            row["messages"][1]["content"] = f"question {question}"
            rows.append(row)
    train = write_rows(tmp_path / "documents.jsonl", rows[::2] + rows[1::2])
    out = sft(
        model,
        train,
        tmp_path / "out",
        steps=4,
        batch__samples_per_step=3,
        batch__group_prefixes=True,
    ).out
    saved = [
        1 - now / alone
        for now, alone in zip(
            column(out, "num_tokens"), column(out, "num_tokens_unshared"), strict=True
        )
    ]
    assert min(saved) > 0.3, "each step is one document"


def test_a_memorizable_set_is_memorized(model: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "few.jsonl", chats(4, seed=5))
    keys: dict[str, Any] = {
        "dtype": "float32",
        "optim.learning_rate": 1e-2,
        "batch.samples_per_step": 4,
    }
    losses = column(sft(model, train, tmp_path / "out", steps=40, **keys).out, "loss")
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's own call
def test_lora_saves_the_adapter_and_the_merged_model(go: Go, model: Path, train: Path) -> None:
    from peft import PeftModel

    result = go(steps=3, lora__rank=4, optim__learning_rate=1e-2, data__eval=str(train))
    adapter = weights(result.out / "adapter")
    assert all("lora_" in name for name in adapter)
    assert max(float(t.abs().max()) for name, t in adapter.items() if "lora_B" in name) > 1e-3
    merged = load_plain(result.model)
    ids = torch.arange(12)[None] + 5
    with torch.no_grad(), compute_context(torch.float64, torch.device("cpu")):
        ours = merged(ids).logits
        base = load_plain(model)
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(result.out / "adapter"))(ids).logits
    torch.testing.assert_close(ours, adapted, rtol=0, atol=1e-5)  # peft loads adapters in float32
    name = "model.layers.1.mlp.up_proj"
    added = weights(result.model)[f"{name}.weight"] - weights(model)[f"{name}.weight"]
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(added, 2.0 * b @ a, rtol=0, atol=1e-12)
    assert float((ours - before).abs().max()) > 1e-3
    assert result.eval_loss == pytest.approx(mean_loss(result.model, train), rel=1e-9)


def test_an_adapter_can_be_all_that_is_saved(go: Go, model: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "steps": 3,
        "lora__rank": 4,
        "data__eval": str(write_rows(tmp_path / "eval.jsonl", chats(27)[23:])),
        "eval__every": 1,
        "eval__best": "loss",
        "checkpoint__every": 2,
        "contract__prompts": 2,
    }
    whole = go("whole", **keys)
    alone = go("alone", **keys, save__merged=False)
    assert alone.model == alone.out / "adapter"
    assert not (alone.out / "model").exists()
    assert not list((alone.out / "best").glob("model*.safetensors"))
    for name in ("adapter", "best"):
        assert weights(alone.out / name).keys() == weights(whole.out / "adapter").keys()
    assert largest_difference(weights(alone.out / "adapter"), weights(whole.out / "adapter")) == 0
    checks = {event["name"]: event["outcome"] for event in events(alone.out, "check")}
    assert (checks["adapter"], checks["contract"]) == ("passed", "skipped")
    assert [one.state for one in taut.runs(alone.out)] == ["finished"]
    again = go("alone", **keys, save__merged=False, resume=True)
    assert again.notice is not None
    assert str(alone.out / "adapter") in again.notice
    merged = go("alone", **keys, resume=True)  # the checkpoint of the last step is enough
    assert largest_difference(weights(merged.model), weights(whole.model)) == 0
    taut.merge(model=str(model), adapter=str(alone.out / "adapter"), out=str(tmp_path / "merged"))
    gap = largest_difference(weights(tmp_path / "merged"), weights(whole.model))
    assert gap < 1e-6  # peft loads adapters in float32


def test_a_model_of_fewer_steps_does_not_stay_beside_a_newer_adapter(go: Go) -> None:
    keys: dict[str, Any] = {"lora__rank": 4, "checkpoint__every": 1}
    merged = go("toggled", steps=1, **keys)
    assert merged.model == merged.out / "model"
    alone = go("toggled", steps=2, **keys, save__merged=False, resume=True)
    assert alone.model == alone.out / "adapter"
    assert not merged.model.exists()
    assert "model" in {event["name"] for event in events(alone.out, "warning")}


def test_a_finished_adapter_without_a_checkpoint_is_not_trained_again_to_be_merged(go: Go) -> None:
    keys: dict[str, Any] = {"steps": 1, "lora__rank": 4, "checkpoint__every": 0}
    alone = go("alone", **keys, save__merged=False)
    with pytest.raises(taut.ConfigError, match=r"and no checkpoint.*taut merge"):
        go("alone", **keys, resume=True)
    assert (alone.out / "adapter").is_dir()


def test_only_an_adapter_can_be_saved_alone(go: Go) -> None:
    with refused(ErrorCode("save.merged/lora.rank")):
        go(steps=1, save__merged=False)


def test_going_on_from_an_adapter(go: Go) -> None:
    first = go("first", steps=2, lora__rank=4)
    second = go("second", steps=1, lora__adapter=str(first.out / "adapter"))
    frozen_too = weights(first.out / "adapter")
    assert weights(second.out / "adapter").keys() == frozen_too.keys()
    assert 0 < largest_difference(weights(second.out / "adapter"), frozen_too) < 0.01


@pytest.mark.parametrize(
    "keys",
    [
        {"lora__rank": 4, "lora__dora": True},
        {"lora__rank": 4, "lora__rslora": True, "lora__targets": ["q_proj", "down_proj"]},
    ],
    ids=["dora", "rslora"],
)
def test_kinds_of_lora_do_not_depend_on_the_layout(go: Go, keys: dict[str, Any]) -> None:
    losses = [
        column(go(name, steps=3, batch__tokens_per_microbatch=tokens, **keys).out, "loss")
        for name, tokens in (("one", 8192), ("many", 80))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


NOISY: dict[str, Any] = {"lora__rank": 4, "lora__dropout": 0.3}


@pytest.mark.parametrize(
    "keys",
    slow_except([NOISY], [{}, NOISY]),
    ids=["full", "lora"],
)
def test_noise_does_not_depend_on_the_layout(go: Go, keys: dict[str, Any]) -> None:
    noisy = {"noise__neftune_alpha": 5.0, "steps": 3, **keys}
    one, many, again = (
        go("one", **noisy),
        go("many", batch__tokens_per_microbatch=80, **noisy),
        go("again", activation_checkpointing=True, **noisy),
    )
    quiet = go("quiet", steps=3)
    for other in (many, again):
        assert column(one.out, "loss") == pytest.approx(column(other.out, "loss"), rel=1e-9)
        assert column(one.out, "grad_norm") == pytest.approx(
            column(other.out, "grad_norm"), rel=1e-9
        )
    assert column(one.out, "loss")[0] != pytest.approx(column(quiet.out, "loss")[0], rel=1e-6)
    value, reason = decisions(one.out)["batch.share_prefixes"]
    assert value == "false"
    assert "noise" in reason
    assert column(one.out, "num_tokens") == column(one.out, "num_tokens_unshared")


def test_bfloat16_is_near_float32_and_keeps_float32_weights(go: Go) -> None:
    narrow, wide = (go(name, steps=4, dtype=name) for name in ("bfloat16", "float32"))
    assert column(narrow.out, "loss") == pytest.approx(column(wide.out, "loss"), rel=0.02)
    assert column(narrow.out, "loss") != column(wide.out, "loss")
    assert largest_difference(weights(narrow.model), weights(wide.model)) < 0.02


def test_frozen_tensors_stay_and_the_others_move(go: Go, model: Path) -> None:
    result = go(steps=2, freeze=["*embed_tokens*", "*layers.0.*"])
    before, after = weights(model), weights(result.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {n for n in before if "layers.1." in n or n == "model.norm.weight"}
    assert "freeze" in decisions(result.out)


def test_added_tokens_are_learned_and_saved(model: Path, tmp_path: Path) -> None:
    rows = chats(8)
    for row in rows:
        row["messages"][2]["content"] = "<|answer|>" + row["messages"][2]["content"]
    train = write_rows(tmp_path / "rows.jsonl", rows)
    result = sft(model, train, tmp_path / "out", steps=2, tokens__add=["<|answer|>"])
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    (new,) = tokenizer.encode("<|answer|>", add_special_tokens=False)
    table = weights(result.model)["model.embed_tokens.weight"]
    assert table.shape[0] > new
    known = weights(model)["model.embed_tokens.weight"]
    assert not torch.allclose(table[new], known[:new].mean(0), atol=1e-6), "it has been trained"


@pytest.mark.parametrize(
    "name", slow_except(["gemma2", "qwen3_moe", "qwen3_5_text"], [*CARRIED, *FOLLOWING])
)
def test_every_architecture_trains_packed_and_saves_what_it_trained(
    name: str, train: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path / name, name, dtype=torch.float64)
    keys: dict[str, Any] = {"steps": 2, "data__eval": str(train)}
    result = sft(model, train, tmp_path / "out", **keys)
    keys |= {**PLAIN, "activation_checkpointing": True}
    again = sft(model, train, tmp_path / "recomputed", **keys)
    checks = {event["name"]: event["outcome"] for event in events(result.out, "check")}
    assert checks.pop("stop") == "skipped"  # tests.helpers.chat_runs.QUIET asks for none
    assert checks.pop("data.overlap") == "warning"  # it is measured on what it learns from
    assert set(checks.values()) <= {"passed", "skipped"}
    assert {checks["attention.packed"], checks["first_step"], checks["reload"]} == {"passed"}
    assert not events(result.out, "warning")
    assert sum(column(result.out, "num_tokens")) < sum(column(result.out, "num_tokens_unshared"))
    assert result.eval_loss == pytest.approx(mean_loss(result.model, train), rel=1e-6)
    assert column(again.out, "grad_norm") == pytest.approx(
        column(result.out, "grad_norm"), rel=1e-9
    )


def test_chunked_attention_is_refused_before_anything_is_written(
    train: Path, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", "llama4_text")
    with pytest.raises(taut.CheckFailed, match="llama4_text is neither causal"):
        sft(model, train, tmp_path / "out", steps=1)
    assert not (tmp_path / "out").exists()


def test_longrope_packs_within_its_first_regime_only(model: Path, tmp_path: Path) -> None:
    """The original length is 32 here; one held-out sample beyond it is enough."""
    rope = save_model(tmp_path / "model", "phi3_longrope", dtype=torch.float64)
    brief = [{"prompt": "the cat", "completion": f"ran {word}"} for word in SENTENCE.split()]
    train = write_rows(tmp_path / "short.jsonl", brief)
    held_out = write_rows(tmp_path / "long.jsonl", [*brief, *chats(1)])
    keys = {"steps": 1, "data__apply_chat_template": False}
    packed = sft(rope, train, tmp_path / "packed", **keys)
    alone = sft(rope, train, tmp_path / "alone", data__eval=str(held_out), **keys)
    assert "packing" not in decisions(packed.out)
    assert "longrope" in decisions(alone.out)["packing"][1]
    assert column(packed.out, "loss") == pytest.approx(column(alone.out, "loss"), rel=1e-9)
    assert alone.eval_loss == pytest.approx(mean_loss(alone.model, held_out), rel=1e-6)


@pytest.mark.parametrize("name", LEAKING)
def test_layers_with_state_run_one_sample_at_a_time(name: str, train: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / name, name)
    out = sft(model, train, tmp_path / "out", steps=2, dtype="float32").out
    value, reason = decisions(out)["packing"]
    assert value == "one sample at a time"
    assert "layers with state across tokens" in reason
    assert column(out, "num_tokens") == column(out, "num_tokens_unshared")
    outcomes = {event["name"]: event["outcome"] for event in events(out, "check")}
    assert outcomes["attention.neighbor"] == "skipped"
    assert outcomes["first_step"] == "passed"


def test_the_command_line_and_a_toml_file_do_the_same(
    go: Go, model: Path, train: Path, tmp_path: Path
) -> None:
    expected = go("library", steps=2)
    toml = tmp_path / "run.toml"
    toml.write_text(f'model = "{model}"\nsteps = 3\n[data]\ntrain = "{train}"\n')
    out = tmp_path / "command"
    words = [str(toml), *words_of({**QUIET, "steps": 2, "out": str(out)})]
    done = run("-m", "taut", "sft", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert column(out, "loss") == column(expected.out, "loss")
    assert largest_difference(weights(out / "model"), weights(expected.model)) == 0.0


def test_a_second_start_does_not_tokenize_again(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go("first", steps=1)

    def refuse(*args: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr("taut.data.dataset.tokenize_source", refuse)
    assert column(go("second", steps=1).out, "loss") == column(first.out, "loss")


def test_an_out_with_a_run_in_it_is_replaced_only_when_told(go: Go, tmp_path: Path) -> None:
    go(steps=1)
    with pytest.raises(taut.OutputError, match="not empty"):
        go(steps=2)
    assert len(column(tmp_path / "out", "loss")) == 1
    go(steps=2, overwrite=True)
    assert len(column(tmp_path / "out", "loss")) == 2


def test_a_learning_rate_that_is_not_set_is_told_and_taken(go: Go, tmp_path: Path) -> None:
    keys = {"steps": 2, "optim__learning_rate": None, "optim__warmup_steps": 0}
    out = go(**keys, lora__rank=4).out
    assert column(out, "learning_rate") == [2e-4, 2e-4]
    value, reason = decisions(out)["optim.learning_rate"]
    assert (value, reason[:42]) == ("0.0002", "the default of taut sft where adapters tra")
    assert (
        json.loads((out / "resolved.json").read_text())["config"]["optim"]["learning_rate"] is None
    )
    keys |= {"resume": True, "steps": 3, "checkpoint__every": 1}
    with pytest.raises(taut.ConfigError, match="is finished after step 2, without a checkpoint"):
        go(**keys, lora__rank=4)
    with pytest.raises(taut.ConfigError, match=r"optim\.learning_rate: 0\.0002 then, 0\.1 now"):
        go(**{**keys, "steps": 2, "optim__learning_rate": 0.1}, lora__rank=4)


def test_a_stopped_run_says_so_at_its_end(go: Go, tmp_path: Path) -> None:
    """An absurd learning rate without clipping overflows; the events end with why."""
    with pytest.raises(taut.NonFiniteError):
        go(steps=6, dtype="float32", optim__learning_rate=1e38, optim__clip_grad_norm=None)
    (last,) = events(tmp_path / "out", "end")
    assert last["outcome"] == "stopped"
    assert "is nan" in last["reason"] or "is inf" in last["reason"]
    assert not (tmp_path / "out" / "model").exists()


def test_a_run_made_by_its_public_class_is_fine_tuning(
    model: Path, train: Path, tmp_path: Path
) -> None:
    """And it is resumed as the class of the method."""
    keys: dict[str, Any] = {"checkpoint.every": 1, "check": "off", "stop_check.prompts": 0}
    out = tmp_path / "out"
    run = from_mapping(
        taut.Run, {"model": str(model), "out": str(out), "data": {"train": str(train)}}
    )
    assert type(run) is taut.Run
    assert taut.sft(run, steps=1, device="cpu", **keys).steps == 1
    assert taut.resume(str(out), steps=2).steps == 2
