"""Run directories written by hand, for tests of what reads them: events, tokens and rollouts, whole or still growing.
No model is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut.io import tables
from taut.io.tables import TableWriter
from taut.rl.records import SCHEMA
from taut.train.log.events import to_json
from taut.train.recorder import token_schema

VOCABULARY = [
    b"<|user|>",
    b"<|bot|>",
    b"<|end|>",
    b" the",
    b" cat",
    b" \xc3",
    b"\xa9",
    b"\n",
    b"<b>",
]
"""A character lies in two tokens; one token looks like markup."""
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\x00\x1b[31m\u202e&\ud800"
"""Text that must stay text. (JSON can hold half a surrogate pair; a table cannot.)"""


def start(**fields: Any) -> dict[str, Any]:
    known = {
        "version": "0.1.0",
        "model": "tiny",
        "num_steps": 9,
        "num_samples": 5,
        "data": "5 rows",
    }
    return {"kind": "start", "time": 100.0, **known, "dropped": [], "cut": [], **fields}


def step(number: int, **fields: Any) -> dict[str, Any]:
    ids = [f"a.jsonl:{(number + i) % 5 + 1}" for i in range(2)]
    known = {"loss": 3.0 / number, "grad_norm": 1.0, "learning_rate": 1e-3, "num_targets": 4}
    more = {"num_tokens": 10, "num_tokens_unshared": 12, "seconds": 0.5}
    given = {"sample_ids": ids, "sample_nll": [2.0, 0.5], **known, **more, **fields}
    return {"kind": "step", "time": 100.0 + number, "step": number, **given}


def warning(number: int, name: str = "grad_norm_spike", **fields: Any) -> dict[str, Any]:
    return {
        "kind": "warning",
        "time": 100.5 + number,
        "name": name,
        "step": number,
        "detail": "d",
        **fields,
    }


def resume(from_step: int, *, is_measured: bool = True) -> dict[str, Any]:
    return {"kind": "resume", "time": 200.0, "from_step": from_step, "is_measured": is_measured}


def lines(events: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(to_json(event)) + "\n" for event in events)


def write_run(
    out: Path,
    events: Sequence[Mapping[str, Any]],
    *,
    method: str = "sft",
    config: Mapping[str, Any] | None = None,
    **resolved: Any,
) -> Path:
    """A run with these events."""
    out.mkdir(parents=True)
    settings = {"method": method, "model": "tiny", "out": str(out), "seed": 0, **(config or {})}
    content = {"taut": "0.1.0", "method": method, "config": settings, "num_steps": 9, "data": "d1"}
    decisions = [{"name": "dtype", "value": "float32", "reason": "the device is cpu"}]
    whole = {**content, "decisions": decisions, "identity": {"config": {}}, **resolved}
    (out / "resolved.json").write_text(json.dumps(whole))
    (out / "events.jsonl").write_text(lines(events))
    return out


def token_row(number: int, sample_id: str, why: str = "worst", **fields: Any) -> dict[str, Any]:
    """A sample of nine tokens, four of which are targets."""
    row = dict.fromkeys(token_schema().names)
    places = {"ids_T": [0, 3, 4, 2, 1, 5, 6, 8, 2], "target_at_N": [5, 6, 7, 8]}
    numbers = {"logp_N": [-0.5, float("nan"), -2.0, -0.1], "weight_N": [1.0] * 4}
    others = {"streams": [("advantage_N", [1.0, -1.0, 0.0, 2.0])], "values": [("label", 1.0)]}
    named = {"step": number, "sample_id": sample_id, "why": why, "num_shared": 4}
    lists = {"shared_with": ["b.jsonl:1"], "pictures": [], "read_at_R": [], "scalar_R": None}
    return {**row, **places, **numbers, **others, **named, **lists, **fields}


def token_writer(out: Path, rank: int = 0) -> TableWriter:
    """The writer of a rank's tokens; the vocabulary is there."""
    (out / "tokens").mkdir(exist_ok=True)
    tables.write_column(out / "tokens/vocabulary.parquet", "bytes", VOCABULARY)
    return TableWriter(out / f"tokens/rank-{rank:05}", token_schema())


def rollout_row(
    number: int, group: int, index: int, reward: float | None, **fields: Any
) -> dict[str, Any]:
    """A trajectory of three sampled tokens after a prompt of five."""
    row = dict.fromkeys(SCHEMA.names)
    sampled = {"ids_T": [0, 3, 4, 2, 1, 5, 6, 2], "sampled_at_N": [5, 6, 7]}
    numbers = {
        "logp_N": [-1.0, -2.0, -3.0],
        "advantage_N": [0.5] * 3,
        "version_N": [number - 1] * 3,
    }
    texts = {
        "prompt": json.dumps([{"role": "user", "content": f"What is {group}?"}]),
        "messages": json.dumps([{"role": "assistant", "content": "é"}]),
        "text": "é",
        "references": [str(group)],
    }
    named = {
        "step": number,
        "sample_id": f"q{group}#{index} of rollout {number}",
        "group": group,
        "prompt_id": f"q{group}",
        "place": f"p.jsonl:{group + 1}",
        "index": index,
        "is_kept": True,
        "finish_reason": "stop",
        "reward": reward,
        "rewards": [{"name": "right", "value": reward, "error": None, "reason": None}],
    }
    counts = {"num_turns": 1, "num_calls": 0, "num_malformed_calls": 0}
    return {**row, **sampled, **numbers, **texts, **named, **counts, **fields}


def rollout_writer(out: Path, seal_bytes: int = tables.SEAL_BYTES) -> TableWriter:
    (out / "tokens").mkdir(exist_ok=True)
    tables.write_column(out / "tokens/vocabulary.parquet", "bytes", VOCABULARY)
    return TableWriter(out / "rollouts", SCHEMA, seal_bytes)


def leave_open(writer: TableWriter) -> None:
    """Leave a table as it is while a run goes on, and close its files."""
    streams = {path: path.read_bytes() for path in writer.directory.glob("*.arrows")}
    writer.close()
    for path, content in streams.items():
        path.with_suffix(".parquet").unlink()
        path.write_bytes(content)
