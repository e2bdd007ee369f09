"""The pages tell the truth: paths exist, commands are accepted, examples parse, generated pages are current."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import (
    CHECK_PAGE,
    CLUSTER_PAGE,
    CONFIG_PAGE,
    MODELS_PAGE,
    PLAN_PAGE,
    ROOT,
    check_page,
    cluster_page,
    config_page,
    models_page,
    plan_page,
)

from taut.cli import command_of as called_by
from taut.cli import config_class, joined, sort_words
from taut.commands import registry
from taut.config import describe, from_mapping, load
from taut.methods import METHODS, command_of
from taut.methods.method import RunConfig, class_of
from taut_tools.cluster.launch import read

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
EXAMPLES = sorted((ROOT / "examples").rglob("run.toml"))

PATH = re.compile(r"`((?:src|tests|benchmarks|docs|examples|\.ci)/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (.*)$", re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ )?((?:taut|make|torchrun|python -m taut) .*)$", re.MULTILINE)


def commands() -> Iterator[tuple[str, str]]:
    """What the code blocks of the pages tell a reader to type, without a comment beside it."""
    for page in PAGES:
        text = page.read_text()
        code = "\n".join(FENCED.findall(text) + INDENTED.findall(text))
        for command in COMMAND.findall(code):
            yield page.name, command.split("   ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert missing == []


def test_every_page_can_be_reached_from_the_readme_or_the_index() -> None:
    reached: set[Path] = set()
    ahead = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            ahead += [page.parent / link for link in LINK.findall(page.read_text())]
    assert [
        page.name for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in reached
    ] == []


def test_the_page_on_installing_has_every_extra() -> None:
    said = (ROOT / "docs" / "install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.findall(r"^\| `([\w-]+)` \|", said, re.MULTILINE) == [
        *project["optional-dependencies"]
    ]


def test_no_page_but_that_of_an_index_takes_taut_from_one() -> None:
    """A reader of the source has it in no package index: ``pip install taut[rl]`` may find something else there."""
    pages = {page for page in PAGES if re.search(r"pip install '?taut\b", page.read_text())}
    assert pages == {ROOT / "docs" / "package.md"}


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {ROOT / path for path in PATH.findall(text)}
    files = [path for path in (ROOT / "src/taut").rglob("*.py") if not path.name.startswith("__")]
    unnamed = [path for path in files if path not in named and path.parent not in named]
    assert [
        str(path.relative_to(ROOT)) for path in unnamed if len(path.relative_to(ROOT).parts) == 3
    ] == []
    table = text[text.index("I want to ...") :]
    assert len(PATH.findall(table)) > 30


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_every_command_of_a_page_is_accepted(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "taut.train.settings.require", lambda *_: None
    )  # extras that tests do without
    words = shlex.split(re.sub(r" > \S+$", "", command).replace(" -> ", " "))
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"{page}: make has no target {words[1]}"
        return
    words = words[next(i for i, word in enumerate(words) if word == "taut") + 1 :]
    if words[0].startswith("-") or words[0].isupper():
        return
    words = joined(words)
    assert words[0] in registry.names(), f"{page}: taut has no command {words[0]}"
    given = [word for word in words[1:] if not word.startswith("[")]
    called = called_by(words)
    assert called is not None
    if "--help" in given or called.config is None:
        return
    cls = config_class(called)
    named = [word for word in given if word.removeprefix("--").startswith("method=")]
    if called.has_method and (named or not called.is_raw):
        cls = class_of(None, [word.removeprefix("--") for word in named])
        given = [word for word in given if word not in ("--full", "--json")]
    switches = {row.key for row in describe(cls) if row.type == "true | false"}
    path, overrides = sort_words(given, switches, called.alone, called.many)
    if not called.has_method and called.config is not None and "RUN.toml" not in called.words:
        assert path is None, f"{page}: {path} is no argument"
        assert isinstance(load(cls, None, overrides), cls)
        return
    if called.is_raw:  # it says data for data.train
        overrides = [re.sub("^data=", "data.train=", word) for word in overrides]
    minimal = tmp_path / "run.toml"
    minimal.write_text('model = "m"\nout = "o"\n[data]\ntrain = "a.jsonl"\n')
    named_one = path is not None and (ROOT / path).is_file()
    source = (ROOT / path if named_one else minimal) if path else None
    if words[0].startswith("launch "):  # the keys of a launcher and of a run
        monkeypatch.chdir(tmp_path)
        assert isinstance(read(cls, source, overrides).launcher, cls)
        return
    loaded = load(cls, source, overrides)
    assert isinstance(loaded, cls)
    if called.call == "taut.commands.train:train":
        assert loaded.out is not None, f"{page}: out is not set"


def test_the_first_screen_of_the_readme_has_the_two_commands() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:40]
    assert "    make demo" in first
    assert "    make test" in first


def test_the_files_of_an_afternoon_can_be_read_in_one() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## An afternoon") :]
    files = [link for link in LINK.findall(section) if link.endswith(".py")]
    assert len(files) == 10
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 2800
    assert len(text.splitlines()) <= 90


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_example_parses(path: Path) -> None:
    given = tomllib.loads(path.read_text())
    missing = [f"{key}=x" for key in ("model", "out") if key not in given]
    if "train" not in given.get("data", {}):
        missing.append("data.train=x")
    if "distill" in given:  # which learns from a teacher in the place of rewards
        missing += ["distill.teacher=y", "data.eval=x"]
    elif "rollout" in given and "rewards" not in given:  # of a task that is named with its data
        missing += ["rewards=exact_match", "data.eval=x"]
    assert isinstance(load(class_of(path), path, missing), RunConfig)


@pytest.mark.parametrize("page", ["use.md", "config.md"])
def test_every_run_of_a_page_is_one(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    runs = re.findall(r"^```toml\n(model = .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert runs
    for run in runs:
        given = tomllib.loads(run)
        assert from_mapping(METHODS["sft"], given).model == given["model"]


def test_the_configuration_page_is_current() -> None:
    assert CONFIG_PAGE.read_text(encoding="utf-8") == config_page(), "run make docs"


def test_every_key_that_the_page_of_names_has_is_one() -> None:
    page = (ROOT / "docs" / "names.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    named = {word for row in rows for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", row)}
    keys = {row.key for cls in METHODS.values() for row in describe(cls)}
    assert len(rows) >= 50
    assert named - keys <= {"rewards", "tools", "text", "weight", "share", "stop"}


def test_the_configuration_page_has_the_default_of_every_command() -> None:
    lines = re.findall(r"^\| `([\w.]+)` \| (.*)$", CONFIG_PAGE.read_text("utf-8"), re.MULTILINE)
    cells = {key: re.split(r"(?<!\\) \| ", rest)[1] for key, rest in lines}
    wrong = []
    for method, cls in METHODS.items():
        name = re.escape(command_of(method).removeprefix("taut "))
        for row in describe(cls):
            first, _, others = cells[row.key].partition(" (")
            own = re.search(rf"(?:^|, ){name}: ([^,)]*)", others)
            told = own[1] if own else first
            if told != row.default and row.key != "method":  # each command has its own
                wrong.append(f"{name}: {row.key}={row.default}, and the page says {told}")
    assert wrong == []


def test_the_table_of_checks_is_current() -> None:
    assert CHECK_PAGE.read_text(encoding="utf-8") == check_page(), "run make docs"
    assert CLUSTER_PAGE.read_text(encoding="utf-8") == cluster_page(), "run make docs"


def test_the_tables_of_rates_ranges_and_adapters_are_current() -> None:
    assert MODELS_PAGE.read_text(encoding="utf-8") == models_page(), "run make docs"


def test_the_table_of_gpus_is_current() -> None:
    assert PLAN_PAGE.read_text(encoding="utf-8") == plan_page(), "run make docs"


def test_what_a_resume_may_change_is_on_its_page() -> None:
    """Every key that a resume may change is named, and every key that is named exists."""
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    section = page.partition("## What may change\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)`", section))
    keys = {row.key for cls in METHODS.values() for row in describe(cls)}
    keys |= {key.rpartition(".")[0] for key in keys}
    may = {key for cls in METHODS.values() for kind in cls.may_change for key in kind}
    may -= {"rollout.replay_from"}  # it says so among what is refused
    of_options = {"api_key_env", "url", "known_as", "reward_server", "judge"}
    names = {"data", "schedule", "address", "exactness", "warning", "plan"}  # of events
    assert not may - named, "left out"
    assert not {name for name in named - keys - of_options - names if "." not in name}
    assert not {name for name in named if "." in name and name not in keys} - {"resolved.json"}
