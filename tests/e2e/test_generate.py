"""From a model directory to lines of completions, by each engine, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import chats, save_model, sft, words_of, write_rows
from tests.helpers.fake_vllm import FakeServer, Fault
from tests.helpers.refusals import ErrorCode, says
from tests.helpers.tiny_tokenizers import tiny_tokenizer

import taut
from taut.cli import main
from taut.commands.generate import Generated
from taut.errors import ConfigError, EngineError, ModelError
from taut.inference.factory import open_engine
from taut.inference.settings import ModelUse, Sampling
from taut.types import Prompt

GREEDY = {"sampling.temperature": 0, "sampling.max_new_tokens": 12}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("prompts") / "p.jsonl", chats(5, seed=1))


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda line: (line["id"], line["index"]))


def generate(model: Path, prompts: Path, out: Path, **keys: Any) -> Generated:
    if keys.get("engine") != "server":
        keys["device"] = "cpu"
    return taut.generate(model=model, prompts=prompts, out=out, **keys)


def test_lines_are_the_same_whatever_runs_beside_them_and_when(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "all.jsonl"
    words = [str(model), f"prompts={prompts}", f"out={out}", "--device", "cpu", "dtype=float64"]
    words += ["sampling.n=3", "sampling.max_new_tokens=6", "--prompt-ids"]
    assert main(["generate", *words]) == 0
    said = capsys.readouterr().out
    assert "15 completions of 5 prompts" in " ".join(said.split())
    told = [line for line in said.splitlines() if line.startswith("generating: ")]
    assert 2 <= len(told) <= 10  # no terminal, so lines
    assert told[-1] == "generating: 15 of 15"
    found = lines(out)
    assert len(found) == 15
    for line in found:
        assert len(line["ids"]) == len(line["logp"]) == len(line["logp_one"]) > 0
        assert line["logp"] == line["logp_one"]
        assert line["references"]
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:4]) + whole[4][:30])
    assert main(["generate", *words, "--resume", "local.sequences=2"]) == 0
    assert out.read_text().startswith("".join(whole[:4]))
    again = lines(out)
    assert [line["ids"] for line in again] == [line["ids"] for line in found]
    logp = [np.concatenate([line["logp"] for line in some]) for some in (found, again)]
    assert np.abs(logp[0] - logp[1]).max() < 1e-6


def test_an_adapter_says_what_the_merged_model_says(
    model: Path, train: Path, prompts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sft(model, train, run, steps=3, lora__rank=4, optim__learning_rate=3e-2)
    keys: dict[str, Any] = {**GREEDY, "dtype": "float64"}
    generate(model, prompts, tmp_path / "base.jsonl", **keys)
    generate(model, prompts, tmp_path / "adapter.jsonl", adapter=run / "adapter", **keys)
    generate(run / "model", prompts, tmp_path / "merged.jsonl", **keys)
    base, adapter, merged = (
        lines(tmp_path / f"{name}.jsonl") for name in ("base", "adapter", "merged")
    )
    assert [line["ids"] for line in adapter] == [line["ids"] for line in merged]
    assert [line["ids"] for line in adapter] != [line["ids"] for line in base]
    for left, right in zip(adapter, merged, strict=True):
        assert np.allclose(left["logp_one"], right["logp_one"], atol=1e-5)


def test_weights_are_kept_in_the_dtype_computed_in(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    prompt = Prompt("a", np.arange(20, 30))
    said = {}
    for dtype in ("float32", "bfloat16"):
        with open_engine(ModelUse(model=str(model), dtype=dtype, device="cpu")) as opened:
            scorer: Any = opened.engine.scorer  # type: ignore[attr-defined]
            kept = {parameter.dtype for parameter in scorer.parameters()}
            assert kept == {getattr(torch, dtype)}
            assert not any(parameter.requires_grad for parameter in scorer.parameters())
            (said[dtype],) = opened.engine.generate([prompt], Sampling(max_new_tokens=1))
    wide, narrow = (said[dtype].logp_one_N for dtype in ("float32", "bfloat16"))
    assert wide is not None and narrow is not None
    assert abs(float(wide[0]) - float(narrow[0])) < 2


def test_what_cannot_be_exact_is_refused_or_bounded(tmp_path: Path) -> None:
    hybrid = save_model(tmp_path / "lfm2", "lfm2")
    with pytest.raises(ModelError, match=r"state across tokens \(layers\.0 .*set engine=server"):
        open_engine(ModelUse(model=str(hybrid), device="cpu"))
    long = save_model(tmp_path / "phi3", "phi3_longrope")
    with open_engine(ModelUse(model=str(long), device="cpu")) as opened:
        assert opened.context == 32
        assert ("context", "32") in [(name, value) for name, value, _ in opened.decisions]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"urls": "http://h/v1"}, ErrorCode("urls/engine")),
        ({"engine": "server"}, ErrorCode("engine/urls")),
        (
            {"engine": "server", "urls": "u", "adapter": "a"},
            ErrorCode("adapter/engine"),
        ),
        ({"server.timeout": 5.0}, ErrorCode("server/engine")),
        (
            {"engine": "server", "urls": "u", "local.sequences": 2},
            ErrorCode("local/engine"),
        ),
        (
            {"engine": "server", "urls": "u", "dtype": "float32"},
            ErrorCode("dtype/engine"),
        ),
        ({"template": "missing.jinja"}, "template: cannot read missing.jinja: No such file"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    keys: dict[str, Any], message: str, model: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(model, prompts, tmp_path / "o.jsonl", **keys)
    assert says(caught.value, message)


def test_an_adapter_directory_as_the_model_says_what_to_write(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"is an adapter; .*adapter=.*a \(lora.adapter to train it\)"
    ):
        generate(tmp_path / "a", prompts, tmp_path / "o.jsonl")
    with pytest.raises(ModelError, match="has no adapter_config"):
        generate(model, prompts, tmp_path / "o.jsonl", adapter=tmp_path)


def test_a_server_generates_and_one_that_dies_is_gone_on_with(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.jsonl"
    keys: dict[str, Any] = {"sampling.max_new_tokens": 4, "engine": "server"}
    keys |= {"server.retries": 0, "server.concurrency": 1}
    end = tiny_tokenizer().eos_token_id
    begun: list[int] = []

    def dies(body: dict[str, Any], count: int) -> Fault | None:
        if len(body["prompt"]) <= 10:
            return None  # what opening asks
        begun.append(count)
        return Fault(status=500) if len(begun) == 3 else None

    with FakeServer(ends=(end,), max_model_len=None, faults=dies) as server:
        told = "2 completions are written; the same command with resume=true finishes the rest"
        with pytest.raises(EngineError, match=told):
            generate(model, prompts, out, urls=server.url, **keys)
        assert len(lines(out)) == 2
        result = generate(model, prompts, out, urls=server.url, resume=True, **keys)
    assert (result.num_kept, result.num_completions) == (2, 5)
    assert {line["finish_reason"] for line in lines(out)} == {"stop"}
    assert ("server.name", "model") in [(name, value) for name, value, _ in result.decisions]


def test_a_server_that_is_not_there_is_one_line_and_leaves_nothing(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.jsonl"
    keys = {"prompts": prompts, "out": out, "engine": "server", "server.retries": 0}
    assert main(["generate", str(model), *words_of(keys), "--url", "http://127.0.0.1:9/v1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()
