"""A package that is installed from another folder adds a command, rewards, a tool, an environment and a sink."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.online_runs import keys_of, save_models, train

from taut.cli import main
from taut.commands import registry
from taut.config import describe
from taut.errors import ConfigError
from taut.io import plugins
from taut.rewards import RewardInput
from taut.rewards.custom import UserReward
from taut.rewards.registry import charges_steps, class_of, files_of, verifier_of
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import GradingConfig, RewardSpec
from taut.rl.environments.tools import load_tool
from taut.rl.settings import EnvironmentConfig

TOY = '''
from pathlib import Path
from taut.commands.registry import Command
from taut.config import configclass
from taut.rl.environment import Step

COUNT = Command(
    "TEXT",
    "count the words of a text",
    "toy.plugins:count",
    "toy.plugins:Count",
    group="Toys",
    alone=("text",),
    extras=(),
)

@configclass
class Count:
    """Count words."""

    text: str
    """The text."""

def count(config):
    print(len(config.text.split()))
    return 0

def brief(text, most=9):
    return max(0.0, 1 - len(text) / most)
brief.judges = "form"

def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: The number.
    """
    return 2 * number

class Twice:
    def step(self, text, calls):
        self.said = getattr(self, "said", 0) + 1
        if self.said == 2:
            return Step(done=True)
        return Step(messages=[{"role": "user", "content": "And then?"}])

class Kinds:
    def __init__(self, out):
        self.path = Path(out, "kinds.txt")
    def __call__(self, event):
        with self.path.open("a") as file:
            file.write(event["kind"] + "\\n")
'''
VERIFIERS = '''
import os
from pathlib import Path
from typing import Annotated, ClassVar
from pydantic import Field
from taut.config import Decision, configclass
from taut.errors import ConfigError
from taut.rewards.judge import RewardServer
from taut.rewards.verifier import Explained, Place, Verifier, import_library

@configclass
class Cases:
    """What letters count."""

    ignore: bool = False
    """Whether their case does not matter."""

@configclass
class Words(Verifier):
    """The share of the words of a file that an answer has."""

    runs: ClassVar[Place] = "process"
    full_marks: ClassVar[float | None] = 1.0
    unjudged: ClassVar[float | None] = 0.0

    file: str
    """The file with the words."""
    most: Annotated[int, Field(gt=0)] = 100
    """Number of words that count."""
    cases: Cases = Cases()
    library: str = "json"
    """A module that it needs."""
    parent: int | None = None

    def __post_init__(self):
        if self.file.startswith("/dev/"):
            raise ConfigError(f"file={self.file} is a device; expected a file")

    def resolve_defaults(self):
        words = Path(self.file).read_text().split()
        reason = f"they are in {self.file}"
        return type(self)(**{**vars(self), "parent": os.getpid()}), Decision("words", str(len(words)), reason)

    def prepare(self):
        import_library(self.library, "a package of that name", "words")

    def dress(self, reference):
        return f"the word {reference}"

    def __call__(self, answered):
        assert os.getpid() != self.parent, "a process of its own judges"
        if "loop" in answered.text:
            while True: pass
        words = Path(self.file).read_text().split()[: self.most]
        text = answered.text.lower() if self.cases.ignore else answered.text
        found = [word for word in words if word in text.split()]
        return Explained(len(found) / len(words), "found " + ", ".join(found))

@configclass
class Elsewhere(RewardServer):
    """A reward model at a server."""

class Bare(RewardServer):
    """Not decorated: its field would be no option."""

    more: int = 1
'''
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "toy"
version = "1"
[project.entry-points."taut.commands"]
count = "toy.plugins:COUNT"
broken = "toy.nowhere:COUNT"
[project.entry-points."taut.rewards"]
brief = "toy.plugins:brief"
words = "toy.verifiers:Words"
elsewhere = "toy.verifiers:Elsewhere"
bare = "toy.verifiers:Bare"
[project.entry-points."taut.tools"]
double = "toy.plugins:double"
[project.entry-points."taut.environments"]
twice = "toy.plugins:Twice"
[project.entry-points."taut.sinks"]
kinds = "toy.plugins:Kinds"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the package."""
    source, place = (tmp_path_factory.mktemp(name) for name in ("source", "place"))
    (source / "toy").mkdir()
    (source / "toy" / "__init__.py").touch()
    (source / "toy" / "plugins.py").write_text(TOY)
    (source / "toy" / "verifiers.py").write_text(VERIFIERS)
    (source / "pyproject.toml").write_text(PROJECT)
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(place))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return place


@pytest.fixture
def toy(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package on Python's path."""
    monkeypatch.syspath_prepend(str(installed))
    plugins._added.cache_clear()
    yield
    plugins._added.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


@pytest.mark.usefixtures("toy")
def test_its_command_is_listed_runs_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "two words"]) == 0
    assert capsys.readouterr().out == "2\n"
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "Toys:\n  taut count" in said
    assert main(["count", "--help"]) == 0
    assert "Count the words of a text" in capsys.readouterr().out
    assert main(["count", "txt=a"]) == 2
    assert "did you mean 'text'" in capsys.readouterr().err


@pytest.mark.usefixtures("toy")
def test_a_command_that_cannot_be_imported_does_not_stop_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    assert "Cannot be imported:\n  taut broken" in capsys.readouterr().out
    assert main(["broken"]) == 2
    said = capsys.readouterr().err
    assert (
        "taut.commands: toy adds 'broken' as toy.nowhere:COUNT" in said and "uninstall toy" in said
    )
    assert main(["schema", "dpo"]) == 0


@pytest.mark.usefixtures("toy")
def test_its_reward_environment_and_sink_are_used_in_a_run(tmp_path: Path) -> None:
    keys = keys_of(
        "grpo",
        save_models(tmp_path),
        tmp_path / "run",
        rewards=[{"name": "brief", "options": {"most": 20}}],
        rollout__environment__name="twice",
        log__sinks=["kinds"],
        steps=1,
    )
    train(keys)
    out = Path(keys["out"])
    kinds = (out / "kinds.txt").read_text().splitlines()
    assert "rollout" in kinds and kinds[-1] == "end"
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (rollout,) = [event for event in events if event["kind"] == "rollout"]
    assert 0 < rollout["reward/brief"] <= 1


@pytest.mark.usefixtures("toy")
def test_its_verifier_has_options_which_are_read_as_those_of_taut_s_own(tmp_path: Path) -> None:
    file = str(tmp_path / "words.txt")
    assert verifier_of("words", {"file": file}).cases.ignore is False
    assert verifier_of("words", {"file": file, "cases": {"ignore": True}}).cases.ignore is True
    for options, message in (
        ({"fil": file}, "in the options of the reward words.*did you mean 'file'"),
        ({"file": file, "most": 0}, "in the options of the reward words"),
        (
            {"file": file, "cases": {"ignored": 1}},
            r"'cases\.ignored' .*did you mean 'cases\.ignore'",
        ),
        ({}, "key 'file' is missing"),
        ({"file": "/dev/zero"}, "is a device; expected a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            verifier_of("words", options)
    with pytest.raises(ConfigError, match=r"the class Bare of .* is no configclass"):
        verifier_of("bare", {})
    rows = {row.key: row for row in describe(type(verifier_of("words", {"file": file})))}
    assert rows["most"].default == "100" and rows["cases.ignore"].doc.startswith("Whether")


@pytest.mark.usefixtures("toy")
def test_its_verifier_judges_in_worker_processes_as_taut_s_own_do(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("One two")
    options = {"file": str(file), "cases": {"ignore": True}}
    spec = RewardSpec(name="words", timeout=20.0, inside="answer", options=options)
    with open_rewards([spec], GradingConfig(workers=1)) as reward_set:
        assert reward_set.decisions == [("words", "2", f"they are in {file}")]
        assert reward_set.judges == {"words": "correctness"}
        texts = ["<answer>two three</answer>", "two"]
        scores = [
            it.parts["words"] for it in reward_set.grade([RewardInput(text=it) for it in texts])
        ]
        assert [(it.value, it.reply) for it in scores] == [(0.5, "found two"), (0.0, "found ")]
        (bare,) = reward_set.grade([RewardInput(text="two")], extract=False)
        assert bare.parts["words"].value == 0.5
    late = RewardSpec(name="words", timeout=1.0, options=options)
    with open_rewards([late], GradingConfig(workers=1)) as reward_set:
        (reward_result,) = reward_set.grade([RewardInput(text="loop")])
        assert reward_result.parts["words"].value == 0.0
        assert reward_result.parts["words"].unjudged == "words took longer than 1 s and was killed"
    lacking = RewardSpec(name="words", options={**options, "library": "no_such_module"})
    with pytest.raises(ConfigError, match="the reward words needs a package of that name"):
        open_rewards([lacking], GradingConfig(workers=1))


@pytest.mark.usefixtures("toy")
def test_a_resume_compares_its_code_and_not_the_address_of_its_server(installed: Path) -> None:
    """The code of taut's own tools has taut's version."""
    verifiers, functions = (installed / "toy" / name for name in ("verifiers.py", "plugins.py"))
    assert files_of(["words", "brief", "code", "math"]) == [verifiers, functions]
    environment = EnvironmentConfig(name="tools", tools=["double", "python"])
    assert environment.code == [functions]
    charged = {"url": "http://127.0.0.1:1", "steps": {"charge": True, "separator": "\n\n"}}
    spec = RewardSpec(name="elsewhere", options=charged)
    assert charges_steps([spec]) and not charges_steps(["words", "brief", "code", "math"])
    assert class_of("elsewhere").runs == "remote" and class_of("brief") is None


@pytest.mark.usefixtures("toy")
def test_its_function_is_imported_by_worker_processes_only() -> None:
    assert isinstance(verifier_of("brief", {}), UserReward)
    assert "toy.plugins" not in sys.modules


@pytest.mark.usefixtures("toy")
def test_its_tool_is_described_to_the_model() -> None:
    tool = load_tool("double")
    assert tool.function(number=4) == 8
    assert tool.schema["function"]["parameters"]["properties"] == {
        "number": {"type": "integer", "description": "The number."}
    }


@pytest.mark.usefixtures("toy")
def test_a_misspelled_name_is_told_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"'breif'; expected one of .*, brief, code, .*did you mean brief"
    ):
        verifier_of("breif", {})
    with pytest.raises(ConfigError, match="'dubble'; expected one of calculator, double, python"):
        load_tool("dubble")


def test_what_is_not_installed_is_no_command() -> None:
    assert registry.find("count") is None
    assert "page" in registry.names() and registry.find("page") is not None
