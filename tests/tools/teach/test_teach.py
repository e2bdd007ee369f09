"""What ``taut teach`` writes is what the teacher says of each sample alone; it is whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import QUIET, chats, save_model, write_rows
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM

from taut.config import from_mapping
from taut.data.store.top_logprobs import DECIMALS
from taut.errors import ConfigError, ModelError, OutputError
from taut.models.precision import compute_context
from taut_tools.teach import teach as command
from taut_tools.teach.settings import Teach
from taut_tools.teach.teach import Taught, run, teach

K = 5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher") / "gemma2", "gemma2")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", chats(6))


def config(model: Path, data: Path, out: Path, **keys: Any) -> Teach:
    given = {
        "model": str(model),
        "data.train": str(data),
        "data.cache": str(data.parent / "cache"),
        "out": str(out),
        "top": K,
        **{name: QUIET[name] for name in ("device", "dtype", "data.max_length")},
    }
    return from_mapping(Teach, given | keys)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def require_said(row: dict[str, Any], model: Any) -> None:
    """The library's own eager path on the sample alone."""
    with torch.no_grad(), compute_context(torch.float64, torch.device("cpu")):
        logits = model(input_ids=torch.tensor([row["ids"]]), use_cache=False).logits[0]
    at = torch.tensor(row["targets"]) - 1
    every = logits.log_softmax(-1)[at]
    listed = every.gather(1, torch.tensor(row["top_ids"]))
    said = torch.tensor(row["top_logprobs"], dtype=torch.float64)
    torch.testing.assert_close(said, listed, rtol=0, atol=0.51 * 10**-DECIMALS)
    best = every[:, : len(tiny_tokenizer())].topk(K, dim=1).values  # rows beyond are no tokens
    torch.testing.assert_close(listed, best, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["gemma2", "bamba"], ids=["packs", "one sample at a time"])
def test_it_writes_what_the_teacher_says(
    name: str, teacher: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = teacher if name == "gemma2" else save_model(tmp_path / name, name)
    out = tmp_path / "top.jsonl"
    assert run(config(place, data, out, tokens_per_microbatch=90)) == 0
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float64, attn_implementation="eager"
    ).double()
    rows = rows_of(out)
    assert [row["id"] for row in rows] == [f"{data}:{line}" for line in range(1, 7)]
    for row in rows:
        require_said(row, model)
    told = capsys.readouterr().out
    mass = np.mean([np.exp(it).sum() for row in rows for it in row["top_logprobs"]])
    assert f"they have {mass:.2%} of the teacher's probability" in told
    assert ("packing: one sample at a time" in told) == (name == "bamba")


def test_how_it_is_laid_out_changes_nothing(teacher: Path, data: Path, tmp_path: Path) -> None:
    found = []
    for tokens in (1, 90, 8192):
        out = tmp_path / f"{tokens}.jsonl"
        teach(config(teacher, data, out, tokens_per_microbatch=tokens))
        found.append(rows_of(out))
    assert found[0] == found[1] == found[2]


def test_the_student_makes_the_samples(teacher: Path, data: Path, tmp_path: Path) -> None:
    student = save_model(tmp_path / "student", "qwen2")
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    (student / "chat_template.jinja").write_text(template)
    found = []
    for keys in ({}, {"student": str(student)}):
        out = tmp_path / f"{len(found)}.jsonl"
        done: Taught = teach(config(teacher, data, out, **keys))
        assert done.num_samples == 6
        found.append([row["ids"] for row in rows_of(out)])
    assert found[0] != found[1]


def test_what_stops_it_leaves_nothing(
    teacher: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = command.likeliest, []

    def full(*args: Any) -> Any:
        seen.append(1)
        if len(seen) > 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(command, "likeliest", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(OutputError, match="cannot be written: No space left"):
        teach(config(teacher, data, tmp_path / "top.jsonl", tokens_per_microbatch=90))
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"cache"}


def test_what_cannot_be_is_refused_before_it_begins(
    teacher: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "top.jsonl"
    with pytest.raises(ConfigError, match="expected at most the tokenizer's"):
        teach(config(teacher, data, out, top=10_000))
    both = config(teacher, data, out)
    with pytest.raises(ConfigError, match=r"^data\.eval is set, and a file is made of data\.train"):
        teach(replace(both, data=replace(both.data, eval=str(data))))
    with pytest.raises(OutputError, match="there is no directory"):
        teach(config(teacher, data, tmp_path / "none" / "top.jsonl"))
    small = save_model(tmp_path / "small", "llama", max_position_embeddings=16)
    with pytest.raises(ModelError, match="longest sample has"):
        teach(config(small, data, out))
    out.write_text("")
    with pytest.raises(OutputError, match="exists; expected a new file"):
        teach(config(teacher, data, out))
