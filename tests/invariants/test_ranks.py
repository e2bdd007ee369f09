"""Two gloo ranks are one process: losses, gradient norms and final weights; an error on one ends all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import (
    QUIET,
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
from tests.helpers.rank_memory import memory_of_ranks, save_random_llama
from tests.helpers.selected import selected
from tests.helpers.slow_cases import slow_except
from tests.helpers.vision_models import tiny_vlm
from tests.helpers.vision_samples import Drawn

import taut
from taut.models.load import load_model

LIMIT = 1e-9

PLAIN: dict[str, Any] = {"check": "off", "contract.prompts": 0}
"""What the first run shows is not shown again: that checks and golden prompts are asked of two ranks."""

RUNS: dict[str, dict[str, Any]] = {
    # Five samples a step in micro-batches of 90 tokens: the ranks have different numbers of them.
    # Three answers are drawn at the end: one rank has two, the other one and keeps it company.
    "uneven bins": {
        "steps": 4,
        "batch.samples_per_step": 5,
        "batch.tokens_per_microbatch": 90,
        "stop_check.prompts": 3,
        "stop_check.max_new_tokens": 8,
        "stop_check.min_share": 1.0,
    },
    # One sample a step: a rank has none, and runs one backward that counts for nothing.
    "a rank without": {
        **PLAIN,
        "steps": 3,
        "batch.samples_per_step": 1,
        "activation_checkpointing": True,
    },
    "lora, noise, checkpoints": {
        **PLAIN,
        "steps": 4,
        "lora.rank": 4,
        "lora.dropout": 0.2,
        "lora.modules_to_save": ["embed_tokens", "lm_head"],
        "checkpoint.every": 2,
    },
    "lora by rows": {
        **PLAIN,
        "steps": 4,
        "lora.rank": 4,
        "lora.dora": True,
        "lora.train_token_rows": "always",
        "checkpoint.every": 2,
    },
    "pissa": {
        **PLAIN,
        "steps": 4,
        "lora.rank": 4,
        "lora.init": "pissa",
        "checkpoint.every": 2,
    },
    "muon, eight bits": {
        **PLAIN,
        "steps": 4,
        "optim.name": "muon",
        "optim.state": "int8",
        "checkpoint.every": 2,
    },
}
SLOW = ("lora by rows", "pissa", "muon, eight bits")
TAUGHT: dict[str, Any] = {
    **RUNS["uneven bins"],
    "method": "distill",
    "distill.teacher": "teacher",
    "distill.divergence": "js",
    "distill.sft_weight": 0.2,
    "check": "off",
}
ILLUSTRATED: dict[str, Any] = {
    # Two samples a step, of which none, one or both have pictures, alone or several: ranks do not see the same, and of
    # the ends of a picture's rows one may see none.
    "method": "sft",
    "steps": 4,
    "batch.samples_per_step": 2,
    "batch.shuffle": False,
    "optim.group_learning_rates": {"vision_tower": 1e-4, "*image_newline": 1e-2},
    "activation_checkpointing": True,
    "checkpoint.every": 2,
    "check": "off",
}
PICTURES = ("", "0", "1 2", "3", "1 2", "", "2 3", "1")
"""The pictures of each row."""

LAST = """\
import os, sys
from taut import cli, errors
from taut.train import trainer as loop
def fail(*_, **__):
    if os.environ["RANK"] == "1":
        raise errors.CheckFailed("step 2: planted on the second rank")
real = loop.train_step
loop.train_step = lambda trainer, step: real(trainer, step) if step < 2 else (fail(), real(trainer, step))[1]
sys.exit(cli.main(sys.argv[1:]))
"""
"""A program whose second rank fails at step 2, while the first waits for it in a collective."""

PROGRAM = """\
import json, sys, taut
from taut.train import distributed as parallel
leave, parallel.stop = parallel.stop, lambda ranks: None  # the group is joined once
parallel.require_offloadable = lambda device: None
for keys in json.load(open(sys.argv[1])):
    getattr(taut, keys["method"])(**keys)
leave(parallel.start("cpu"))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, so that head and embedding can be trained beside adapters."""
    place = tmp_path_factory.mktemp("model") / "llama"
    return save_model(place, "llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", chats(11))


def torchrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Two processes of ``python WORDS``, as they are started in earnest; forked processes are quicker."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return subprocess.run(
        [*launcher, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def forked(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run(*words, num_ranks=2)


def by_ranks(place: Path, todo: Sequence[Mapping[str, Any]], num_ranks: int = 2) -> None:
    """The runs that ``todo`` has the keys of, one after another, in one process group."""
    (place / "program.py").write_text(PROGRAM)
    (place / "todo.json").write_text(json.dumps(todo))
    done = run(place / "program.py", place / "todo.json", num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr


def held_out_of(train: Path) -> str:
    """One sample: in the evaluation too a rank has nothing to do, and must not leave the other waiting."""
    return str(write_rows(train.with_name("held_out.jsonl"), chats(1, seed=9)))


def keys_of(model: Path, train: Path, out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **QUIET,
        "model": model,
        "data.train": train,
        "data.eval": held_out_of(train),
        "out": out,
        **given,
    }


def illustrated_keys(place: Path) -> dict[str, Any]:
    """A model whose gradients depend most on what pictures there are, and rows with some."""
    for number in range(4):
        Drawn(number, 8 + 8 * (number % 2), 8 + 5 * (number // 2)).image.save(
            place / f"{number}.png"
        )
    rows = []
    for number, names in enumerate(PICTURES):
        images = [{"type": "image", "image": f"{name}.png"} for name in names.split()]
        asked = {
            "role": "user",
            "content": [*images, {"type": "text", "text": f"Number {number}?"}],
        }
        told = {"role": "assistant", "content": "one two three"[: 4 + number]}
        rows.append({"messages": [asked, told]})
    return {
        "model": tiny_vlm("llava_onevision", place / "vlm"),
        "data.train": write_rows(place / "pictures.jsonl", rows),
        "data.eval": write_rows(place / "eval.jsonl", rows[1:2]),
    }


def approx(asked: Mapping[str, float]) -> Any:
    return pytest.approx(asked["end_probability"], rel=LIMIT)


def by_one_and_by_two(
    place: Path, model: Path, train: Path, runs: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Every run by one process, and then by two ranks, in one process group."""
    todo = []
    for name, given in runs.items():
        keys = {"method": "sft", **keys_of(model, train, place / "one" / name, given)}
        if "distill.teacher" in keys:
            keys["distill.teacher"] = place / keys["distill.teacher"]
        keys = {key: str(it) if isinstance(it, Path) else it for key, it in keys.items()}
        getattr(taut, keys["method"])(**keys)
        todo.append({**keys, "out": str(place / "two" / name)})
    by_ranks(place, todo)
    return place


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    train: Path,
) -> Path:
    """The runs that the tests which are asked for compare."""
    place = tmp_path_factory.mktemp("runs")
    asked = selected(request)
    runs = {
        name: given
        for name, given in RUNS.items()
        if name not in SLOW and f"{test_two_ranks_equal_one_process.__name__}[{name}]" in asked
    }
    if test_a_teacher_teaches_two_ranks_as_one.__name__ in asked:
        save_model(place / "teacher", "gemma2", hidden_size=48, seed=3)
        runs["taught"] = TAUGHT
    if test_pictures_that_one_rank_sees_are_seen_by_both.__name__ in asked:
        runs["illustrated"] = {**ILLUSTRATED, **illustrated_keys(place)}
    return by_one_and_by_two(place, model, train, runs)


@pytest.fixture(scope="module")
def slow_place(tmp_path_factory: pytest.TempPathFactory, model: Path, train: Path) -> Path:
    runs = {name: RUNS[name] for name in SLOW}
    return by_one_and_by_two(tmp_path_factory.mktemp("slow"), model, train, runs)


@pytest.mark.parametrize("name", slow_except([name for name in RUNS if name not in SLOW], RUNS))
def test_two_ranks_equal_one_process(
    name: str, request: pytest.FixtureRequest, model: Path, train: Path
) -> None:
    place = request.getfixturevalue("slow_place" if name in SLOW else "place")
    one, two = place / "one" / name, place / "two" / name
    assert events(two, "start")[0]["num_ranks"] == 2
    for field in ("loss", "grad_norm"):
        assert column(two, field) == pytest.approx(column(one, field), rel=LIMIT)
    for field in ("sample_ids", "num_targets", "num_tokens_unshared", "step"):
        assert column(two, field) == column(one, field)
    asked = [events(out, "end")[0]["stop"] for out in (one, two)]
    assert asked[1] == (asked[0] and {**asked[0], "end_probability": approx(asked[0])})
    held_out = [[event["loss"] for event in events(out, "eval")] for out in (one, two)]
    assert held_out[1] == pytest.approx(held_out[0], rel=LIMIT)
    assert largest_difference(weights(two / "model"), weights(one / "model")) < LIMIT
    if "lora.rank" in RUNS[name]:
        assert largest_difference(weights(two / "adapter"), weights(one / "adapter")) < LIMIT
    if "checkpoint.every" in RUNS[name]:  # a checkpoint of two ranks goes on in one process
        for path in (two / "checkpoints" / "step-000004").iterdir():
            path.unlink()
        shutil.rmtree(two / "model")  # as if it had been killed before its end
        sft(model, train, two, **{"data.eval": held_out_of(train), **RUNS[name]}, resume=True)
        assert events(two, "resume")[0]["from_step"] == 2
        assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=LIMIT)
        assert largest_difference(weights(two / "model"), weights(one / "model")) < LIMIT


@pytest.mark.slow
def test_two_replicas_of_two_ranks_equal_one_process(
    model: Path, train: Path, tmp_path: Path
) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    keys = keys_of(model, train, one, RUNS["lora, noise, checkpoints"])
    keys = {key: str(it) if isinstance(it, Path) else it for key, it in keys.items()}
    taut.sft(**keys)
    replicas = {**keys, "method": "sft", "out": str(four), "parallel.replicas": 2}
    by_ranks(tmp_path, [replicas], 4)
    assert events(four, "start")[0]["num_ranks"] == 4
    for field in ("loss", "grad_norm"):
        assert column(four, field) == pytest.approx(column(one, field), rel=LIMIT)
    assert largest_difference(weights(four / "adapter"), weights(one / "adapter")) < LIMIT


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_reads_its_part_and_saves_a_layer_at_a_time(num_ranks: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12}
    model = save_model(tmp_path / "model", "llama", dtype=torch.bfloat16, **sizes)
    rest = 16 * 2**20  # of the library, and files' pages that are converted
    for rank, seen in enumerate(memory_of_ranks(model, tmp_path, num_ranks)):
        assert seen["all"] > 6 * rest
        assert seen["reading"] < seen["all"] / num_ranks + seen["largest"] + rest
        if num_ranks == 1:
            assert seen["reading"] > 0.9 * seen["all"], "the measure sees what is read"
        assert seen["saving"] < (1.5 * seen["group"] if rank == 0 else 0) + rest
        assert seen["comparing"] < (seen["outside"] + 3 * seen["group"]) * (rank == 0) + rest
    saved = weights(tmp_path / "saved")
    assert largest_difference(saved, weights(model)) == 0


FULL = """\
import errno, os, sys
from taut import cli
from taut.models.weight_files import WeightFile
put = WeightFile.put
def fill(file, name, tensor):
    if len(file.missing) < 9:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    put(file, name, tensor)
WeightFile.put = fill
sys.exit(cli.main(sys.argv[1:]))
"""
"""A program whose disk is full in the middle of a model."""


@pytest.mark.slow
def test_a_full_disk_while_ranks_send_what_is_saved_ends_all(
    model: Path, train: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "program.py").write_text(FULL)
    keys = keys_of(model, train, out, {"steps": 1, "check": "off", "lora.rank": 4})
    done = run(tmp_path / "program.py", "sft", *words_of(keys), num_ranks=2)
    assert done.returncode == 1
    assert done.stderr.count("taut: error: ") == 1
    assert "model cannot be written: " in done.stderr and "No space left" in done.stderr
    assert not [path.name for path in out.iterdir() if "model" in path.name or path.is_symlink()]
    sft(
        model,
        train,
        out,
        **{k: v for k, v in keys.items() if k not in ("model", "data.train", "out")},
        resume=True,
    )
    assert (out / "model").is_dir()


@pytest.mark.parallel
def test_a_rank_reads_its_part_of_a_billion_weights(tmp_path: Path) -> None:
    """2 GB of bfloat16, read and saved in bfloat16."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768}
    model, rest = save_random_llama(tmp_path / "model", **sizes, **heads), 64 * 2**20
    for num_ranks in (2, 4):
        found = memory_of_ranks(model, tmp_path, num_ranks, "bfloat16", is_narrow=True)
        for rank, seen in enumerate(found):
            assert seen["all"] > 2e9
            assert seen["reading"] < seen["all"] / num_ranks + seen["largest"] + rest
            assert seen["saving"] < (1.5 * seen["group"] if rank == 0 else 0) + rest
            most = seen["outside"] + 3 * seen["group"]
            assert seen["comparing"] < most * (rank == 0) + rest
        shutil.rmtree(tmp_path / "saved")


@pytest.mark.parametrize("start", [forked, pytest.param(torchrun, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_ends_all_with_its_message(
    start: Callable[..., subprocess.CompletedProcess[str]], model: Path, train: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAST)
    keys = keys_of(model, train, tmp_path / "out", RUNS["uneven bins"])
    done = start(program, "sft", *words_of(keys))
    assert done.returncode != 0
    lines = done.stderr.splitlines()  # torchrun's own table has the message once more
    assert lines.count("taut: error: step 2: planted on the second rank") == 1
    assert column(tmp_path / "out", "step") == [1]
    assert not (tmp_path / "out" / "model").exists()


def test_an_error_on_every_rank_is_told_once(model: Path, tmp_path: Path) -> None:
    keys = keys_of(model, tmp_path / "none.jsonl", tmp_path / "out", RUNS["uneven bins"])
    done = run("-m", "taut", "sft", *words_of(keys), num_ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("taut: error: ") == 1
    assert "none.jsonl" in done.stderr
    assert not (tmp_path / "out").exists()


def test_two_ranks_stop_together_where_training_diverges(
    model: Path, train: Path, tmp_path: Path
) -> None:
    keys = keys_of(model, train, tmp_path / "out", RUNS["uneven bins"])
    keys |= {
        "steps": 20,
        "optim.learning_rate": 1.0,
        "check": "off",
        "loss_monitor.loss_ratio": 1.1,
    }
    keys |= {"loss_monitor.loss_margin": 0.1}
    done = run("-m", "taut", "sft", *words_of(keys), num_ranks=2)
    assert done.returncode == 1
    assert done.stderr.count("taut: error: ") == 1
    assert "training has diverged: the loss was above" in done.stderr
    assert not (tmp_path / "out" / "model").exists()


TRANSPOSED = """\
import sys, torch
from taut.models.load import load_model
from taut.train import distributed

ranks = distributed.start("cpu")
model = load_model(sys.argv[1], dtype=torch.float32, device=ranks.device, attention="taut_reference",
                   shard=distributed.layer_sharding(ranks, torch.float32))
whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
state = {name: whole(p).detach() for name, p in model.named_parameters()}
if ranks.is_writer:
    torch.save(state, sys.argv[2])
distributed.stop(ranks)
"""
"""A program that loads a model by parts and writes the whole."""


@pytest.mark.slow
def test_experts_whose_matrices_are_stored_transposed_are_read_by_parts(tmp_path: Path) -> None:
    model = tiny_vlm("qwen3_vl_moe", tmp_path / "model")
    (tmp_path / "program.py").write_text(TRANSPOSED)
    done = run(tmp_path / "program.py", model, tmp_path / "state.pt", num_ranks=2)
    assert done.returncode == 0, done.stderr
    cpu = torch.device("cpu")
    one = load_model(str(model), dtype=torch.float32, device=cpu, attention="taut_reference")
    whole = {name: parameter.detach() for name, parameter in one.named_parameters()}
    assert largest_difference(torch.load(tmp_path / "state.pt"), whole) == 0


def test_a_teacher_teaches_two_ranks_as_one(place: Path) -> None:
    one, two = place / "one" / "taught", place / "two" / "taught"
    for name in ("loss", "grad_norm", "divergence"):
        assert column(two, name) == pytest.approx(column(one, name), rel=LIMIT)
    assert largest_difference(weights(two / "model"), weights(one / "model")) < LIMIT
    assert "sharded over 2 ranks" in decisions(two)["distill.teacher"][1]


def test_pictures_that_one_rank_sees_are_seen_by_both(place: Path) -> None:
    one, two = place / "one" / "illustrated", place / "two" / "illustrated"
    for name in ("loss", "grad_norm", "learning_rate/vision_tower"):
        assert column(two, name) == pytest.approx(column(one, name), rel=LIMIT)
    assert column(one, "learning_rate/vision_tower")[0] == 1e-4
    (idle,) = [it for it in events(one, "start")[0]["decisions"] if it[0] == "frozen"]
    assert idle[1] == "2 tensors"
    assert "post_layernorm" in idle[2]
    before, after = weights(place / "vlm"), weights(one / "model")
    assert largest_difference(weights(two / "model"), after) < 1e-6  # they are saved in float32
    unmoved = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in unmoved if not name.endswith("k_proj.bias")} == {  # softmax minds none
        name for name in after if "post_layernorm" in name
    }
    for path in (two / "checkpoints" / "step-000004").iterdir():
        path.unlink()
    shutil.rmtree(two / "model")  # as if it had been killed before its end
    keys = json.loads((place / "todo.json").read_text())[-1]
    del keys["method"]
    taut.sft(**keys, resume=True)
    assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=LIMIT)
    assert largest_difference(weights(two / "model"), after) < 1e-6
