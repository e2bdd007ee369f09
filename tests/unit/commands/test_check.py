"""``taut check``: words in; a table of 100 columns or one JSON object, as docs/check.md has it, and an exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import CHECK_PAGE
from tests.helpers.chat_runs import QUIET, chats, save_model, words_of, write_rows
from tests.helpers.forked_processes import run

import taut
from taut.checks import CHECKS, Check
from taut.checks.registry import Finding, failed, passed, skipped, warned
from taut.checks.session import Session
from taut.cli import main
from taut.errors import ConfigError

WIDTH = 100
LONG = "word " * 60
UNBROKEN = "x" * 250


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", chats(10))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four checks, one of each outcome, with all that an answer may have, and much of it."""

    def fails(session: Session) -> Finding:
        """Is everything short?"""
        return failed(
            LONG,
            measured=(123456.5, LONG),
            evidence=[LONG, UNBROKEN, "a [bold]bracket[/bold]"],
            remedy=f"cut {LONG}",
        )

    def passes(session: Session) -> Finding:
        """Is there room for notes?"""
        return passed(LONG, 3, "tokens", [LONG, UNBROKEN])

    def warns(session: Session) -> Finding:
        """Is nothing said twice?"""
        return warned("said twice", remedy="say it once", evidence=["train.jsonl:3"], notes=["so"])

    def skips(session: Session) -> Finding:
        """Is it asked?"""
        return skipped(LONG)

    checks = {
        "group.with_a_name_that_is_long": Check(fails),
        "group.passes": Check(passes),
        "group.warns": Check(warns),
        "group.full": Check(skips, "full"),
    }
    monkeypatch.setattr("taut.checks.examine.CHECKS", checks)


def words(model: Path, data: Path) -> list[str]:
    return [*words_of(QUIET), f"--model={model}", f"--data={data}"]


def documented(heading: str) -> set[str]:
    """The fields that the page's table below ``heading`` has."""
    text = CHECK_PAGE.read_text(encoding="utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


# -- JSON


def held_to_the_page(read: dict[str, Any]) -> None:
    """One object, with the documented fields and no others, each of its kind."""
    assert set(read) == documented("| field | what |\n|---|---|\n| `schema`")
    assert read["schema"] == "taut.check/2"
    assert read["part"] in ("quick", "full")
    for check in read["checks"]:
        assert set(check) == documented("| field of a check | what |")
        assert check["outcome"] in ("passed", "warning", "failed", "skipped")
        assert re.fullmatch(r"[a-z]+\.[a-z_0-9]+", check["name"])
        assert check["question"].endswith("?")
        assert all(isinstance(check[key], str) for key in ("says", "unit", "remedy"))
        assert all(isinstance(line, str) for key in ("evidence", "notes") for line in check[key])
        number = check["number"]
        assert number in (None, "inf", "-inf", "nan") or isinstance(number, int | float)
        assert bool(check["remedy"]) == (check["outcome"] in ("failed", "warning"))
        assert check["seconds"] >= 0
    is_failed = any(check["outcome"] == "failed" for check in read["checks"])
    assert read["outcome"] == ("failed" if is_failed else "passed")


@pytest.mark.parametrize("part", ["quick", "full"])
def test_the_json_is_what_the_page_says(
    model: Path, data: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--full"] if part == "full" else []
    assert main(["check", *words(model, data), *asked, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    read = json.loads(said.out)
    held_to_the_page(read)
    assert (read["model"], read["part"], read["taut"]) == (str(model), part, taut.__version__)
    wanted = [name for name, check in CHECKS.items() if part == "full" or check.part == "quick"]
    assert [check["name"] for check in read["checks"]] == wanted
    assert [check["question"] for check in read["checks"]] == [CHECKS[n].question for n in wanted]


def test_the_json_of_a_failure(model: Path, tmp_path: Path, capsys: Any) -> None:
    rows = write_rows(tmp_path / "bad.jsonl", [*chats(3), {"messages": "hello"}])
    assert main(["check", *words(model, rows), "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    held_to_the_page(read)
    (bad,) = [check for check in read["checks"] if check["outcome"] == "failed"]
    assert bad["name"].startswith("data.")
    assert "bad.jsonl:4" in " ".join([bad["says"], *bad["evidence"]])


# -- the table


@pytest.mark.usefixtures("few")
def test_the_table_fits_and_has_everything(model: Path, data: Path, capsys: Any) -> None:
    assert main(["check", *words(model, data), "--full", "--all"]) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= WIDTH
    assert "\x1b" not in said
    assert "\n1 failed, 1 warning, 1 passed, 1 not asked for this run (1: word " in said
    right = "".join(line[51:].strip() for line in said.splitlines())
    for text in (
        LONG,
        UNBROKEN,
        "a [bold]bracket[/bold]",
        f"-> cut {LONG}",
        "Is everything short?",
        "said twice",
        "train.jsonl:3",
        "-> say it once",
    ):
        assert text.replace(" ", "") in right.replace(" ", "")
    assert "Is there room for notes?" not in said  # a question is shown where the answer is no
    names = "".join(line[9:30].strip() for line in said.splitlines())
    assert "group.with_a_name_that_is_long" in names


@pytest.mark.usefixtures("few")
def test_without_all_only_findings_are_shown(model: Path, data: Path, capsys: Any) -> None:
    assert main(["check", *words(model, data), "--full"]) == 1
    lines = capsys.readouterr().out.splitlines()
    outcomes = [line.split()[0] for line in lines[2:] if line and not line.startswith(" ")]
    assert outcomes[:2] == ["failed", "warning"]
    assert not any(word in line for line in lines for word in ("group.passes", "group.full"))
    last = " ".join(lines[lines.index("", 2) + 1 :])
    assert last.startswith("1 failed, 1 warning, 1 passed, 1 not asked for this run (1: word ")
    assert last.endswith(" s; --all shows every check")


def test_a_sound_run_is_one_line_and_names_no_check(model: Path, data: Path, capsys: Any) -> None:
    assert main(["check", *words(model, data)]) == 0
    head, empty, blank, ends, end, *counted = capsys.readouterr().out.splitlines()
    assert head == f"{model}, quick part" and not empty and not blank and not end
    assert ends == "an answer ends at <|im_end|>"
    found = re.fullmatch(
        r"\d+ passed, (\d+) not asked for this run \((.*)\) in [\d.]+ s; --all shows every check",
        " ".join(counted),
    )
    assert found is not None
    reasons = dict(part.split(": ")[::-1] for part in found[2].split(", "))
    assert sum(map(int, reasons.values())) == int(found[1]) and len(reasons) == 4
    assert reasons["the model takes no pictures"] == "4" and "other reasons" in reasons


def test_what_a_failure_hides_is_counted(model: Path, tmp_path: Path, capsys: Any) -> None:
    rows = write_rows(tmp_path / "bad.jsonl", [*chats(3), {"messages": "hello"}])
    assert main(["check", *words(model, rows)]) == 1
    said = capsys.readouterr().out
    hidden = re.search(r"^(\d+) checks not asked, since data.rows failed$", said, re.MULTILINE)
    assert hidden is not None and "without the rows: data.rows fails" not in said
    counts = re.search(r"1 failed, (\d+) passed, (\d+) not asked for this run", said)
    assert counts is not None
    num_asked = sum(check.part == "quick" for check in CHECKS.values())
    assert 1 + sum(map(int, (hidden[1], *counts.groups()))) == num_asked
    assert "data.truncation" not in said


def test_no_row_of_any_check_is_wider_than_the_terminal(
    model: Path, data: Path, capsys: Any
) -> None:
    assert main(["check", *words(model, data), "--full", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert str(model) in "".join(lines[:3])
    rows = [line.split()[:2] for line in lines if line.startswith(("passed", "skipped"))]
    assert [name for _, name in rows] == list(CHECKS)


def test_piped_there_is_no_color_and_nothing_on_stderr(model: Path, data: Path) -> None:
    done = run("-m", "taut", "check", *words(model, data))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= WIDTH


# -- what is examined


def test_a_file_with_settings_on_top(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(f'model = "{model}"\nout = "{out}"\n[data]\ntrain = "nothing.jsonl"\n')
    assert main(["check", str(path), f"data.train={data}", *words_of(QUIET), "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["run.output"]["outcome"] == "passed"
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seeds=3"], "unknown key 'seeds' on the command line; did you mean 'seed'"),
        (["nothing.toml"], "nothing.toml"),
        (["optim.lr=1"], "unknown key 'optim.lr'"),
        (["--full=perhaps"], "full"),
        (["--recipe=trl:a.yaml", "steps=3"], "unknown key 'steps' on the command line"),
        (["--recipe=trl:a.yaml", "recipe=trl:b.yaml"], "key 'recipe' is set twice"),
        (["--recipe=trl:a.yaml", "--processes=no"], 'found processes="no" on the command line'),
        (["--recipe=trl:a.yaml", "--processes=0"], "found processes=0 on the command line"),
    ],
)
def test_words_that_cannot_be_read_are_one_line(
    model: Path, data: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = more if "recipe" in more[0] else [*words(model, data), *more]
    assert main(["check", *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("taut: error: ")
    assert message in said.err
    assert said.err.count("\n") == 1


def test_the_processes_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sh"
    path.write_text("trl sft --model_name_or_path m --dataset_name rows.jsonl --seed 1\n")
    assert main(["check", f"--recipe=trl:{path}", "--processes", "4", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["carried"]["settings"]
    assert settings["batch.samples_per_step"] == 32


def test_several_ranks_are_refused(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["check", *words(model, data)]) == 2
    assert "started on several ranks; expected one process" in capsys.readouterr().err


def test_a_model_and_data_that_are_not_there_are_failures(data: Path, capsys: Any) -> None:
    assert main(["check", "--model=nowhere", f"--data={data}", "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    held_to_the_page(read)
    assert "nowhere" in next(c["says"] for c in read["checks"] if c["outcome"] == "failed")


# -- the library


def test_the_library_gives_what_was_found_and_prints_nothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {**QUIET, "model": str(model), "data.train": str(data)}
    found = taut.check(**keys)
    assert found.part == "quick"
    assert not found.failures
    path = tmp_path / "run.toml"
    path.write_text(f'model = "{model}"\n[data]\ntrain = "{tmp_path / "nothing.jsonl"}"\n')
    (failure,) = taut.check(path, **QUIET).failures
    assert failure.name.startswith("data.")
    assert failure.finding.remedy
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("few")
def test_the_library_asks_the_full_part_of_a_run(model: Path, data: Path) -> None:
    run = taut.Run(model=str(model), data={"train": str(data)})  # type: ignore[arg-type]
    assert [one.name for one in taut.check(run, full=True, **QUIET).results][-1] == "group.full"
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        taut.check(run, stepz=3)


# -- the registry


def test_every_question_reads_as_one() -> None:
    questions = [check.question for check in CHECKS.values()]
    assert [question for question in questions if not question.endswith("?")] == []
    assert len(set(questions)) == len(questions)
    assert [question for question in questions if len(question) > 110] == []


def test_what_a_check_comes_after_is_asked_before_it() -> None:
    names = list(CHECKS)
    for name, check in CHECKS.items():
        missing = [before for before in check.after if before not in names[: names.index(name)]]
        assert missing == [], name
