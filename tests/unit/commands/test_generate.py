"""What is written is kept, what is missing is finished, and nothing is mixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tests.helpers.chat_runs import save_model, write_rows
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.scripted_engines import FakeEngine

from taut.cli import main
from taut.commands import generate as command
from taut.commands.generate import generate
from taut.commands.settings import Generate
from taut.config import from_mapping
from taut.errors import DataError, OutputError
from taut.inference.engine import OnDone
from taut.inference.factory import OpenEngine, Rendering
from taut.inference.settings import Sampling
from taut.types import Completion, FinishReason, Prompt

ROWS = [{"id": name, "prompt": f"the {name}", "answer": name} for name in ("cat", "dog", "bird")]


class Dies(FakeEngine):
    """Is interrupted after a number of completions."""

    left = 3

    def generate(
        self, prompts: list[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        def count(completion: Completion) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            assert on_done is not None
            on_done(completion)

        return super().generate(prompts, sampling, count)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


Open = Callable[[FakeEngine], FakeEngine]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Puts an engine in the place of the model's."""

    def use(engine: FakeEngine) -> FakeEngine:
        def opened(_: Generate, rendering: Rendering) -> OpenEngine:
            return OpenEngine(engine, rendering.renderer, rendering.stops, 64, [])

        monkeypatch.setattr(command, "open_engine", opened)
        return engine

    return use


def say(name: str, index: int) -> str:
    return f"{name} says {index}"


def config(model: Path, tmp_path: Path, **keys: Any) -> Generate:
    prompts = tmp_path / "p.jsonl"
    if not prompts.exists():
        write_rows(prompts, ROWS)
    given = {"model": model, "prompts": prompts, "out": tmp_path / "o.jsonl", "sampling.n": 2}
    return from_mapping(Generate, {**given, **keys})


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]


def test_a_line_for_each_completion(model: Path, tmp_path: Path, engine: Open) -> None:
    engine(FakeEngine(say))
    result = generate(config(model, tmp_path, prompt_ids=True))
    found = lines(tmp_path)
    assert [(line["id"], line["index"]) for line in found] == [
        (row["id"], index) for row in ROWS for index in range(2)
    ]
    first = dict(found[0])
    assert len(first.pop("prompt_ids")) > 0
    assert first == {
        "id": "cat",
        "index": 0,
        "ids": [1, 2, 3, 4],
        "logp": [0.0] * 4,
        "logp_one": [0.0] * 4,
        "finish_reason": "stop",
        "text": "cat says 0",
        "references": ["cat"],
    }
    assert (result.num_prompts, result.num_completions, result.num_kept) == (3, 6, 0)
    assert (dict(result.finished), result.num_tokens) == ({"stop": 6}, 24)


def test_an_interrupted_run_is_finished_and_nothing_is_done_twice(
    model: Path, tmp_path: Path, engine: Open
) -> None:
    engine(Dies(say))
    told = "3 completions are written; the same command with resume=true finishes the rest"
    with pytest.raises(KeyboardInterrupt, match=told):
        generate(config(model, tmp_path))
    assert len(lines(tmp_path)) == 3
    with (tmp_path / "o.jsonl").open("a") as file:
        file.write('{"id": "dog", "ind')
    second = engine(FakeEngine(say))
    result = generate(config(model, tmp_path, resume=True))
    assert [prompt.id for prompt in second.asked] == ["dog", "bird"]
    assert sorted((line["id"], line["index"]) for line in lines(tmp_path)) == sorted(
        (row["id"], index) for row in ROWS for index in range(2)
    )
    assert (result.num_completions, result.num_kept) == (6, 3)
    third = engine(FakeEngine(say))
    assert generate(config(model, tmp_path, resume=True)).num_kept == 6
    assert third.asked == []


def test_errors_are_told_and_tried_again(
    model: Path, tmp_path: Path, engine: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    def finish(text: str) -> FinishReason:
        return "error" if text.startswith("dog") else "length"

    engine(FakeEngine(say, finish))
    assert command.run(config(model, tmp_path)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "6 completions of 3 prompts; 0.0% stopped, 4 cut, 2 errors" in out
    assert "error: dog: the server went away" in out
    assert "resume=true" in out
    engine(FakeEngine(say))
    assert command.run(config(model, tmp_path, resume=True)) == 0
    assert (
        "2 completions of 3 prompts; 4 were there already; 100.0% stopped"
        in capsys.readouterr().out
    )
    assert (
        sorted(line["finish_reason"] for line in lines(tmp_path)) == ["length"] * 4 + ["stop"] * 2
    )


def test_resume_begins_where_there_is_nothing(model: Path, tmp_path: Path, engine: Open) -> None:
    engine(FakeEngine(say))
    assert generate(config(model, tmp_path, resume=True)).num_completions == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampling.temperature": 0.5}, r"other settings \(sampling\)"),
        ({"limit": 2}, r"other settings \(prompts\)"),
        ({"dtype": "float64"}, r"other settings \(dtype\)"),
        ({"resume": False}, "exists; expected a new file; set resume=true"),
    ],
)
def test_what_was_drawn_otherwise_is_not_added_to(
    keys: dict[str, Any], message: str, model: Path, tmp_path: Path, engine: Open
) -> None:
    engine(FakeEngine(say))
    generate(config(model, tmp_path))
    before = (tmp_path / "o.jsonl").read_bytes()
    with pytest.raises(OutputError, match=message):
        generate(config(model, tmp_path, **{"resume": True, **keys}))
    assert (tmp_path / "o.jsonl").read_bytes() == before


def test_a_file_that_is_not_tauts_is_left_alone(model: Path, tmp_path: Path, engine: Open) -> None:
    out = tmp_path / "o.jsonl"
    out.write_text("mine\n")
    with pytest.raises(OutputError, match=r"o\.jsonl\.meta\.json next to .* cannot be read"):
        generate(config(model, tmp_path, resume=True))
    assert out.read_text() == "mine\n"
    out.unlink()
    engine(FakeEngine(say))
    generate(config(model, tmp_path))
    out.write_text("mine\n")
    with pytest.raises(OutputError, match=r"o\.jsonl:1 is no line of taut's"):
        generate(config(model, tmp_path, resume=True))
    with pytest.raises(OutputError, match="is the file of prompts"):
        generate(config(model, tmp_path, out=tmp_path / "p.jsonl"))
    with pytest.raises(OutputError, match="is a directory"):
        generate(config(model, tmp_path, out=tmp_path))


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, engine: Open
) -> None:
    engine(FakeEngine(say))
    write_rows(tmp_path / "p.jsonl", [*ROWS, {"id": "long", "prompt": "cat " * 100}])
    with pytest.raises(DataError, match=r"long: the prompt has .* and the model's context is 64"):
        generate(config(model, tmp_path))
    assert not (tmp_path / "o.jsonl").exists()


def test_a_missing_reference_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "p.jsonl", ROWS)
    words = [str(model), f"prompts={tmp_path / 'p.jsonl'}", f"out={tmp_path / 'o.jsonl'}"]
    assert main(["generate", *words, "reference=anser"]) == 2
    err = capsys.readouterr().err
    assert "p.jsonl:1: the row has no column 'anser'" in err
    assert "did you mean 'answer'?" in err
    assert err.count("\n") == 1


REWARDED = {"rewards": "contains", "reference": "answer"}


def test_completions_are_judged_and_judged_again(model: Path, tmp_path: Path, engine: Open) -> None:
    engine(FakeEngine(lambda name, index: name if index else "none"))
    result = generate(config(model, tmp_path, **REWARDED))
    rewards = {(line["id"], line["index"]): line["reward"] for line in lines(tmp_path)}
    assert rewards == {(row["id"], index): float(index) for row in ROWS for index in range(2)}
    assert lines(tmp_path)[0]["scores"] == {"contains": 0.0}
    assert result.judged is not None
    assert (result.judged.num_scored, result.judged.mean) == (6, 0.5)
    again = engine(FakeEngine(say))
    keys = {"resume": True, "rewards": ["contains", {"name": "stop", "weight": 2}]}
    generate(config(model, tmp_path, **(REWARDED | keys)))
    assert again.asked == []
    assert sorted(line["reward"] for line in lines(tmp_path)) == [2.0] * 3 + [3.0] * 3


@pytest.mark.parametrize(("keep", "indices"), [("all", [0, 1] * 3), ("best", [1] * 3)])
def test_a_folder_has_the_completions_as_rows_of_sft(
    model: Path, tmp_path: Path, engine: Open, keep: str, indices: list[int]
) -> None:
    engine(FakeEngine(lambda name, index: name if index else "none"))
    out = f"{tmp_path / 'set'}/"
    result = generate(config(model, tmp_path, **REWARDED, out=out, keep=keep, license="mit"))
    table = datasets.load_dataset(out, split="train", cache_dir=str(tmp_path / "cache"))
    assert table["index"] == indices
    assert table[-1]["prompt"] == "the bird"
    assert (table[-1]["completion"], table[-1]["reward"]) == ("bird", 1.0)
    assert result.num_rows == len(indices)
    assert (tmp_path / "set" / "README.md").read_text().startswith("---\nlicense: mit\n")
    with pytest.raises(OutputError, match="set/ exists; expected a new directory"):
        generate(config(model, tmp_path, **REWARDED, out=out, resume=True))


def test_a_folder_is_made_once_all_completions_are_there(
    model: Path, tmp_path: Path, engine: Open
) -> None:
    engine(Dies(say))
    keys = {**REWARDED, "out": f"{tmp_path / 'set'}/"}
    with pytest.raises(KeyboardInterrupt):
        generate(config(model, tmp_path, **keys))
    assert not (tmp_path / "set").exists()
    second = engine(FakeEngine(say))
    assert generate(config(model, tmp_path, **keys, resume=True)).num_rows == 6
    assert [prompt.id for prompt in second.asked] == ["dog", "bird"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"keep": "best", "out": "d/"}, ErrorCode("keep/rewards")),
        (
            {"keep": "best", "rewards": "contains"},
            ErrorCode("keep/out"),
        ),
        ({"license": "mit"}, ErrorCode("license/out")),
    ],
)
def test_keys_of_a_folder_are_refused_without_one(
    model: Path, tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    with refused(says):
        config(model, tmp_path, **keys)
