"""docs/plan.md: its numbers are what ``taut plan`` prints, and its first recipe is one that runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.helpers.chat_runs import chats, save_model, write_rows
from tests.helpers.configurations import save_configuration

from taut import cli
from taut.commands.plan import Way, plan
from taut.commands.settings import Plan
from taut.config import load

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
COMMON = re.search(r"each with\s+`([^`]+)`", PAGE)
ROWS = re.findall(r"^\| (\S+B) \| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)


def cells(way: Way) -> str:
    """A row's numbers, as the page has them."""
    size, seconds = way.footprint, way.seconds
    assert seconds is not None
    gib = [f"{n / 2**30:.1f}" for n in (size.loading, size.step, size.ending, size.saving)]
    return " | ".join(
        [*gib, f"{way.most_tokens:,}" if way.most_tokens else "-", f"{seconds.total:.2g}"]
    )


def row_of(name: str, keys: str, place: Path) -> str:
    assert COMMON is not None
    words = [f"model={save_configuration(name, place)}", "alternatives=false"]
    return cells(plan(load(Plan, None, [*words, *COMMON[1].split(), *keys.split()])).ways[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys", "numbers"), ROWS, ids=lambda text: text[:40])
def test_the_numbers_are_those_of_the_planner(
    name: str, keys: str, numbers: str, tmp_path: Path
) -> None:
    assert row_of(name, keys, tmp_path) == numbers


def test_all_four_sizes_are_there() -> None:
    assert {name for name, _, _ in ROWS} == {"0.5B", "8B", "32B", "70B"}


@pytest.mark.slow
def test_the_recipe_goes_from_data_to_a_verified_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page has it, but for the size of the model; the server is tests/e2e/test_verify_server.py's."""
    pytest.importorskip("bitsandbytes")
    block = PAGE.split("## An 8B model on one card")[1].split("\n## ")[0]
    commands = re.findall(r"^    (taut .*?)(?:  +#.*)?$", block, re.MULTILINE)
    local = [command for command in commands if "engine=server" not in command]
    assert [command.split()[1] for command in local] == [
        *("show", "plan", "check", "sft", "page", "generate", "verify")
    ]
    toml = "\n".join(re.findall(r"^    (.*)$", block.split("# run.toml")[1], re.MULTILINE))
    name = re.search(r'^model = "(.+)"$', toml, re.MULTILINE)
    assert name is not None
    save_model(tmp_path / "tiny", "llama")
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(toml.replace(name[1], "tiny"))
    write_rows(Path("chats.jsonl"), chats(40))
    write_rows(Path("asked.jsonl"), [{"prompt": row["messages"][:-1]} for row in chats(3)])
    for command in local:
        assert cli.main(shlex.split(command)[1:]) == 0, command
    assert Path("eight.html").stat().st_size > 10_000
    assert len(Path("answers.jsonl").read_text().splitlines()) == 3
    base = json.loads(Path("runs/eight/adapter/taut_base.json").read_text())
    assert "nf4" in json.dumps(base)
