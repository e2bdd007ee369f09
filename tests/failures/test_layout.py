"""That there is no rectangle: no pad, no mask, no label that means "not this one", in no forward of a run and in no
file that trains, scores or generates.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import chats, events, save_model, sft, write_rows
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

SOURCE = Path(__file__).parents[2] / "src" / "taut"
FLAT = (
    "attention",
    "data",
    "evals",
    "inference",
    "losses",
    "methods",
    "models",
    "rl",
    "run",
    "train",
    "types.py",
)
"""What trains, scores and generates."""
PADDING = ("pad_sequence", "pad_token", "pad_token_id", "padding_side")
SAVING = ("models/save.py", "models/gguf.py", "models/heads.py", "evals/contract.py")
"""Here a pad token is named: in files written for others, and where the library's own class is asked what it makes of
hidden states."""


def rectangular(tree: ast.AST) -> Iterator[str]:
    """Words of a padded batch: the label -100, masks handed on, padding calls, the pad token's id."""
    for node in ast.walk(tree):
        if isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-100":
            yield "-100"
        if isinstance(node, ast.keyword) and node.arg in (
            "attention_mask",
            "ignore_index",
            "padding",
        ):
            yield node.arg
        if isinstance(node, ast.Attribute) and node.attr in PADDING:
            yield node.attr


def files() -> Iterator[Path]:
    for name in FLAT:
        path = SOURCE / name
        assert path.exists(), path
        yield from [path] if path.is_file() else path.rglob("*.py")


def test_no_file_that_trains_scores_or_generates_speaks_of_padding() -> None:
    found = {
        str(path.relative_to(SOURCE)): set(rectangular(ast.parse(path.read_text())))
        for path in files()
    }
    assert len(found) > 50
    assert {name: words for name, words in found.items() if words and name not in SAVING} == {}


def test_every_forward_of_a_run_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs, training, evaluation, generation, and the model read back: no mask, no cache, one row."""
    seen: list[tuple[tuple[int, ...], Any, Any, Any]] = []
    forward = Qwen2Model.forward

    def watched(self: Any, *args: Any, **keywords: Any) -> Any:
        asked = [keywords.get(name) for name in ("attention_mask", "past_key_values", "use_cache")]
        seen.append((tuple(keywords["input_ids"].shape), *asked))
        return forward(self, *args, **keywords)

    monkeypatch.setattr(Qwen2Model, "forward", watched)
    rows = write_rows(tmp_path / "eval.jsonl", chats(5, seed=1))
    keys = {
        "steps": 2,
        "data__eval": str(rows),
        "eval__every": 1,
        "stop_check__prompts": 3,
        "lora__rank": 4,
    }
    sft(
        save_model(tmp_path / "model"),
        write_rows(tmp_path / "train.jsonl", chats(12)),
        tmp_path / "out",
        **keys,
        stop_check__max_new_tokens=6,
    )
    assert len(seen) > 20
    assert len(events(tmp_path / "out", "eval")) >= 2
    assert {shape[0] for shape, *_ in seen} == {1}
    assert {tuple(asked) for _, *asked in seen} == {(None, None, False)}
