"""Objects that are given from Python: the text that stands for one, what it depends on, and how it is sent."""

from __future__ import annotations

import pickle
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from taut.errors import ConfigError
from taut.io import user_code
from taut.io.user_code import GIVEN, UserCode, name_object, named_files, read_user_code

LIMIT = 3


def helper(text: str) -> int:
    return LIMIT * len(text)


def read(spec: str) -> UserCode:
    path = user_code.files.home_path(spec.rpartition(":")[0])
    return read_user_code(spec, path, "the reward", "function")


def module(tmp_path: Path, source: str, name: str = "given_module") -> ModuleType:
    """A module in a file, as ``import`` would make it."""
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    made = ModuleType(name)
    made.__file__ = str(path)
    sys.modules[name] = made
    exec(compile(source, str(path), "exec"), vars(made))
    return made


def digest(source: str, name: str = "f") -> str:
    """The text that stands for what a source, which is in no file, calls ``name``."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(source, space)
    return name_object(space[name])


def test_a_function_of_a_file_is_named_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module(tmp_path, "def short(text):\n    return -len(text)\n")
    assert name_object(made.short) == f"{tmp_path}/given_module.py:short"
    monkeypatch.chdir(tmp_path)
    spec = name_object(made.short)
    assert spec == "given_module.py:short"
    assert named_files([spec, "python-0.py:f", "math"]) == [Path("given_module.py")]
    code = read(spec)
    assert code.load() is made.short
    assert code.portable() is code
    # as a worker has it, which was given nothing
    monkeypatch.setattr(user_code, "_given", {})
    sent = pickle.loads(pickle.dumps(code)).load()
    assert sent is not made.short
    assert sent("abc") == -3


def test_a_file_that_changed_since_is_the_file(tmp_path: Path) -> None:
    made = module(tmp_path, "def f(text):\n    return 1\n")
    spec = name_object(made.f)
    (tmp_path / "given_module.py").write_text("def f(text):\n    return 2\n")
    assert read(spec).load()("") == 2


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from .x import y\n", "f"),
        ("f_ = None\n", "f_"),
        ("g = f\ndel f\n", "g"),
    ],
    ids=["of a package", "another name", "renamed"],
)
def test_what_a_file_does_not_have_by_its_name_is_given_itself(
    tmp_path: Path, source: str, name: str
) -> None:
    body = "def f(text):\n    return 1\n"
    made = module(tmp_path, body)
    f = made.f
    (tmp_path / "given_module.py").write_text(body + source)
    if name == "g":
        del made.f
    elif name == "f_":
        f = partial(f)
    spec = name_object(f)
    assert spec.startswith(GIVEN)
    assert read(spec).load() is f


def test_the_text_is_that_of_source_and_values() -> None:
    one = "def f(text, n={n}):\n    return {body}\n"
    same = digest(one.format(n=1, body="n"))
    assert digest("import os\n" + one.format(n=1, body="n")) == same
    assert digest(one.format(n=2, body="n")) != same
    assert digest(one.format(n=1, body="n + 1")) != same
    # what it closes over, and what it reads of its module
    closure = "def make(k):\n    def f(text):\n        return k\n    return f\nf = make({k})\n"
    assert digest(closure.format(k=1)) == digest(closure.format(k=1))
    assert digest(closure.format(k=1)) != digest(closure.format(k=2))
    reads = "K = {k}\ndef g(text):\n    return K\ndef f(text):\n    return g(text)\n"
    assert digest(reads.format(k=1)) == digest(reads.format(k=1))
    assert digest(reads.format(k=1)) != digest(reads.format(k=2))
    # objects by class and attributes, and sets in any order
    objects = "class C:\n    def __init__(self, k): self.k = k\n    def __call__(self, text): {body}\nf = C({k})\n"
    same = digest(objects.format(k="{'a', 'b'}", body="pass"))
    assert same == digest(objects.format(k="{'b', 'a'}", body="pass"))
    assert same != digest(objects.format(k="{'a'}", body="pass"))
    assert same != digest(objects.format(k="{'a', 'b'}", body="return 1"))
    classes = "class f:\n    k = {k}\n"
    assert digest(classes.format(k=1)) != digest(classes.format(k=2))
    assert digest("from functools import partial\nf = partial(max, 1)\n") != digest(
        "from functools import partial\nf = partial(max, 2)\n"
    )


def test_a_lambda_does_not_depend_on_its_line() -> None:
    assert digest("f = lambda text: len(text)") == digest("steps = 3; f = lambda text: len(text)")
    assert digest("f = lambda text: len(text)") != digest("f = lambda text: 1 + len(text)")
    spec = name_object(lambda text: helper(text))
    assert spec.endswith(".py:lambda")


def test_an_object_is_sent_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 2
    spec = name_object(lambda text: scale * helper(text))
    code = read(spec)
    sent = pickle.dumps(code.portable())
    assert code.pickled is None
    monkeypatch.setattr(user_code, "_given", {})
    assert pickle.loads(sent).load()("ab") == 12


def test_what_cannot_be_sent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locked(text: str) -> float:
        with lock:
            return 1.0

    code = read(name_object(locked))
    assert code.load() is locked
    with pytest.raises(ConfigError, match=r"'_thread\.lock'.*name FILE\.py:locked"):
        code.portable()
    monkeypatch.setattr(user_code, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match=r"it has 0 MiB; expected one"):
        read(name_object(lambda text: helper(text))).portable()


def test_a_process_that_was_given_none_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"given from Python.*resume from Python.*FILE\.py:f"):
        read("python-0123456789abcdef.py:f")


def test_a_file_that_fails_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("x = 1\nraise ValueError('no')\n")
    with pytest.raises(ConfigError, match=r"ValueError: no \(own\.py:2\); expected Python"):
        read(f"{path}:f").load()
