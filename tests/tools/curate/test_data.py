"""What the tools of ``taut data`` take out, what they leave as it is, and what they refuse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tests.helpers.chat_runs import save_model

from taut.cli import main
from taut.config import from_mapping
from taut.errors import DataError
from taut_tools.curate import commands
from taut_tools.curate.commands import dedup
from taut_tools.curate.settings import Dedup

WORDS = [f"word{number}" for number in range(3000)]
DRAW = random.Random(0)
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``taut data`` in an empty directory -> exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str]:
        code = main(["data", *words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def text(num_words: int) -> str:
    return " ".join(DRAW.choices(WORDS, k=num_words))


def chat(question: str, answer: str, **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def save(name: str, rows: list[Any]) -> list[str]:
    """Rows with white space that no writer of JSON would put there."""
    lines = [json.dumps(row, separators=(", ", " :  ")) for row in rows]
    Path(name).write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return lines


def removed(name: str) -> dict[str, tuple[str, str | None]]:
    """Place -> reason, and what it is a duplicate of."""
    lines = Path(f"{name}.removed.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["id"]: (row["reason"], row.get("kept")) for row in rows}


def changed(said: str, share: float) -> str:
    words = said.split()
    for at in DRAW.sample(range(len(words)), int(share * len(words))):
        words[at] = "other"
    return " ".join(words)


def test_planted_duplicates_are_found_and_the_first_stays(run: Run) -> None:
    question, answer = text(20), text(120)
    others = [chat(text(12), text(80)) for _ in range(200)]
    rows = [
        chat(question, answer, source="first"),
        *others,
        chat(question, answer, source="exact"),
        chat(question.upper(), f"  {answer}".replace(" ", "\n\t ", 5)),
        chat(question.replace("o", "\uff4f"), answer),
        chat(question, changed(answer, 0.05)),
        chat(question, changed(answer, 0.05).upper()),
    ]
    lines = save("a.jsonl", rows)
    code, printed = run("dedup", "a.jsonl", "out=b.jsonl")
    assert code == 0
    assert "206 rows: 201 kept, 5 removed (2.43%: 3 exact, 2 near)" in printed
    assert Path("b.jsonl").read_text(encoding="utf-8").splitlines() == lines[:201]
    numbers = [f"a.jsonl:{2 * 201 + 2 * at + 1}" for at in range(5)]
    reasons = ["exact", "exact", "exact", "near", "near"]
    assert removed("b.jsonl") == {
        number: (reason, "a.jsonl:1") for number, reason in zip(numbers, reasons, strict=True)
    }
    report = json.loads(Path("b.jsonl.report.json").read_text(encoding="utf-8"))
    assert report["command"] == "taut data dedup a.jsonl out=b.jsonl"
    assert report["removed"] == {"exact": 3, "near": 2}
    assert report["sources"][0]["rows"] == 206


def test_what_only_looks_like_a_duplicate_stays(run: Run) -> None:
    question, answer, system = text(100), text(60), text(200)
    rows = [
        chat(question, "yes"),
        chat(question, "no"),
        chat("which one?", answer),
        chat("which two?", answer),
        chat(text(80), said := text(80)),
        chat(text(80), changed(said, 0.15)),
        {"messages": [{"role": "system", "content": system}, *chat("one", "a")["messages"]]},
        {"messages": [{"role": "system", "content": system}, *chat("two", "b")["messages"]]},
        {"messages": [{"role": "system", "content": "be brief"}, *chat("one", "a")["messages"]]},
    ]
    save("a.jsonl", rows)
    assert "9 kept, 0 removed" in run("dedup", "a.jsonl", "out=b.jsonl")[1]


def test_pictures_tools_and_swapped_answers_tell_rows_apart(run: Run) -> None:
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    asked = chat("what is this?", "a cat")
    save(
        "a.jsonl",
        [
            {**asked, "images": ["one.png"]},
            {**asked, "images": ["two.png"]},
            asked,
            {**asked, "tools": [tool]},
        ],
    )
    assert "4 kept" in run("dedup", "a.jsonl", "out=b.jsonl")[1]
    pair = {"prompt": "which?", "chosen": text(40), "rejected": text(40)}
    swapped = {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}
    save("p.jsonl", [pair, swapped, pair])
    assert "2 kept" in run("dedup", "p.jsonl", "out=q.jsonl")[1]
    labeled = [{**asked, "label": True}, {**asked, "label": False}]
    save("l.jsonl", labeled)
    assert "2 kept" in run("dedup", "l.jsonl", "out=m.jsonl", "kind=unpaired")[1]
    assert "1 kept" in run("dedup", "l.jsonl", "out=n.jsonl")[1]


def test_prompts_can_be_compared_alone(run: Run) -> None:
    save("a.jsonl", [chat("which river?", text(9)), chat("Which  river?", text(9)), chat("b", "c")])
    assert "2 kept, 1 removed" in run("dedup", "a.jsonl", "out=b.jsonl", "on=prompt")[1]
    assert "3 kept" in run("dedup", "a.jsonl", "out=c.jsonl", "threshold=none")[1]


def test_every_file_that_training_reads(run: Run) -> None:
    row = {"prompt": "the cat", "completion": " sat"}
    save("a.jsonl", [row])
    Path("b.csv").write_text("prompt,completion\nthe cat, sat\nthe dog, ran\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "a"]}), "c.parquet")
    assert "6 rows: 4 kept" in run("dedup", "a.jsonl", "b.csv", "c.parquet", "out=d.jsonl")[1]
    assert [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()] == [
        row,
        {"prompt": "the dog", "completion": " ran"},
        {"text": "a"},
        {"text": "b"},
    ]
    assert removed("d.jsonl") == {
        "b.csv:1": ("exact", "a.jsonl:1"),
        "c.parquet:3": ("exact", "c.parquet:1"),
    }


def test_a_folder_that_datasets_loads(run: Run, tmp_path: Path) -> None:
    save("a.jsonl", [chat("one", "two"), chat("one", "two"), chat("three", "four")])
    assert run("dedup", "a.jsonl", "out=b/", "license=cc-by-4.0")[0] == 0
    table = datasets.load_dataset("b", split="train", cache_dir=str(tmp_path / "cache"))
    assert table["messages"][1] == chat("three", "four")["messages"]
    card = Path("b/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: cc-by-4.0\nconfigs:\n")
    assert "taut data dedup a.jsonl out=b/ license=cc-by-4.0" in card
    assert "`a.jsonl`: 3 rows, `.jsonl:" in card
    assert sorted(path.name for path in Path("b").iterdir()) == [
        *("README.md", "removed.jsonl", "report.json", "train.jsonl"),
    ]
    assert "2 rows" in run("stats", "b")[1]


def test_questions_of_evaluations_are_found(run: Run) -> None:
    question = "How many apples does Anna have after she eats two of her seven apples today?"
    save("eval.jsonl", [{"problem": question, "answer": "5"}, {"problem": "What is 2 + 3?"}])
    rows = [
        chat(text(30), text(30)),
        chat(f"Solve this. {question.upper()} Think first.", "5"),
        chat("repeat a question", f"here it is:\n{question}"),
        chat("what is  2 + 3?", "5"),
        chat("so tell me: what is 2 + 3?", "5"),
        chat("How many apples does Anna have?", "some"),
    ]
    lines = save("a.jsonl", rows)
    words = ["against=[eval.jsonl]", 'against_columns={prompt = "problem"}']
    code, printed = run("decontaminate", "a.jsonl", "out=b.jsonl", *words)
    assert code == 0
    assert "6 rows: 3 kept, 3 removed (50.00%: 3 contaminated)" in printed
    assert "2 questions, 1 of them of fewer than 8 words; 2 questions found" in printed
    assert Path("b.jsonl").read_text().splitlines() == [lines[0], lines[4], lines[5]]
    found = [json.loads(line) for line in Path("b.jsonl.removed.jsonl").read_text().splitlines()]
    assert [row["question"] for row in found] == ["eval.jsonl:1", "eval.jsonl:1", "eval.jsonl:3"]
    assert found[0]["shared"] in question.casefold()
    assert "4 kept" in run("decontaminate", "a.jsonl", "out=c.jsonl", *words, "on=prompt")[1]
    assert "5 kept" in run("decontaminate", "a.jsonl", "out=d.jsonl", *words, "ngram=40")[1]


def test_statistics(run: Run, tmp_path: Path) -> None:
    save(
        "a.jsonl",
        [
            chat("the cat", "sat"),
            chat("The cat", "sat"),
            {"messages": chat("a", "bc" * 50)["messages"]},
        ],
    )
    model = save_model(tmp_path / "model")
    code, printed = run("stats", "a.jsonl", f"model={model}", "out=s.json")
    assert code == 0
    assert "3 rows (3 conversation), 1 exact duplicates" in printed
    assert "messages: 3 user, 3 assistant" in printed
    report = json.loads(Path("s.json").read_text())
    assert report["longest"][0]["id"] == "a.jsonl:5"
    assert report["characters"]["max"] == 101
    assert 0 < report["targets"]["total"] < report["tokens"]["total"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dedup", "a.jsonl", "out=a.jsonl"], "out=a.jsonl is a file that is read"),
        (["dedup", "a.jsonl", "out=there.jsonl"], "there.jsonl exists; expected a new file"),
        (["dedup", "a.jsonl", "out=here/"], "here/ exists; expected a new directory"),
        (["dedup", "a.jsonl", "out=b.csv"], "expected FILE.jsonl, or DIR/"),
        (["dedup", "a.jsonl", "out=b.jsonl", "threshold=1.5"], "less than or equal to 1"),
        (["dedup", "a.jsonl", "out=b.jsonl", "threshold=0"], "greater than 0"),
        (["dedup", "a.jsonl", "out=b.jsonl", "license=mit"], "is for the card of a folder"),
        (["dedup", "a.jsonl"], "out"),
        (["dedup", "out=b.jsonl"], "data"),
        (["dedup", "none.jsonl", "out=b.jsonl"], "found no file or directory none.jsonl"),
        (["dedup", "empty.jsonl", "out=b.jsonl"], "empty.jsonl: no rows; expected at least one"),
        (["dedup", "broken.jsonl", "out=b.jsonl"], "broken.jsonl:2: broken JSON at column 9"),
        (["dedup", "strange.jsonl", "out=b.jsonl"], "strange.jsonl:1: the row is"),
        (
            ["dedup", "times.parquet", "out=b.jsonl"],
            "times.parquet:1: the row cannot be written as JSON",
        ),
        (["dedup", "data", "data=[a.jsonl]", "out=b.jsonl"], "data"),
        (["dedup", 'data=[{path = "a.jsonl", weight = 2}]', "out=b.jsonl"], "a.jsonl has weight=2"),
        (["decontaminate", "a.jsonl", "out=b.jsonl", "against=[]"], "against is empty"),
        (
            ["decontaminate", "a.jsonl", "out=b.jsonl", "against=[a.jsonl]"],
            "no row is left of 1 row",
        ),
        (["stats", "a.jsonl", "out=there.jsonl"], "there.jsonl exists; expected a new file"),
        (
            ["stats", "a.jsonl", "template=t"],
            "template=t: nothing reads it; expected model; set it",
        ),
        (["dedupe", "a.jsonl"], "found taut data 'dedupe'; expected one of decontaminate, dedup"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing(
    words: list[str], says: str, run: Run
) -> None:
    save("a.jsonl", [chat("one", "two")])
    save("strange.jsonl", [{"one": 1}])
    Path("there.jsonl").write_text("mine")
    Path("here").mkdir()
    Path("empty.jsonl").write_text("\n")
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    times = pyarrow.table({"text": ["a"], "at": pyarrow.array([0], pyarrow.timestamp("s"))})
    pyarrow.parquet.write_table(times, "times.parquet")
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
    code, printed = run(*words)
    assert code == 2
    assert printed.startswith("taut: error: ")
    assert printed.count("\n") == 1
    assert says in printed
    assert {p: p.read_bytes() for p in Path.cwd().rglob("*") if p.is_file()} == before


def test_an_interrupt_leaves_nothing_that_looks_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("a.jsonl", [chat("one", "two"), chat("three", "four")])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("taut_tools.curate.output.write_report", interrupt)
    for out in ("b.jsonl", "b/"):
        assert run("dedup", "a.jsonl", f"out={out}")[0] == 130
        assert [path.name for path in Path.cwd().iterdir()] == ["a.jsonl"]


def test_a_file_that_changes_while_it_is_read_is_an_error(run: Run) -> None:
    rows = [chat(text(5), text(5)) for _ in range(3)]
    save("a.jsonl", rows)
    config = from_mapping(Dedup, {"data": ["a.jsonl"], "out": "b.jsonl"})
    opened = commands.open_for(config)
    list(opened.rows())
    save("a.jsonl", rows[:2])
    with pytest.raises(DataError, match="changed while they were read"):
        list(opened.lines())
    assert dedup(config).tally.num_kept == 2


def test_the_tools_are_listed(run: Run) -> None:
    code, printed = run()
    assert code == 2
    assert (0, printed) == run("--help")
    assert all(f"taut data {tool}" in printed for tool in ("stats", "dedup", "filter"))
