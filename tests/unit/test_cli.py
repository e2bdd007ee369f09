"""Words become a configuration and a call; mistakes become one line and an exit code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import taut
from taut import cli
from taut.cli import Words, main, sort_words
from taut.commands import help, registry, train
from taut.config import REWARD_KEYS, describe, load
from taut.errors import CheckFailed, ConfigError
from taut.methods import METHODS, PUBLISHED
from taut.methods.method import RunConfig
from taut.rewards.settings import RewardSpec
from taut_tools.demo import story


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations ``api.train`` is called with."""
    seen: list[RunConfig] = []
    monkeypatch.setattr(train, "train", seen.append)
    return seen


MINIMAL = ["model=m", "data.train=a.jsonl", "out=o"]


@pytest.mark.parametrize(
    "words",
    [
        ["seed=3", "resume=true", "batch.samples_per_step=8"],
        ["--seed", "3", "--resume", "--batch.samples_per_step=8"],
        ["--resume=true", "--batch.samples-per-step", "8", "seed=3"],
    ],
)
def test_flags_and_overrides_are_the_same_thing(words: list[str], runs: list[RunConfig]) -> None:
    assert main(["sft", *words, *MINIMAL]) == 0
    (config,) = runs
    assert (config.seed, config.resume, config.batch.samples_per_step) == (3, True, 8)


def test_a_toml_file_may_stand_anywhere(tmp_path: Path, runs: list[RunConfig]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nout = "o"\nseed = 1\n[data]\ntrain = "a.jsonl"\n')
    assert main(["sft", "--resume", str(path), "seed=2"]) == 0
    assert (runs[0].model, runs[0].seed, runs[0].resume) == ("m", 2, True)


def test_a_switch_takes_no_following_word() -> None:
    words = sort_words(["--resume", "steps=3", "--seed", "-1"], {"resume"})
    assert words == (None, ["resume=true", "steps=3", "seed=-1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "sed=1", *MINIMAL], "unknown key 'sed' on the command line; did you mean 'seed'?"),
        (["sft"], "key 'model' is missing"),
        (["sft", "--seed"], "found --seed without a value"),
        (
            ["sft", "a.toml", "b.toml"],
            "found 'b.toml' next to 'a.toml'; expected one file of settings",
        ),
        (["sft", "missing.toml"], "cannot read missing.toml"),
        (["show", "/"], "found the directory /; expected a TOML or YAML file of settings"),
        (
            ["stf"],
            "found the command 'stf'; expected one of those that 'taut --help' lists; did you mean 'taut sft'?",
        ),
        (["plug"], "that 'taut --help' lists; is it a method, as in 'taut sft'?"),
        (["train", "model=x"], "that 'taut --help' lists; did you mean 'taut sft'?"),
        (
            ["dr-grpo"],
            "did you mean 'taut grpo grpo.advantage=mean grpo.loss_aggregation=constant'?",
        ),
        (
            ["plan", "method=rloo", *MINIMAL],
            "it is taut grpo grpo.advantage=rloo grpo.loss=reinforce: set method=grpo and these",
        ),
        (
            ["grpo", *MINIMAL, 'rewards=[{name="judge", url="http://h"}]'],
            "unknown key 'rewards[0].url' on the command line; a reward has name, weight, label, timeout, inside, "
            "after, judges and options; what one reward alone takes is in options: options.url",
        ),
        (
            ["plan", "online-dpo", *MINIMAL],
            "found 'online-dpo' after taut plan; expected a file of settings, or key=value; write method=online_dpo",
        ),
        (["demo", "a.toml"], "taut demo takes key=value only"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("taut: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_methods_are_settings_that_can_be(name: str) -> None:
    keys = PUBLISHED[name].replace("soft_overlong=N", "soft_overlong=9").split()
    two = 'rewards=["numeric", "stop"]'
    config = load(METHODS["grpo"], None, [*MINIMAL, two, *keys])
    assert config != load(METHODS["grpo"], None, [*MINIMAL, two])


def test_the_keys_that_an_unknown_one_of_a_reward_is_shown() -> None:
    assert all(field.name in REWARD_KEYS for field in fields(RewardSpec))


@pytest.mark.parametrize("name", ["online-dpo", "online_dpo"])
def test_a_method_is_named_as_its_command_or_as_its_section(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file, after method=, and as a command."""
    (tmp_path / "run.toml").write_text(f'method = "{name}"\nrollout.n = 1\n')
    for words in (["plan", str(tmp_path / "run.toml")], ["plan", f"method={name}", "rollout.n=1"]):
        assert main([*words, *MINIMAL]) == 2
        assert "rollout.n=1" in capsys.readouterr().err  # its own rule: a pair is of two answers
    assert main([name, "--help"]) == 0
    assert "taut online-dpo" in capsys.readouterr().out


def test_each_error_has_its_exit_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: RunConfig) -> None:
        raise CheckFailed("two\nlines")

    monkeypatch.setattr(train, "train", fail)
    assert main(["sft", *MINIMAL]) == 1
    assert capsys.readouterr().err == "taut: error: two lines\n"


def test_only_the_first_rank_prints_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["sft", "sed=1"]) == 2
    assert capsys.readouterr().err == ""


def test_under_torchrun_the_first_rank_of_a_host_to_fail_prints_its_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """torchrun ends rank 0 as soon as another rank has failed: what rank 0 would have said is lost."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "taken").touch()
    said = {}
    for rank in ("1", "0"):
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        assert main(["sft", "model=m", "data=a.jsonl", f"out={tmp_path / 'out'}"]) == 2
        said[rank] = capsys.readouterr().err
    assert "exists and is not empty" in said["1"]
    assert said["0"] == ""
    assert (
        json.loads((tmp_path / "1" / "error.json").read_text())["message"]["message"] in said["1"]
    )
    assert not (tmp_path / "0" / "error.json").exists()


@pytest.mark.parametrize(
    ("left", "told"),
    [((), "taut: interrupted\n"), (("3 are written",), "taut: interrupted: 3 are written\n")],
)
def test_an_interrupt_is_exit_code_130_and_one_line(
    left: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(_: RunConfig) -> None:
        raise KeyboardInterrupt(*left)

    monkeypatch.setattr(train, "train", interrupt)
    assert main(["sft", *MINIMAL]) == 130
    assert capsys.readouterr().err == told


def test_a_notice_that_comes_again_as_an_interrupted_run_ends_does_not_change_its_exit_code() -> (
    None
):
    code = """if True:
        import os, signal, sys
        from taut import cli
        from taut.errors import Interrupted

        def interrupted(words):
            raise Interrupted("it is saved")

        cli._dispatch = interrupted
        code = cli.main()
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(code)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "taut: error: it is saved\n")


def test_other_exceptions_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: RunConfig) -> None:
        raise ZeroDivisionError("\x1b]52;c;aGk=\x07 from s3://key:pw@host")

    monkeypatch.setattr(train, "train", fail)
    assert main(["sft", *MINIMAL]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.endswith("ZeroDivisionError: \\x1b]52;c;aGk=\\x07 from s3://***@host\n")


@pytest.mark.parametrize("name", registry.names())
def test_every_command_has_its_configuration_and_its_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = registry.find(name)
    assert command is not None and callable(cli._import_name(command.call))
    assert main([name, "--help", "all"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    unwrapped = re.sub(r"\n {10}(?=\S)", " ", out)
    assert unwrapped.startswith(f"usage: taut {name} {command.words}")
    if command.config is not None:
        rows = describe(cli.config_class(command))
        assert {*command.alone} <= {row.key for row in rows}
        assert all(row.doc for row in rows)
        assert all(f"\n  {row.key}  (" in out for row in rows)
        assert main([name, "--help"]) == 0
        brief = capsys.readouterr().out
        assert max(map(len, brief.splitlines())) <= 80
        assert len(brief.splitlines()) < 120


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["m"], Words(None, ["model=m"])),
        (["x=1", "m", "a/b.toml"], Words(Path("a/b.toml"), ["x=1", "model=m"])),
        (["m", "--url", "u", "ad"], Words(None, ["model=m", "url=u", "adapter=ad"])),
        (["m", "--resume", "ad"], Words(None, ["model=m", "resume=true", "adapter=ad"])),
    ],
)
def test_words_alone_set_the_keys_of_the_command(words: list[str], expected: Words) -> None:
    assert sort_words(words, {"resume"}, ("model", "adapter")) == expected


def test_a_switch_of_another_framework_takes_no_word() -> None:
    words = ["--packing", "--lr", "1e-4", "--bf16", "seed=1", "--use_peft"]
    expected = ["packing=true", "lr=1e-4", "bf16=true", "seed=1", "use_peft=true"]
    assert (
        sort_words(words, set(), foreign={"packing", "lr", "bf16", "use_peft"}).overrides
        == expected
    )
    assert main(["sft", *MINIMAL, "--load_in_4bit", "--packing"]) == 2


@pytest.mark.parametrize("words", [["data=a.jsonl"], ["--data", "a.jsonl"], ["data.train=a.jsonl"]])
def test_data_is_short_for_data_train(words: list[str], runs: list[RunConfig]) -> None:
    assert main(["sft", "model=m", "out=o", *words]) == 0
    assert runs[0].data.train == "a.jsonl"


@pytest.mark.parametrize(
    ("command", "call"),
    [("check", "taut.commands.check:main"), ("plan", "taut.commands.plan:main")],
)
def test_data_is_short_for_data_train_in_commands_that_look_at_a_run(
    command: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    module, _, name = call.partition(":")
    monkeypatch.setattr(
        import_module(module), name, lambda _, overrides: found.append(overrides) or 0
    )
    assert main([command, "model=m", "--data", "a.jsonl"]) == 0
    assert main([command, "model=m", "data.train=a.jsonl"]) == 0
    assert found == [["model=m", "data.train=a.jsonl"]] * 2


def test_words_alone_are_put_in_a_list() -> None:
    words = ["a/b", "json=true", 'é "c"', "d.toml"]
    assert sort_words(words, set(), (), "directories") == Words(
        None, ["json=true", 'directories=["a/b", "é \\"c\\"", "d.toml"]']
    )
    assert sort_words(["json=true"], set(), (), "directories") == Words(None, ["json=true"])


def test_a_word_too_many_and_a_model_twice_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "a", "b"]) == 2
    assert "found 'b' next to MODEL; expected settings as key=value" in capsys.readouterr().err
    assert main(["chat", "a", "model=b"]) == 2
    assert "key 'model' is set twice on the command line" in capsys.readouterr().err
    assert main(["chat", "a", "engine=server"]) == 2
    assert "engine=server: urls are where servers answer; expected urls=" in capsys.readouterr().err
    assert main(["chat", "a", "--server.urls", "u"]) == 2
    assert (
        "unknown key 'server.urls' on the command line; did you mean 'urls'?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("imported", ["taut", "taut.cli", "taut.errors"])
def test_windows_is_refused_at_import(imported: str) -> None:
    """Before any module that Windows lacks is imported."""
    without = "import sys; sys.modules.update(fcntl=None, resource=None, pwd=None)"
    ran = subprocess.run(
        [sys.executable, "-c", f"{without}; sys.platform = 'win32'; import {imported}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: found Windows; expected Linux or macOS; install taut in WSL 2 (in PowerShell: wsl --install) "
        "or Docker"
    )


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sft", "show"):
        assert main([command, "--help", "all"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: taut {command}")
        assert "optim.learning_rate  (number | none; none)" in out
        assert "taut sft: 2e-05, with adapters 0.0002." in " ".join(out.split())


def test_help_shows_few_keys_and_the_groups_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sft", "--help"]) == 0
    brief = capsys.readouterr().out
    assert "  data.train  (" in brief and "  optim.beta1  (" not in brief
    rows = describe(METHODS["sft"])
    assert re.search(rf"groups of all {len(rows)} keys", brief)
    counts = re.findall(r"^  (\w+) +(\d+)  ", brief, re.MULTILINE)
    assert sum(int(count) for _, count in counts) == len(rows)
    for group, count in counts:
        assert main(["sft", "--help", group]) == 0
        listed = re.findall(r"^  [\w.]+  \(", capsys.readouterr().out, re.MULTILINE)
        assert len(listed) == int(count), group
    assert main(["sft", "--help=optim.beta1"]) == 0
    assert "optim.beta1  (" in capsys.readouterr().out


def test_a_group_that_is_none_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sft", "--help", "optm"]) == 2
    said = capsys.readouterr().err
    assert "expected one of general, data, parallel" in said and "did you mean optim?" in said
    assert main(["sft", "--help", "lr"]) == 2
    assert "did you mean optim.learning_rate?" in capsys.readouterr().err


@pytest.mark.parametrize("words", help.EXAMPLES.items())
def test_examples_of_help_name_keys_that_there_are(words: tuple[str, tuple[str, ...]]) -> None:
    name, examples = words
    for example in examples:
        given = shlex.split(example)
        command = cli.command_of([name, *given])
        assert command is not None
        known = {row.key for row in help.rows_of(cli.config_class(command))} | {"data", "full"}
        found = [
            word.removeprefix("--").partition("=")[0].replace("-", "_")
            for word in given
            if "=" in word or word.startswith("--")
        ]
        assert set(found) <= known


def test_each_command_is_in_one_group_of_the_usage() -> None:
    titles: dict[str, list[str]] = {}
    for name in registry.names():
        command = registry.find(name)
        assert command is not None
        titles.setdefault(command.group, []).append(name)
    assert {*titles} == {*registry.TITLES}
    assert titles[registry.TRAINING] == [*registry.training(), "teach"]


@pytest.mark.parametrize("command", registry.names())
def test_help_is_for_users(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: taut {command}")
    assert "``" not in said
    assert "imported by" not in said


def test_the_demo_lists_its_own_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--help"]) == 0
    said = capsys.readouterr().out
    for key in ("out", "questions", "steps", "optim.learning_rate"):
        assert re.search(rf"^  {re.escape(key)}  \(", said, re.MULTILINE) or f", {key}  (" in said
    plan = story.parse([f"out={tmp_path / 'demo'}", "questions=20", "steps=10"])
    assert (plan.questions, "steps=10" in plan.run) == (20, True)
    defaults = dict(word.split("=") for word in story.parse([f"out={tmp_path / 'demo'}"]).run)
    for key in ("steps", "optim.learning_rate"):
        assert re.search(rf"\b{re.escape(key)}  \([^)]*{defaults[key]}\)", said), key
    assert "dtype" not in defaults, "bfloat16 takes hours where the processor has none"


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"taut {taut.__version__}\n"
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert max(map(len, usage.splitlines())) <= 80
    assert all(f"taut {command}" in usage for command in registry.names())
    assert main([]) == 2
    assert capsys.readouterr().out == usage


def test_the_library_takes_files_keys_and_runs(tmp_path: Path, runs: list[RunConfig]) -> None:
    taut.sft(model="m", data={"train": "a.jsonl"}, out=tmp_path, **{"batch.samples_per_step": 8})
    assert (runs[0].data.train, runs[0].batch.samples_per_step) == ("a.jsonl", 8)
    taut.sft(runs[0], seed=5, batch={"share_prefixes": False})
    assert (runs[1].out, runs[1].seed, runs[1].batch.samples_per_step) == (str(tmp_path), 5, 8)
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nout = "o"\n[data]\ntrain = "a.jsonl"\n')
    taut.sft(path, steps=10)
    assert (runs[2].model, runs[2].steps) == ("m", 10)
    taut.sft(runs[2])
    assert runs[3] is runs[2]
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        taut.sft(path, stepz=10)


def test_the_public_surface_is_pinned() -> None:
    assert sorted(taut.__all__) == [
        "AttentionError",
        "CheckFailed",
        "ConfigError",
        "DataError",
        "DivergenceError",
        "ModelError",
        "NonFiniteError",
        "OutputError",
        "RenderError",
        "Result",
        "Run",
        "TautError",
        "__version__",
        "best_of_n",
        "chat",
        "check",
        "cpo",
        "data",
        "distill",
        "dpo",
        "evaluate",
        "export",
        "generate",
        "gkd",
        "grpo",
        "kto",
        "merge",
        "online_dpo",
        "orpo",
        "plan",
        "ppo",
        "push",
        "resume",
        "reward",
        "runs",
        "score",
        "sft",
        "show",
        "simpo",
        "teach",
        "verify",
    ]
    assert all(getattr(taut, name) is not None for name in taut.__all__)
    assert dir(taut) == sorted(taut.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        taut.nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    ("code", "excused"),
    [
        ("import taut", ()),
        ("from taut.cli import main; main(['--help'])", ()),
        ("from taut.cli import main; main(['runs', '.'])", ("pydantic",)),
        ("import taut.data.tokenize", ("numpy", "pydantic")),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str, excused: tuple[str, ...]) -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "peft", "rich", "numpy", "pydantic")
    report = (
        f"import json, sys; {code}; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    assert set(json.loads(done.stdout.splitlines()[-1])) <= {*excused}


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds a run, named by run.toml in the working directory."""
    out = tmp_path / "taken"
    out.mkdir()
    (out / "resolved.json").write_text("{}")
    (tmp_path / "run.toml").write_text(f'model = "m"\nout = "{out}"\ndata.train = "a.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    return out


def test_an_out_that_is_taken_is_refused_before_torch_is_imported(taken: Path) -> None:
    program = (
        "import sys; from taut.cli import main; code = main(['sft', 'run.toml']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.startswith(f"taut: error: out={taken} exists and is not empty")
    assert done.stderr.count("\n") == 1
    assert done.stdout == "2 False False\n"


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["model=m", "data=a.jsonl", "out=taken"], True),
        (["run.toml", "--out", "taken", "resume=false"], True),
        (["run.toml"], True),
        (["run.toml", "resume=true"], False),
        (["run.toml", "--overwrite=true"], False),
        (["run.toml", "out=other"], False),
    ],
)
def test_an_out_that_is_taken_is_refused_unless_it_is_gone_on_with(
    words: list[str],
    is_refused: bool,
    taken: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sft", *words]) == 2
    assert ("exists and is not empty" in capsys.readouterr().err) == is_refused
    assert main(["sft", *words, "nokey=1"]) == 2
    assert "unknown key 'nokey'" in capsys.readouterr().err  # what is typed comes first


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["finetun"], "taut sft"),
        (["qlora"], "taut sft lora.rank=16"),
        (["rlhf"], "taut grpo"),
        (["infer"], "taut chat"),
        (["SFT"], "taut sft"),
        (["dr_grpo"], "grpo.advantage=mean"),
        (["sft", "--hlep"], "--help"),
        (["sft", "--help", "optim.lr"], "optim.learning_rate"),
        (["sft", "model=m", "data=a.jsonl", "gpus=2"], "torchrun --nproc-per-node N"),
        (["sft", "model=m", "data=a.jsonl", "batch.size=8"], "batch.samples_per_step"),
        (["sft", "model=m", "data=a.jsonl", "bf16=true"], "dtype=bfloat16"),
        (["sft", "model=m", "data=a.jsonl", "eval=b.jsonl"], "data.eval"),
        (["grpo", "model=m", "data=a.jsonl", "temperature=1"], "'rollout.temperature'"),
        (["grpo", "model=m", "data=a.jsonl", "rollout.engine=vllm"], "rollout.engine=server"),
        (["sft", "m", "a.jsonl"], "model=DIR data.train=FILE"),
    ],
)
def test_a_new_user_is_told_what_to_type(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert meant in capsys.readouterr().err


def test_help_may_stand_before_or_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in (["sft", "--help"], ["help", "sft"], ["--help", "sft"], ["sft", "help"]):
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1 and "lora" in said[0]
    for words in (["--version"], ["-V"], ["version"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"taut {taut.__version__}\n"
