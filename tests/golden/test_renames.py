"""Every table of renames.toml does what its comment says, on a picture of a few lines."""

from __future__ import annotations

from tests.golden.renames import Renames

TABLES = {
    "keys": {"reference": "ref", "optim.eps": "", "grpo.clip_low": "grpo.clip_ratio_low"},
    "options": {"prompts": "data"},
    "values": {"critic.kind=own": "separate", "stop=end": "eos", "end.outcome=done": "finished"},
    "events": {"best": "best_model"},
    "fields": {"step.size": "num_tokens", "seconds": "duration", "rollout.samples.ids": "tokens"},
    "resolved": {"identity": "fingerprint"},
    "decisions": {"stop": "stop_tokens"},
    "files": {"checkpoints/latest": "checkpoints/newest", "meta.json": ""},
    "checks": {"data.repeats": "data.duplicates"},
    "questions": {"data.repeats": "Are rows unique?"},
    "api": {"Run": "RunConfig"},
    "texts": {"rollout": "rollout"},
}
RUN = {
    "resolved": {
        "method": "grpo",
        "config.reference.model": "a",
        "config.optim.eps": 1.0,
        "identity.config.critic.kind": "own",
        "identity.dtype": "float64",
        "decisions": [["stop", "end", "<text>"]],
    },
    "events": [
        {"kind": "check", "name": "data.repeats", "seconds": "<varies>"},
        {"kind": "rollout", "samples": [{"id": "q1 of rollout 1", "ids": [1]}], "size": 1},
        {"kind": "step", "size": 2},
        {"kind": "best", "name": "data.repeats"},
        {"kind": "end", "outcome": "done"},
    ],
    "files": ["checkpoints/latest", "checkpoints/step-1/meta.json", "model/meta.jsonl"],
}
SURFACE = {
    "commands": {
        "grpo": {"usage": "taut grpo", "options": {"method": ["a", "b"], "prompts": ["t", "d"]}},
        "generate": {"usage": "taut generate prompts=FILE", "options": {"prompts": ["t", "d"]}},
    },
    "keys": {"critic.kind": ["own | shared", "own"], "grpo.clip_low": ["number", "0.2"]},
    "checks": {"data.repeats": ["Is no row there twice?", "quick"]},
    "api": {"Run": "class", "sft": "(run: Run | str, RunState) -> Result"},
}


def test_a_run_under_its_new_names() -> None:
    renames = Renames(TABLES, {})
    assert renames.run(RUN) == {
        "resolved": {
            "method": "grpo",
            "config.ref.model": "a",
            "fingerprint.config.critic.kind": "separate",
            "fingerprint.dtype": "float64",
            "decisions": [["stop_tokens", "eos", "<text>"]],
        },
        "events": [
            {"kind": "check", "name": "data.duplicates", "duration": "<varies>"},
            {"kind": "rollout", "samples": [{"id": "q1 of rollout 1", "tokens": [1]}], "size": 1},
            {"kind": "step", "num_tokens": 2},
            {"kind": "best_model", "name": "data.repeats"},
            {"kind": "end", "outcome": "finished"},
        ],
        "files": ["checkpoints/newest", "model/meta.jsonl"],
    }
    assert renames.fields_now({"seconds", "ids"}) == {"seconds", "duration", "ids", "tokens"}


def test_the_surface_under_its_new_names() -> None:
    assert Renames(TABLES, {}).surface(SURFACE) == {
        "commands": {
            "grpo": {
                "usage": "taut grpo",
                "options": {"method": ["a", "b"], "prompts": ["t", "d"]},
            },
            "generate": {"usage": "taut generate data=FILE", "options": {"data": ["t", "d"]}},
        },
        "keys": {
            "critic.kind": ["separate | shared", "separate"],
            "grpo.clip_ratio_low": ["number", "0.2"],
        },
        "checks": {"data.duplicates": ["Are rows unique?", "quick"]},
        "api": {"RunConfig": "class", "sft": "(run: RunConfig | str, RunState) -> Result"},
    }


def test_which_lines_are_used() -> None:
    renames = Renames(TABLES | {"texts": {"rollout": "rollout", "nowhere": "here"}}, {})
    renames.run(RUN)
    renames.surface(SURFACE)
    assert renames.entries() - renames.used == {("texts", "nowhere")}


def test_what_a_run_is_given_under_its_new_names() -> None:
    given = {"reference.update_every": 1, "critic.kind": "own", "steps": 2}
    assert Renames(TABLES, {}).run_keys(given) == {
        "ref.update_every": 1,
        "critic.kind": "separate",
        "steps": 2,
    }
