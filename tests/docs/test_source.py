"""House rules that no tool checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

import taut
from taut.config import describe
from taut.methods.method import RunConfig

SOURCE = ROOT / "src" / "taut"
FILES = sorted(SOURCE.rglob("*.py"))

DISTRIBUTED = (
    "cluster/ray_cluster.py",
    "train/distributed.py",
    "train/sharded.py",
    "train/watch.py",
    "inference",
    "models/lora/adapter_start.py",
    "models/quantized/quantized_storage.py",
    "models/tensor_parallel.py",
)
"""Where torch.distributed may be imported."""

TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".json", ""}


@cache
def trees() -> Mapping[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_module_says_what_it_is() -> None:
    silent = [path for path, tree in trees().items() if not ast.get_docstring(tree)]
    empty = [path for path in silent if path.name == "__init__.py" and not trees()[path].body]
    assert [name_of(path) for path in silent if path not in empty] == []


def test_losses_import_types_errors_keys_and_torch_only() -> None:
    allowed = {"torch", "pydantic", *sys.stdlib_module_names}
    ours = ("taut.types", "taut.errors", "taut.config", "taut.conflicts", "taut.losses")
    for path, tree in trees().items():
        if path.parent.name == "losses":
            others = [
                name
                for name in imports(tree)
                if name.split(".")[0] not in allowed and not name.startswith(ours)
            ]
            assert others == [], path.name


def test_torch_distributed_stays_where_it_belongs() -> None:
    found = {
        name_of(path)
        for path, tree in trees().items()
        if any(name.startswith("torch.distributed") for name in imports(tree))
    }
    assert {name for name in found if not name.startswith(DISTRIBUTED)} == set()


def test_no_submodule_hides_a_public_name() -> None:
    """Importing ``taut.x`` sets the attribute ``x`` of taut: a module of that name would replace the function. Two
    rooms have public names: ``taut.data.stats`` is in one, and the other is called.
    """
    children = {path.stem for path in SOURCE.glob("*.py")} | {
        path.name for path in SOURCE.iterdir() if path.is_dir()
    }
    assert children & set(taut.__all__) == {"data", "plan"}
    import_module("taut.plan.memory")
    assert callable(taut.plan)
    assert taut.plan.memory is import_module("taut.plan.memory")


def name_in(node: ast.AST) -> str:
    """The last name of an expression: ``trainer`` of ``trainer``, ``self.trainer`` and ``built.trainer``."""
    name: str = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name


def is_trainer(node: ast.AST) -> bool:
    """Whether an expression is a trainer, by its name."""
    return name_in(node) == "trainer"


def assigned_to_a_trainer(tree: ast.AST) -> Iterator[str]:
    """The attributes of a trainer that a file assigns, deletes or sets by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner: ast.AST = node.value
        elif isinstance(node, ast.Call) and name_in(node.func).endswith("setattr"):
            owner = node.args[0]
        else:
            continue
        if is_trainer(owner):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_only_the_loop_assigns_to_a_trainer() -> None:
    loop = SOURCE / "train" / "trainer.py"
    found = {path: list(assigned_to_a_trainer(tree)) for path, tree in trees().items()}
    assert found.pop(loop), "the loop advances it"
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "trainer.monitors = []",
        "built.trainer.done, x = 1, 2",
        "self.trainer.loss += 1",
        "with watch() as trainer.interrupts: pass",
        "setattr(trainer, 'emit', print)",
    ],
)
def test_an_assignment_to_a_trainer_is_seen(text: str) -> None:
    assert list(assigned_to_a_trainer(ast.parse(text)))


def reads(tree: ast.AST) -> Iterator[str]:
    """The attributes a file reads, outside the validation of configurations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        yield from reads(node)


def test_every_configuration_key_is_read_somewhere() -> None:
    read = {name for tree in trees().values() for name in reads(tree)}
    keys = [row.key for row in describe(RunConfig)]
    assert [key for key in keys if key.rpartition(".")[2] not in read] == []


def test_every_configuration_key_is_documented() -> None:
    rows = describe(RunConfig)
    assert [row.key for row in rows if len(row.doc) < 10] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.:/])/(?:tmp|work|root|home)/\w")
    files = [ROOT / name for name in listed.stdout.splitlines()]
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file()
        and path.suffix in TEXT
        and pattern.search(path.read_text(errors="replace"))
    ]
    assert found == []
