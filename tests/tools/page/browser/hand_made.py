"""Answers of a run that never was: what a page must stand, put where views draw it."""

from __future__ import annotations

import math
from typing import Any

HOSTILE = (
    '</script><script>window.ran=1</script><img src=x onerror="window.ran=1"><svg onload=window.ran=1> '
    "\u202edesrever\u202c \x00 \x1b[31mred\x1b[0m \u2028 \u200b javascript:window.ran=1 {{7*7}} ${window.ran=1} "
    "&lt;b&gt;"
)
"""Markup that would run, direction marks, NUL, a terminal's colors, a line separator, a space of no width."""
RUN = "grpo"


def answers(text: str = "plain", num_tokens: int = 60, name: str = RUN) -> dict[str, Any]:
    """Answers of a run with every kind of thing in it. ``text`` is wherever a model, a dataset or a user writes."""
    curves = {
        "train/loss": [2.0 + 1 / (1 + step) for step in range(200)],
        "train/level": [1 + 7e-8 * math.sin(step) for step in range(200)],
        "train/constant": [0.25] * 200,
        "train/zero": [0.0] * 200,
        "train/broken": [_broken(step) for step in range(200)],
        "train/gaps": [None if step % 40 > 25 else float(step) for step in range(200)],
        "train/wide": [10.0 ** (step % 30 - 15) for step in range(200)],
        "train/huge": [1e308 if step % 2 else -1e308 for step in range(200)],
        "rollout/reward": [0.1 + step / 400 for step in range(200)],
        "eval/loss": [2.5 - step / 500 if step % 50 == 49 else None for step in range(200)],
        f"rollout/{text}": [0.5] * 200,
        "engine/nothing": [None] * 200,
        "engine/nan": ["nan"] * 200,
    }
    headline = [
        "train/loss",
        "train/level",
        "train/broken",
        "train/gaps",
        "train/zero",
        "eval/loss",
    ]
    run = {"name": name, "out": f"/runs/{name}", "method": "grpo", "state": "running", "step": 200}
    alarms = [{"step": 40, "name": "spike", "detail": text, "sample_ids": ["q1#0"], "time": 4.0}]
    overview = {
        **run,
        "reason": text,
        "num_steps": 400,
        "started": 1.0,
        "written": 9.0,
        "start": {"argv": ["taut", text], "git": {"commit": text}, "versions": {"torch": "2.13"}},
        "decisions": [{"name": "attention", "value": text, "reason": text}],
        "headline": headline,
        "curves": list(curves),
        "evals": [
            {"step": step, "name": key, "value": 0.5, "low": 0.4, "high": 0.6}
            for step in (50, 100)
            for key in ("loss", text)
        ],
        "best": {"step": 100},
        "alarms": alarms,
        "end": None,
    }
    series = {key: {"mean": row, "min": row, "max": row} for key, row in curves.items()}
    listed = {
        **run,
        "num_steps": 400,
        "loss": 2.0,
        "written": 9.0,
        "reason": text,
        "resumes_after": None,
    }
    return {
        "runs": {
            "version": "0",
            "is_live": False,
            "runs": [listed],
        },
        "file": {"text": "All of it.", "points": 200, "num_left": 3, "command": "taut page DIR"},
        f"run/{name}/overview": overview,
        f"run/{name}/curves": {"step": list(range(1, 201)), "series": series},
        f"run/{name}/checks": {"groups": _checks(text)},
        f"run/{name}/steps": {"steps": [1, 40], "rollouts": [1, 40], "last": 200},
        f"run/{name}/samples?step=40": _samples(text),
        f"run/{name}/sample?step=40&id=q1%230": _sample(text, num_tokens),
        f"run/{name}/rollouts?step=40": {
            "step": 40,
            "groups": [_listed(text, 0), _listed(text, 1)],
        },
        f"run/{name}/group?step=40&group=0": _group(text),
        f"run/{name}/prompt?id=q1": _prompt(text),
        f"run/{name}/data": {
            "summary": text,
            "sets": [_set(text)],
            "duplicates": None,
            "checks": [],
        },
        f"run/{name}/model": {
            "contract": {"template": text, "eos": [1, 2]},
            "stop": {"share": 0.9, "answers": 16},
            "stop_check": None,
            "goldens": [
                {"prompt": [{"role": "user", "content": text}], "text": text, "ids": [1, 2]}
            ],
        },
    }


def two_runs() -> dict[str, Any]:
    """Answers of two runs, and of their comparison."""
    one, other = answers(), answers(name="other")
    for key, row in other["run/other/curves"]["series"].items():
        if key == "train/loss":
            row["mean"] = row["min"] = row["max"] = [value + 0.3 for value in row["mean"]]
    runs = {**one["runs"], "runs": one["runs"]["runs"] + other["runs"]["runs"]}
    compared = {
        "runs": [RUN, "other"],
        "differences": [
            {"kind": "configuration", "key": "optim.learning_rate", "values": [1e-3, 3e-3]},
            {"kind": "data", "key": "data.train", "values": ["sha256:1", None]},
        ],
        "curves": one[f"run/{RUN}/overview"]["curves"],
        "evals": [
            {
                "name": "loss",
                "steps": [100, 100],
                "values": [0.5, 0.6],
                "lows": [0.4, 0.5],
                "highs": [0.6, 0.7],
                "difference": 0.1,
                "low": 0.05,
                "high": 0.15,
            }
        ],
        "prompts": [{"prompt_id": "q1", "steps": [1, 40], "rewards": [[0.1, 0.4], [0.1, 0.9]]}],
    }
    return {**other, **one, "runs": runs, f"compare?runs={RUN},other": compared}


def _broken(step: int) -> Any:
    return {60: "nan", 61: "inf", 62: "-inf"}.get(step, math.sin(step / 20))


def _checks(text: str) -> list[dict[str, Any]]:
    def check(name: str, **more: Any) -> dict[str, Any]:
        plain = {
            "remedy": "",
            "evidence": [],
            "notes": [],
            "value": None,
            "unit": "",
            "seconds": 0.01,
        }
        return {"name": name, "detail": text, **plain, **more}

    checks = {
        "passed": [check(f"passed.{n}") for n in range(30)],
        "failed": [check("loss.mask", remedy=text, evidence=[text, "row 3"])],
        "warning": [check("data.duplicates", value=0.25, remedy="Remove them.")],
        "skipped": [check("vision.sizes")],
    }
    return [
        {"outcome": outcome, "checks": [{**one, "outcome": outcome} for one in some]}
        for outcome, some in checks.items()
    ]


def _samples(text: str) -> dict[str, Any]:
    rows = [
        {"id": "q1#0", "nll": 2.5, "is_recorded": True, "why": "worst"},
        {"id": text, "nll": 1.5, "is_recorded": False, "why": None},
        {"id": "q2#0", "nll": "nan", "is_recorded": False, "why": None},
    ]
    return {"step": 40, "loss": 2.0, "grad_norm": 1.0, "num_targets": 100, "samples": rows}


def _sample(text: str, num_tokens: int) -> dict[str, Any]:
    words = ["<|im_start|>", "user", "\n", *text.split(" "), "\t", "", " word", " another"]
    pieces = [words[index % len(words)] for index in range(num_tokens)]
    target_at = list(range(num_tokens // 3, num_tokens))
    count = len(target_at)
    return {
        "step": 40,
        "id": "q1#0",
        "why": "worst",
        "pieces": pieces,
        "ids": list(range(num_tokens)),
        "target_at": target_at,
        "loss": ["nan", *_wave(count - 1, 4, 4)],
        "weight": [1.0] * count,
        "entropy": _wave(count, 1, 1),
        "streams": {
            "advantage_N": _wave(count, 1),
            "ratio_N": _wave(count, 0.4, 1),
            "clipped_N": [float(index % 9 == 0) for index in range(count)],
        },
        "read_at": [num_tokens - 1],
        "scalar": [0.75],
        "values": {"reward": 1.5},
        "num_shared": num_tokens // 6,
        "shared_with": ["q1#1", text],
        "pictures": [],
        "steps": [1],
    }


def _wave(count: int, size: float, middle: float = 0) -> list[float]:
    return [middle + size * math.sin(index / 3) for index in range(count)]


def _listed(text: str, group: int) -> dict[str, Any]:
    return {
        "group": group,
        "prompt_id": f"q{group + 1}",
        "prompt": f"{text} {group}",
        "rewards": [0.5, 1.0] if group == 0 else [1.0, 1.0],
        "mean": 0.75 if group == 0 else 1.0,
        "is_kept": group == 0,
        "why_nothing": None if group == 0 else "all rewards are equal",
        "num_tokens": [12, 40],
        "finish": ["stop", "length"],
    }


def _group(text: str) -> dict[str, Any]:
    return {
        "step": 40,
        "group": 0,
        "prompt_id": "q1",
        "place": "prompts.jsonl:1",
        "prompt": [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]},
        ],
        "references": [text],
        "why_nothing": None,
        "answers": [_answer(text, index) for index in range(4)],
    }


def _answer(text: str, index: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": text}}}
    pieces = [*text.split(" "), " so", "<|im_end|>", "\n", "tool", "\n", " it", " is", "<|im_end|>"]
    sampled_at = [at for at, piece in enumerate(pieces) if piece not in ("\n", "tool")]
    parts = [
        {"name": "exact", "value": 0.5, "error": None, "reason": None, "reply": None},
        {"name": "judge", "value": None, "error": "timed out", "reason": text, "reply": text},
    ]
    return {
        "sample_id": f"q1#{index}",
        "index": index,
        "recorded_at": 40 if index == 0 else None,
        "reward": 0.5 + index / 10,
        "parts": parts,
        "messages": [
            {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
            {"role": "tool", "name": "search", "tool_call_id": "c1", "content": text},
            {"role": "assistant", "reasoning_content": text, "content": f"{text}\nIt is so."},
        ],
        "pieces": pieces,
        "ids": list(range(len(pieces))),
        "sampled_at": sampled_at,
        "logp": [-value for value in _wave(len(sampled_at), 2, 2)],
        "advantage": [index - 1.5] * len(sampled_at),
        "version": [39] * len(sampled_at),
        "text": text,
        "finish_reason": "stop",
        "error": text if index == 3 else None,
        "num_turns": 2,
        "num_calls": 1,
        "num_malformed_calls": 0,
        "num_tokens": len(sampled_at),
    }


def _prompt(text: str) -> dict[str, Any]:
    def answer(index: int) -> dict[str, Any]:
        return {"index": index, "reward": 0.5, "text": text, "finish_reason": "stop"}

    steps = [
        {"step": s, "group": 0, "mean": 0.5, "answers": [answer(0), answer(1)]} for s in (1, 40)
    ]
    return {"prompt_id": "q1", "prompt": [{"role": "user", "content": text}], "steps": steps}


def _set(text: str) -> dict[str, Any]:
    return {
        "name": "train",
        "num_rows": 1200,
        "num_samples": 1190,
        "lengths": {
            "edges": [2**n for n in range(11)],
            "counts": [0, 1, 5, 20, 90, 300, 500, 200, 70, 4],
        },
        "dropped": [{"place": "train.jsonl:7", "reason": text}],
        "num_dropped": 5,
        "cut": [{"place": "train.jsonl:9", "reason": "300 tokens"}],
    }
