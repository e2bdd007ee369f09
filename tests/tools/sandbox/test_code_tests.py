"""Tests that are code: collected and called as pytest and unittest would, never passed without an assertion."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest

from taut.errors import DataError, SandboxError
from taut.rewards.verifier import RewardInput
from taut_tools.sandbox.code import Code
from taut_tools.sandbox.limits import Limits
from taut_tools.sandbox.python_tests import as_trial
from taut_tools.sandbox.shared import close_shared, shared

RIGHT = (
    "def add(a, b):\n    if a is None:\n        raise ValueError('none of it')\n    return a + b\n"
)
WRONG = "def add(a, b):\n    return 0\n"
EXITS = "import sys\ndef add(a, b):\n    sys.exit(0)\n"


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    try:
        shared()
    except SandboxError:
        pytest.skip("no mechanism holds programs here; test_probe.py has the refusal")
    yield
    close_shared()


def value_of(program: str, **row: Any) -> float | None:
    reward = Code(limits=Limits(wall_seconds=10.0, memory_mb=512))
    return reward(RewardInput(text=f"```python\n{dedent(program)}\n```", row=row))


CALLED = {
    "pytest function": """
        def test_add():
            assert add(2, 3) == 5
    """,
    "several functions, the last of which fails": """
        def test_zero(): assert add(0, 0) == 0
        def test_five(): assert add(2, 3) == 5
    """,
    "async function": """
        async def test_add():
            assert add(2, 3) == 5
    """,
    "parametrize": """
        import pytest
        @pytest.mark.parametrize("a, b, expected", [(0, 0, 0), pytest.param(2, 3, 5, id="five")])
        def test_add(a, b, expected):
            assert add(a, b) == expected
    """,
    "parametrize twice, one name each": """
        import pytest
        @pytest.mark.parametrize("a", [2, 3])
        @pytest.mark.parametrize("b", [4, 5])
        def test_add(a, b):
            assert add(a, b) == a + b
    """,
    "pytest class with setup": """
        class TestAdd:
            @classmethod
            def setup_class(cls): cls.two = 2
            def setup_method(self, method): self.three = 3
            def test_add(self):
                assert add(self.two, self.three) == 5
    """,
    "parametrized class": """
        import pytest
        @pytest.mark.parametrize("a", [2, 3])
        class TestAdd:
            def test_add(self, a):
                assert add(a, 1) == a + 1
    """,
    "nested and inherited classes": """
        class Shared:
            def test_shared(self): assert add(2, 3) == 5
        class TestOuter:
            class TestInner(Shared):
                pass
    """,
    "module setup": """
        def setup_module(module): module.five = 5
        def test_add(): assert add(2, 3) == five
    """,
    "raises and approx": """
        import pytest
        from pytest import approx, raises
        def test_add():
            with raises(ValueError, match="none") as caught:
                add(None, 1)
            assert "none of it" in str(caught.value)
            pytest.raises(ValueError, add, None, 2)
            assert add(0.1, 0.2) == approx(0.3)
            assert [add(0.1, 0.2), 1] == pytest.approx([0.3, 1.0], abs=1e-3)
            assert {"x": add(0.1, 0.2)} == approx({"x": 0.3}, rel=1e-3)
    """,
    "a skipped test beside one that is not": """
        import pytest
        @pytest.mark.skip(reason="later")
        def test_later(): assert add(0, 0) == 17
        @pytest.mark.skipif(True, reason="never")
        def test_never(): assert add(0, 0) == 17
        @pytest.mark.xfail
        def test_wrong(): assert add(0, 0) == 17
        @pytest.mark.slow
        def test_add(): assert add(2, 3) == 5
    """,
    "unittest class": """
        import unittest
        class T(unittest.TestCase):
            def setUp(self): self.five = 5
            def test_a(self): self.assertEqual(add(2, 3), self.five)
        if __name__ == "__main__":
            unittest.main()
    """,
    "unittest, other assertions": """
        from unittest import TestCase, main, skip
        class T(TestCase):
            @skip("later")
            def test_later(self): self.fail()
            def test_raises(self):
                with self.assertRaises(ValueError):
                    add(None, 1)
            def test_sub(self):
                for a in range(3):
                    with self.subTest(a=a):
                        self.assertTrue(add(a, 1) == a + 1)
        main(argv=[""], exit=False)
    """,
    "unittest, async": """
        import unittest
        class T(unittest.IsolatedAsyncioTestCase):
            async def test_a(self): self.assertEqual(add(2, 3), 5)
    """,
    "unittest with a mock": """
        from unittest.mock import patch
        import unittest
        class T(unittest.TestCase):
            @patch("builtins.print")
            def test_a(self, printed):
                print(add(2, 3))
                printed.assert_called_once_with(5)
    """,
    "KodCode": """
        from solution import add
        def test_add():
            assert add(2, 3) == 5
    """,
    "a module by another name, imported where it is used": """
        def test_add():
            import your_module as m
            assert m.add(2, 3) == 5
    """,
    "asserts of a main program": """
        if __name__ == "__main__":
            assert add(2, 3) == 5
    """,
    "a helper that the script calls": """
        def same(a, b):
            assert a == b
        for a in range(3):
            same(add(a, 1), a + 1)
    """,
    "if and raise": """
        def test_add():
            if add(2, 3) != 5:
                raise Exception("wrong")
    """,
    "an exception that has to come": """
        def test_add():
            try:
                add(None, 3)
                assert False, "expected ValueError"
            except ValueError:
                pass
    """,
    "an assert on one line with others; strings, accents and a tab": """
        def test_add():
        \té = "äöü"; x = 1; assert (add(2,
                3) ==
            5), f"{é} {x == 1!r} { {'assert': é}['assert'] }"
    """,
    "check without a parameter": """
        def check():
            assert add(2, 3) == 5
    """,
}


@pytest.mark.parametrize("form", CALLED)
def test_tests_are_called(form: str) -> None:
    test = dedent(CALLED[form])
    assert value_of(RIGHT, test=test) == 1
    assert value_of(WRONG, test=test) == 0
    assert value_of(EXITS, test=test) == 0
    assert value_of("", test=test) == 0


FAULTY = {
    "nothing at all": ("x = 1\n", "asserts nothing"),
    "helpers only": ("def same(a, b):\n    return a == b\n", "asserts nothing"),
    "an assert in a helper that is not called": (
        "def same(a, b):\n    assert a == b\n",
        "no assertion",
    ),
    "check without an entry point": ("def check(f):\n    assert f(2, 3) == 5\n", "no assertion"),
    "a smoke test": ("def test_add():\n    print(add(2, 3))\n", "asserts nothing"),
    "a value in place of an assert": (
        "def test_add():\n    return add(2, 3) == 5\n",
        "asserts nothing",
    ),
    "an assert that is never reached": ("if False:\n    assert add(2, 3) == 5\n", "no assertion"),
    "a generator": ("def test_add():\n    assert add(2, 3) == 5\n    yield\n", "no assertion"),
    "a function in a function": (
        "def outer():\n    def test_add():\n        assert add(2, 3) == 5\n",
        "no assertion",
    ),
    "a call that leaves before its assert": (
        "def check(f):\n    if callable(f): return\n    assert f(2, 3) == 5\ncheck(add)\n",
        "no assertion",
    ),
    "a call of a generator": (
        "def check(f):\n    assert f(2, 3) == 5\n    yield\ncheck(add)\n",
        "no assertion",
    ),
    "a class with a constructor": (
        "class TestAdd:\n    def __init__(self): pass\n    def test_add(self): assert add(2, 3) == 5\n",
        "no assertion",
    ),
    "a skipped test": (
        "import pytest\n@pytest.mark.skip\ndef test_add(): assert add(2, 3) == 5\n",
        "no assertion",
    ),
    "a test that skips": (
        "import pytest\ndef test_add():\n    pytest.skip('later')\n    assert add(2, 3) == 5\n",
        "no assertion",
    ),
    "a skipped TestCase": (
        "import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n"
        "    def test_a(self): self.assertEqual(add(2, 3), 5)\n",
        "no assertion",
    ),
    "no parameters": (
        "import pytest\n@pytest.mark.parametrize('a', [])\ndef test_a(a): assert add(a, 0) == a\n",
        "no assertion",
    ),
    "no Python": ("assert add(2, 3) = 5", "is no Python"),
    "JavaScript": ("test('adds', () => { expect(add(2, 3)).toBe(5); });", "is no Python"),
    "a fixture": ("def test_add(capsys):\n    assert add(2, 3) == 5\n", "argument capsys"),
    "a fixture of its own": (
        "import pytest\n@pytest.fixture\ndef five(): return 5\ndef test_a(five): assert add(2, 3) == five\n",
        "pytest.fixture is not known",
    ),
    "a library that is not there": (
        "import no_such_library as lib\nassert add(2, 3) == lib.five\n",
        "No module named 'no_such_library'",
    ),
    "a library that is not there, in a test": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        import no_such_library\n        self.assertEqual(add(2, 3), 5)\n",
        "No module named 'no_such_library'",
    ),
    "a relative import": ("from .solution import add\nassert add(2, 3) == 5\n", "relative import"),
}


@pytest.mark.parametrize("what", FAULTY)
def test_tests_that_cannot_judge_are_an_error_of_the_row(what: str) -> None:
    test, reason = FAULTY[what]
    for program in (RIGHT, WRONG):
        with pytest.raises(DataError, match=reason):
            value_of(program, test=test)


def test_one_of_several_tests_that_asserts_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="column test_list that asserts nothing"):
        value_of(RIGHT, test_list=["assert add(2, 3) == 5", "add(2, 3) == 5"])


def test_text_keeps_its_lines_and_what_does_not_assert() -> None:
    text = 'def f(x):\r\n    if x: assert x, f"{g(1)!r}"\n    return "assert é"; \n'
    check = as_trial(text, "the column test").check
    assert check.endswith(text.replace("if x: assert", "if x: __asserts__(); assert"))


CHEATS = {
    "exit at import": "import sys\nsys.exit(0)",
    "os._exit where it is called": "import os\ndef add(a, b): os._exit(0)",
    "SystemExit where it is called": "def add(a, b): raise SystemExit",
    "SkipTest where it is called": "def add(a, b):\n    import unittest\n    raise unittest.SkipTest('x')",
    "SkipTest by its name": "class SkipTest(Exception): pass\ndef add(a, b): raise SkipTest",
    "pytest.skip where it is called": "def add(a, b):\n    import pytest\n    pytest.skip('x')",
    "equal to everything": """
        class Any:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        def add(a, b): return Any()
    """,
    "equal to everything, and a number": """
        class Any(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def add(a, b): return Any()
    """,
    "unittest's assertions": """
        import unittest
        unittest.TestCase.assertEqual = lambda *_: None
        unittest.TestCase.run = lambda *_: None
        unittest.TestSuite.run = lambda *_: None
        def add(a, b): return 0
    """,
    "unittest itself": """
        import sys, types
        fake = types.ModuleType("unittest")
        fake.TestCase = type("TestCase", (), {"assertEqual": lambda *_: None})
        sys.modules["unittest"] = sys.modules["pytest"] = fake
        def add(a, b): return 0
    """,
    "the names of tests": "def test_add(): pass\nclass T: pass\ndef check(f): pass\ndef add(a, b): return 0",
    "exec and compile": """
        import builtins
        builtins.exec = lambda *_: None
        builtins.compile = lambda *_: None
        def add(a, b): return 0
    """,
    "AssertionError": """
        import builtins
        builtins.AssertionError = type("AssertionError", (Exception,), {})
        def add(a, b): return 0
    """,
    "json": "import json\njson.loads = lambda *_: []\njson.dumps = lambda *_: '1'\ndef add(a, b): return 0",
}
ATTACKED = {
    "a script": {"test_list": ["assert add(2, 3) == 5"]},
    "pytest": {"test": "import pytest\ndef test_add():\n    assert add(2, 3) == 5\n"},
    "unittest": {"test": CALLED["unittest class"]},
    "HumanEval": {"test": "def check(f):\n    assert f(2, 3) == 5\n", "entry_point": "add"},
}


@pytest.mark.parametrize("attacked", ATTACKED)
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_does_not_pass_by_what_it_does_to_the_tests(cheat: str, attacked: str) -> None:
    row = {key: dedent(it) if isinstance(it, str) else it for key, it in ATTACKED[attacked].items()}
    assert value_of(CHEATS[cheat], **row) == 0
