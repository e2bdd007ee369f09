"""The base installation and the extras: what each command needs, said in one line where it is missing."""

from __future__ import annotations

import json
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.helpers.all_commands import ALL
from tests.helpers.base_install import PROJECT, ROOT, install_base, python, run_taut

from taut.cli import main
from taut.config import from_mapping
from taut.errors import ConfigError
from taut.io.extras import EXTRAS, NEWEST, install_command, require
from taut.train.settings import LogConfig

RECIPE = ROOT / "tests/tools/migrate/recipes/trl_sft.yaml"
OPTIONAL = {
    extra: {canonicalize_name(Requirement(line).name) for line in lines}
    for extra, lines in PROJECT["optional-dependencies"].items()
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base installation."""
    folder = tmp_path_factory.mktemp("base")
    install_base(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (["--help"], 0, "usage: taut COMMAND"),
        (["--version"], 0, "taut "),
        (["runs", "."], 0, "no runs in ."),
        (["runs", "--help"], 0, "usage: taut runs"),
        (["demo", "--help"], 0, "usage: taut demo"),
        (["resume", "--help"], 0, "usage: taut resume"),
        (["grpo", "--help"], 0, "usage: taut grpo"),
        (["export", "--help"], 0, "usage: taut export"),
        (["schema"], 0, '{\n "$schema": "https://json-schema.org/'),
        (["schema", "best-of-n"], 0, '{\n "$schema": "https://json-schema.org/'),
        (["check", "--recipe", f"trl:{RECIPE}"], 1, f"{RECIPE}  trl sft"),
        (["check", "--recipe", f"trl:{RECIPE}", "--json"], 1, '{"schema": "taut.recipe/3"'),
        (["check", "--recipe", "--help"], 0, "usage: taut check --recipe"),
        (["import", "--help"], 0, "usage: taut import"),
    ],
    ids=str,
)
def test_what_the_base_installation_runs(
    words: list[str], code: int, output: str, base: Path
) -> None:
    ran = run_taut(base, *words)
    assert (ran.returncode, ran.stderr) == (code, "")
    assert ran.stdout.startswith(output)


def test_a_recipe_becomes_a_run_without_torch(base: Path) -> None:
    recipe = base / "run.sh"
    recipe.write_text("trl dpo --model_name_or_path m --dataset_name org/set --beta 0.05\n")
    ran = run_taut(base, "import", f"trl:{recipe}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "beta = 0.05  # run.sh:1 beta" in ran.stdout
    assert "not checked by the configuration's classes: torch is not installed" in ran.stdout


def test_a_recipe_whose_model_is_here_is_examined_without_transformers(base: Path) -> None:
    """What a tokenizer would have to answer is listed with the reason, the rest is answered."""
    model = base / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "layer_types": ["mamba"]}')
    recipe = base / "here.yaml"
    recipe.write_text(f"model: {model}\npacking: true\nattn_impl: flash_attention_2\n")
    ran = run_taut(base, "check", "--recipe", f"swift.sft:{recipe}", "--json")
    assert ran.stderr == ""
    traps = json.loads(ran.stdout)["traps"]
    because = {reason for trap in traps for reason in trap["because"]}
    assert any("layers with state across tokens: mamba" in reason for reason in because), because
    needs = "could not look: reading a tokenizer needs torch"
    assert any(reason.startswith(needs) for reason in because), because


@pytest.mark.parametrize(
    "name", [name for name, command in ALL.items() if "--" not in name and command.extras]
)
def test_a_command_that_needs_more_says_so_in_one_line(name: str, base: Path) -> None:
    ran = run_taut(base, name, "model=m")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        f"taut: error: taut {name} needs torch, transformers, anyio, cachetools, cloudpickle and 12 more, not "
        "installed here; expected the extra train; run: pip install 'taut[train]'\n"
    )


def test_the_library_says_so_too(base: Path) -> None:
    program = """
import taut
print(taut.runs())
for call in (lambda: taut.sft(model="m"), lambda: taut.show(), lambda: taut.Run, lambda: taut.Result):
    try:
        call()
    except taut.ConfigError as error:
        print(str(error).partition(" needs ")[0])
"""
    ran = python(base, program)
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["[]", "taut.sft", "taut.show", "taut.Run", "taut.Result"]


def test_the_extras_are_those_of_the_project() -> None:
    names = metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        found = {canonicalize_name(names.get(module, [module])[0]) for module in modules}
        assert found == OPTIONAL[extra], extra
    asked = {extra for command in ALL.values() for extra in command.extras}
    assert asked <= EXTRAS.keys() <= OPTIONAL.keys()
    (own,) = [line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("taut[")]
    assert Requirement(own).extras == OPTIONAL.keys() - {
        *("dev", "docs", "page-tests", "wandb", "trackio", "verifiers", "gs", "modelscope")
    }


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'taut[train]'"),
        (
            {"url": "file:///a%20b/taut", "dir_info": {"editable": True}},
            "pip install -e '/a b/taut[train]'",
        ),
        ({"url": "file:///taut", "dir_info": {}}, "pip install 'taut[train] @ file:///taut'"),
        (
            {"url": "file:///d/taut-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'taut[train] @ file:///d/taut-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/taut.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "pip install 'taut[train] @ git+https://host/taut.git@12ab'",
        ),
    ],
)
def test_extras_are_installed_from_where_taut_came(
    origin: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(
        metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text)
    )
    assert install_command("train") == command


@pytest.mark.parametrize(
    ("library", "found"), [("torch", "2.10.0+cu128"), ("transformers", "5.16.1")]
)
def test_a_version_below_the_range_is_refused(
    library: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another program's installation has put an older one in place."""
    (line,) = [
        line for line in PROJECT["optional-dependencies"]["train"] if line.startswith(library)
    ]
    real = metadata.version
    needed = Requirement(f"{line}; extra == 'train'")
    monkeypatch.setattr("taut.io.extras._requirements", lambda: [needed])
    monkeypatch.setattr(metadata, "version", lambda of: found if of == library else real(of))
    wanted = line.removeprefix(library)
    with pytest.raises(ConfigError) as caught:
        require("train", "taut sft")
    assert str(caught.value) == (
        f"taut sft found {library} {found}; expected {wanted}; run: pip install '{line}'"
    )


def test_extras_come_from_the_folder_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"url": "https://host/x.git", "subdirectory": "tools/taut"}
    origin = {**place, "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    found = SimpleNamespace(read_text=lambda _: json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda _: found)
    url = "git+https://host/x.git@abc#subdirectory=tools/taut"
    assert install_command("train") == f"pip install 'taut[train] @ {url}'"


def test_extras_of_taut_run_from_its_source_are_installed_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("train") == f"pip install -e '{ROOT}[train]'"


@pytest.mark.parametrize("has_metadata", [True, False])
def test_a_name_that_a_newer_version_no_longer_has_is_said(
    has_metadata: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version("torch") if has_metadata else "without a version"
    if not has_metadata:

        def missing(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.delattr("torch.distributed.checkpoint.state_dict_saver._save_state_dict")
    monkeypatch.delitem(sys.modules, "taut.train.sharded", raising=False)
    monkeypatch.setattr("taut.cli.named", lambda _: import_module("taut.train.sharded"))
    assert main(["show", "model=DIR"]) == 2
    said = capsys.readouterr().err
    assert f"taut: error: torch {version} lacks a name" in said
    assert "_save_state_dict" in said
    assert said.endswith(f"run: pip install 'torch=={NEWEST['torch']}.*'\n")


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "trackio"])
def test_a_report_is_refused_before_the_run(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taut.io.extras.find_spec", lambda _: None)
    value = True if key == "tensorboard" else "project"
    with pytest.raises(ConfigError, match=rf"^log\.{key}\S* needs {key}, .*\[{key}\]"):
        from_mapping(LogConfig, {key: value})
    assert from_mapping(LogConfig, {}) == LogConfig()


def test_what_is_installed_is_not_asked_for() -> None:
    require("train", "this test")
