"""The code reward on rows as the common data sets have them, and on programs that fail."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fake_executors import serving

from taut.errors import ConfigError, DataError, SandboxError
from taut.rewards.length import LengthCosine
from taut.rewards.registry import verifier_of
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import GradingConfig, RewardSpec
from taut.rewards.verifier import Explained, RewardInput
from taut.rewards.worker import judged
from taut.rl.settings import Remote
from taut_tools.sandbox import kernel, launch
from taut_tools.sandbox.code import Code, last_program, read_cases
from taut_tools.sandbox.compiled import Compilation, compile_source
from taut_tools.sandbox.limits import Limits
from taut_tools.sandbox.shared import close_shared, shared

ADD = "a, b = map(int, input().split())\nprint(a + b)"
FUNCTION = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"
LIMITS = Limits(wall_seconds=5.0, memory_mb=256)


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    try:
        shared()
    except SandboxError:
        pytest.skip("no mechanism holds programs here; test_probe.py has the refusal")
    yield
    close_shared()


def value_of(program: str, row: dict[str, Any], **options: Any) -> float | None:
    text = f"Here it is:\n```python\n{program}\n```\nIt adds."
    return Code(limits=LIMITS, **options)(RewardInput(text=text, row=row))


APPS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
LIVE = [{"input": "1 2", "output": "3", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
HUMAN = {
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
}


@pytest.mark.parametrize(
    ("program", "row"),
    [
        (ADD, {"tests": APPS}),
        (ADD, {"input_output": json.dumps(APPS)}),
        (ADD, {"tests": {"inputs": [["1 2"]], "outputs": [["3"]]}}),
        (ADD, {"public_test_cases": json.dumps(LIVE)}),
        (
            METHOD,
            {"public_test_cases": FUNCTIONAL, "metadata": json.dumps({"func_name": "add"})},
        ),
        (FUNCTION, {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}}),
        (METHOD, {"tests": {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}}),
        (FUNCTION, {"test_list": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}),
        (
            FUNCTION,
            {"test_list": ["assert add(0, pi) == pi"], "test_imports": ["from math import pi"]},
        ),
        (FUNCTION, HUMAN),
        ("    return a + b", HUMAN),
    ],
)
def test_the_forms_of_common_data_sets(program: str, row: dict[str, Any]) -> None:
    assert value_of(program, row) == 1
    wrong = program.replace("a + b", "a - b")
    assert value_of(wrong, row) == 0


@pytest.mark.parametrize(
    "program",
    [
        "",
        "1 +",
        "def other(): pass",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    while True: pass",
        "def add(a, b):\n    return bytearray(2**40)",
        "def add(a, b):\n    return {1, 2}",
        "def add(a, b):\n    return [[]] * 3 + [add]",
        "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    ],
)
def test_whatever_a_program_does_is_a_zero_and_no_error(program: str) -> None:
    row = {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}}
    reward = Code(limits=Limits(wall_seconds=0.5, memory_mb=256))
    answered = RewardInput(text=f"```\n{program}\n```", row=row)
    assert reward(answered) == 0
    found = reward.judge(answered)
    assert found is not None
    assert found[0] != ""


def test_the_first_test_that_fails_is_told() -> None:
    row = {"tests": {"inputs": [[1, 2], [2, 2], [3, 0]], "outputs": [3, 4, 9], "fn_name": "add"}}
    found = value_of("def add(a, b):\n    return a + b", row, score="share")
    assert isinstance(found, Explained) and found == 2 / 3
    assert found.reply == "test 3 of 3: returned 3, expected 9"
    raising = value_of("def add(a, b):\n    return {}[a]", row)
    assert isinstance(raising, Explained) and "test 1 of 3: " in raising.reply
    assert "KeyError: 1" in raising.reply


def test_a_row_whose_list_of_tests_is_empty_has_none() -> None:
    assert value_of("print(1)", {"tests": {"inputs": [], "outputs": []}}) is None


def test_an_output_that_looks_like_json_may_be_the_text_itself() -> None:
    def row(*outputs: str) -> dict[str, Any]:
        return {"tests": {"inputs": [[1]] * len(outputs), "outputs": outputs, "fn_name": "f"}}

    assert value_of("def f(x):\n    return '[()]'", row("[()]")) == 1
    assert value_of("def f(x):\n    return '[1, 2]'", row("[1, 2]")) == 1
    assert value_of("def f(x):\n    return [1, 2]", row("[1, 2]")) == 1
    assert value_of("def f(x):\n    return '[1,2]'", row("[1, 2]", "[()]")) == 0
    live = {"input": '"a\u2028b"', "output": '"a"', "testtype": "functional"}
    (case,) = read_cases({"tests": [live], "metadata": {"func_name": "f"}}, None).cases  # type: ignore[union-attr]
    assert json.loads(case.trial.arguments) == ["a\u2028b"]


def test_the_mechanism_is_chosen_once_and_told_to_those_who_judge() -> None:
    cosine = RewardSpec(name="length_cosine", options={"max_tokens": 9, "judge": "code"})
    with open_rewards(["code", cosine], GradingConfig(workers=1)) as reward_set:
        chosen = shared().mechanism
        assert reward_set.decisions == [("sandbox", chosen.name, chosen.reason)]
        alone, judging = (part.verifier for part in reward_set.parts)
        (reward_result,) = reward_set.grade(
            [RewardInput(text=f"```\n{ADD}\n```", row={"tests": APPS}, num_tokens=0)]
        )
    assert isinstance(alone, Code) and isinstance(judging, LengthCosine)
    assert alone.mechanism == judging.judge_options["mechanism"] == chosen.name
    assert reward_result.total == 1 + 2


def test_an_integer_that_no_float_can_hold_is_wrong() -> None:
    row = {"tests": {"inputs": [[1, 2]], "outputs": [1.5], "fn_name": "add"}}
    assert value_of("def add(a, b):\n    return 10**400", row) == 0


def test_a_share_or_all() -> None:
    row = {"test_list": ["assert add(1, 2) == 3", "assert add(1, 1) == 0", "assert add(0, 0) == 0"]}
    assert value_of(FUNCTION, row) == 0
    assert value_of(FUNCTION, row, score="share") == pytest.approx(2 / 3)
    assert value_of(FUNCTION, row, max_tests=1) == 1


def test_how_output_is_compared() -> None:
    def compared(printed: str, expected: str, how: str) -> float | None:
        row = {"tests": {"inputs": [""], "outputs": [expected]}}
        return value_of(f"print({printed!r})", row, compare=how)

    assert compared("1  2 \n3\n\n", "1 2\n3", "tokens") == 1
    assert compared("1  2", "1 2", "lines") == 0
    assert compared("1 2  \n3\n", "1 2\n3\n\n", "lines") == 1
    assert compared("0.3333333", "0.33333333333", "tokens") == 1
    assert compared("0.333", "0.33333333333", "tokens") == 0
    assert compared("0.3333333", "0.33333333333", "lines") == 0
    assert compared("1000000000001", "1000000000002", "tokens") == 0
    assert compared("nan", "1.5", "tokens") == 0
    assert compared("x.y", "x.z", "tokens") == 0
    assert compared("1", "1 2", "tokens") == 0


def test_the_program_is_the_last_closed_block_of_python() -> None:
    last = partial(last_program, allowed=["python"])
    assert last("```python\n1\n```\n```py\n2\n```\n```output\n3\n```") == ("python", "2\n")
    assert last("```\n1\n```\nand ```python\n2") == ("python", "1\n")
    assert last("```python\n1") is None
    assert last("1") is None
    row = {"tests": APPS}
    assert Code()(RewardInput(text=ADD, row=row)) == 0
    assert Code(program="text")(RewardInput(text=ADD, row=row)) == 1
    assert Code()(RewardInput(text=Code().dress(ADD), row=row)) == 1
    assert Code(program="text").dress(ADD) == ADD
    assert value_of("print(len(List))", row, before="List = [1, 2, 3]", max_tests=1) == 1


OUTPUT = "It prints:\n```\n5\n```\n"
USAGE = "Usage:\n```python\nresult = add(2, 3)\nprint(result)\n```\n"
ASSERTED = {"test_list": ["result = add(1, 2)\nassert result == 3"]}
CALLED = {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}}


def fenced(program: str, fence: str = "```", mark: str = "python", indent: str = "") -> str:
    lines = [f"{fence}{mark}", *program.splitlines(), fence]
    return "".join(f"{indent}{line}\n" for line in lines)


@pytest.mark.parametrize(
    "shape",
    [
        "{}",
        "{}" + OUTPUT,
        OUTPUT + "{}",
        "{}" + OUTPUT.replace("```\n5", "```text\n5"),
        "{}```bash\npython solution.py\n```\n",
        "```````markdown\n{}```````\n",
        "First ~~~ and ``` in a line, and ```print(0)``` alone:\n```print(0)```\n{}",
    ],
)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"mark": ""},
        {"mark": "Python3.11"},
        {"mark": " {.python}"},
        {"mark": 'python title="a.py"'},
        {"fence": "`````"},
        {"fence": "~~~"},
        {"fence": "~~~~", "indent": "  "},
        {"indent": "   "},
        {"indent": "\t"},
    ],
)
def test_the_program_in_whatever_fence_and_beside_other_blocks(
    shape: str, how: dict[str, str]
) -> None:
    for program, words in ((ADD, ()), (FUNCTION, {"add"}), (METHOD, {"add"})):
        text = "1. Like this:\n" + shape.format(fenced(program, **how))
        found = last_program(text, ["python"], words)
        assert found is not None
        assert found[1].strip() == program, text


@pytest.mark.parametrize(
    ("blocks_", "words", "chosen"),
    [
        (("def add(a, b): return a + b", "print(add(2, 3))"), {"add"}, 0),
        (("def add(a, b): return 0", "def add(a, b): return a + b", "add(1, 2)"), {"add"}, 1),
        (("add = lambda a, b: a + b", "result = add(1, 2)"), {"add", "result"}, 0),
        (("class Solution:\n    def add(self): pass", "Solution().add()"), {"add"}, 0),
        (("async def add(): pass", "import asyncio\nasyncio.run(add())"), {"add"}, 0),
        (("    return a + b", "print(1)"), {"add"}, 1),  # none defines it: the last
        (("print(int(input()) + 1)", "solve = 3", "x = input()"), (), 0),
        (("import sys\nprint(sys.stdin.read())", "print(5)"), (), 0),
        (("print(input())", "print(input()[::-1])"), (), 1),
        (("print(1)", "print(2)"), (), 1),
    ],
)
def test_the_program_is_the_last_block_that_can_be(
    blocks_: tuple[str, ...], words: Any, chosen: int
) -> None:
    for marks in (["python"] * 3, ["", "", ""]):
        text = "".join(fenced(code, mark=mark) for code, mark in zip(blocks_, marks, strict=False))
        assert last_program(text, ["python"], words) == ("python", f"{blocks_[chosen]}\n")


def test_a_usage_block_is_not_the_program_of_any_form_of_tests() -> None:
    text = fenced(FUNCTION) + USAGE
    pytest_row = {
        "test": "from solution import add\ndef test_add():\n    result = add(1, 2)\n    assert result == 3\n"
    }
    for row in (CALLED, ASSERTED, HUMAN, pytest_row):
        assert Code(limits=LIMITS)(RewardInput(text=text, row=row)) == 1
    script = fenced(ADD) + "For example:\n" + fenced("print(2 + 3)")
    assert Code(limits=LIMITS)(RewardInput(text=script, row={"tests": APPS})) == 1


STDIN = {"input": "1 2\n", "output": "3\n"}
CALL = {"fn_name": "add", "input": [1, 2], "output": 3}
WORDS = "def add(a, b):\n    return f'{a + b}'"


@pytest.mark.parametrize(
    ("program", "row"),
    [
        (ADD, {"tests": [{"type": "stdin_stdout", "fn_name": None, **STDIN}]}),
        (ADD, {"tests": json.dumps([{"type": "stdin_stdout", **STDIN}])}),
        (ADD, {"tests": [json.dumps({"type": "stdin_stdout", **STDIN})]}),
        (ADD, {"tests": str([{"type": "stdin_stdout", "fn_name": None, **STDIN}])}),
        (ADD, {"tests": {"input": ["1 2"], "output": ["3"]}}),
        (ADD, {"tests": {"input": "1 2", "output": "3"}}),
        (ADD, {"verification_info": {"language": "python", "test_cases": [STDIN]}}),
        (ADD, {"verification_info": {"language": None, "test_cases": json.dumps([STDIN])}}),
        (ADD, {"verification_info": json.dumps({"language": "python", "test_cases": [STDIN]})}),
        (FUNCTION, {"verification_info": {"test_cases": [{"type": "function_call", **CALL}]}}),
        (FUNCTION, {"tests": [{"type": "function_call", **CALL}]}),
        (METHOD, {"tests": [{"type": "function_call", **CALL, "output": [3]}]}),
        (FUNCTION, {"tests": [CALL]}),
        (FUNCTION, {"tests": json.dumps([{"type": "function_call", **CALL}])}),
        (FUNCTION, {"tests": [{**CALL, "input": "[1, 2]", "output": "3"}]}),
        (FUNCTION, {"tests": [{**CALL, "input": "1\n2", "output": "3"}]}),
        (FUNCTION, {"tests": [{**CALL, "input": "['a', 'b']", "output": "'ab'"}]}),
        (FUNCTION, {"tests": [{**CALL, "input": "[(1, 2), (3,)]", "output": "[1, 2, 3]"}]}),
        (WORDS, {"tests": [{**CALL, "output": "3"}]}),
        (FUNCTION, {"tests": [{**CALL, "input": [[1], [2]], "output": "[1, 2]"}]}),
        (FUNCTION, {"tests": {"type": "function_call", "fn_name": "add", "input": [[1, 2]], "output": [[3]]}}),
        (FUNCTION, {"tests": {"inputs": [""], "outputs": [None], "assert_case": ["assert add(1, 2) == 3"]}}),
        (FUNCTION, {"tests": {"assert_case": "assert add(1, 2) == 3"}}),
        (FUNCTION, {"assert_case": ["assert add(1, 2) == 3"]}),
        (FUNCTION, {"tests": [{"assert_case": "assert add(1, 2) == 3"}]}),
        (FUNCTION, {"test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"}),
        (FUNCTION, {"test_code": "import solution\ndef test_add():\n    assert solution.add(1, 2) == 3\n"}),
        (METHOD, {
            "input_output": [{"input": "a = 1, b = 2", "output": "3"}],
            "entry_point": "Solution().add",
            "test": HUMAN["test"],
        }),
        (FUNCTION, {"prompt": HUMAN["prompt"], "test": HUMAN["test"]}),
        (FUNCTION, {**HUMAN, "prompt": "Write this:\n```python\ndef add(a, b):\n    pass\n```"}),
        ("    return a + b", {**HUMAN, "prompt": "def add(a, b):"}),
        (FUNCTION, {"prompt": [{"content": "Add."}], "test": "def check():\n    assert add(1, 2) == 3"}),
        (FUNCTION, {"entry_point": "add", "test": "def test_add():\n    assert add(1, 2) == 3"}),
        (FUNCTION, {"test_list": ["assert add(1, 2) == 3"], "test_imports": None, "test_setup_code": None}),
    ],
)  # fmt: skip
def test_the_forms_of_other_data_sets(program: str, row: dict[str, Any]) -> None:
    assert value_of(program, row) == 1
    wrong = program.replace("a + b", "[a, b]")
    assert value_of(wrong, row) == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": [{"type": "special_judge", **STDIN}]}, "a test of type 'special_judge'"),
        (
            {"tests": [{"type": "function_call", "input": [1], "output": 1}]},
            "cannot be read .*metadata",
        ),
        ({"tests": [{"type": "function_call", **CALL, "input": 5}]}, "arguments of add are 5"),
        ({"tests": [{"type": "function_call", **CALL, "input": "a b"}]}, "cannot be read"),
        ({"tests": {"cases": [1]}}, "expected inputs and as many outputs"),
        ({"tests": [[1, 2]]}, "cannot be read"),
        ({"tests": 5}, "cannot be read"),
        ({"tests": ["add(1, 2) -> 3"]}, "no Python"),
        (
            {"verification_info": {"language": "javascript", "test_cases": [STDIN]}},
            "found 'javascript' in",
        ),
        (
            {"verification_info": {"language": "python", "test_cases": [{"input": "1"}]}},
            "cannot be read",
        ),
    ],
)
def test_an_unknown_form_is_an_error_of_the_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        value_of(FUNCTION, row)


def test_rows_without_tests_and_with_tests_nobody_can_read() -> None:
    assert value_of(ADD, {"question": "?"}) is None
    assert value_of(ADD, {"tests": []}) is None
    with pytest.raises(DataError, match="2 inputs and 1 outputs in the column tests"):
        value_of(ADD, {"tests": {"inputs": ["1", "2"], "outputs": ["1"]}})
    for tests in (
        {"inputs": [1]},
        [{"input": 3}],
        "[1",
        {"inputs": [1], "outputs": [1], "fn_name": "f"},
    ):
        with pytest.raises(DataError, match="cannot be read"):
            read_cases({"tests": tests}, None)


def test_a_sandbox_that_fails_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    close_shared()
    box = shared()
    box.close()
    score = judged("code", Code(), RewardInput(text=f"```\n{ADD}\n```", row={"tests": APPS}))
    close_shared()
    assert score.value is None
    assert score.error is not None
    assert "the sandbox is closed" in score.error
    monkeypatch.setattr(launch, "interpreter", lambda: "/no/such/python")
    score = judged("code", Code(), RewardInput(text=f"```\n{ADD}\n```", row={"tests": APPS}))
    assert score.value is None
    assert score.error is not None
    assert "found no way to hold a program" in score.error
    close_shared()


def test_programs_may_run_at_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PISTON_ENDPOINTS", "E2B_API_URL"):
        monkeypatch.delenv(name, raising=False)
    with serving("piston") as fake:
        remote = {"service": "piston", "addresses": [fake.url], "wait_seconds": 5.0}
        options = {"remote": remote, "limits": {"wall_seconds": 5.0}}
        cosine = {"max_tokens": 9, "judge": "code", "judge_options": options}
        specs = [
            RewardSpec(name="code", options=options),
            RewardSpec(name="length_cosine", options=cosine),
        ]
        with open_rewards(specs, GradingConfig(workers=1)) as reward_set:
            reason = f"remote.service asks for it; programs and tests are sent to {fake.url}"
            assert reward_set.decisions == [("sandbox", "piston", reason)]
            rows = [{"tests": APPS}, {"test_list": ["assert add(1, 2) == 3"]}]
            right, wrong = (
                reward_set.grade(
                    [
                        RewardInput(text=f"```\n{program}\n```", row=row, num_tokens=0)
                        for program, row in zip(programs, rows, strict=True)
                    ]
                )
                for programs in ((ADD, FUNCTION), ("print(3)", "import sys; sys.exit(0)"))
            )
            assert [it.total for it in right] == [3, 3]
            assert [it.parts["code"].value for it in wrong] == [0, 0]
            assert all(APPS["outputs"][1] not in body["stdin"] for *_, body in fake.asked)
            fake.fault = lambda job: "400"
            (failed,) = reward_set.grade(
                [RewardInput(text=f"```\n{ADD}\n```", row=rows[0])], ["code"]
            )
            assert failed.total is None
            assert "HTTP 400" in str(failed.error)
        with pytest.raises(SandboxError, match=f"{fake.url}/execute answered HTTP 400"):
            open_rewards(specs)


def test_a_service_needs_its_key_and_no_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ({"mechanism": "landlock"}, {"packages": ["/usr"]}):
        with pytest.raises(ConfigError, match=r"remote.service=e2b and (mechanism|packages)"):
            verifier_of("code", {"remote": {"service": "e2b"}} | other)
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(
        ConfigError, match="E2B_API_KEY: no environment variable of this name is set"
    ):
        open_rewards([RewardSpec(name="code", options={"remote": {"service": "e2b"}})])
    with pytest.raises(
        ConfigError, match=r"expected the id of a snapshot .* set code.remote.image"
    ):
        verifier_of("code", {"remote": {"service": "morph"}})


def test_where_nothing_holds_it_is_refused_by_name_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close_shared()
    monkeypatch.setattr(launch, "bwrap", lambda: None)
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    for refused in (Code().prepare, Code().resolve_defaults):
        with pytest.raises(SandboxError, match=r"^the reward code: .*pip install .*\[rl\]'"):
            refused()


# -- C and C++

CPP = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
C = '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d", a + b); }'
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def judged_text(text: str, row: dict[str, Any], **options: Any) -> Any:
    return Code(limits=LIMITS, **options)(RewardInput(text=text, row=row))


@needs_compiler
@pytest.mark.parametrize(("mark", "program"), [("cpp", CPP), ("C++17", CPP), ("c", C)])
def test_an_answer_is_compiled_and_held_to_the_tests(mark: str, program: str) -> None:
    languages = ("python", "c", "cpp")
    row = {"tests": APPS}
    assert judged_text(f"```{mark}\n{program}\n```", row, languages=languages) == 1
    wrong = program.replace("a + b", "a - b")
    value = judged_text(f"```{mark}\n{wrong}\n```", row, languages=languages)
    assert value == 0
    assert value.reply == "test 1 of 2: printed '-1', expected '3'"


@needs_compiler
def test_the_language_is_the_rows_then_the_blocks_then_the_first() -> None:
    both = ("python", "cpp")
    row = {"tests": APPS}
    marked = f"```cpp\n{CPP}\n```\n```python\nprint(0)\n```"
    assert judged_text(marked, row, languages=both) == 0  # the last block
    by_row = {"languages": both, "language_column": "lang"}
    assert judged_text(marked, {**row, "lang": "C++"}, **by_row) == 1
    assert judged_text(f"```\n{ADD}\n```", row, **by_row) == 1
    assert judged_text(f"```\n{CPP}\n```", row, languages=("cpp", "python")) == 1
    assert judged_text(CPP, {**row, "lang": "cpp"}, program="text", **by_row) == 1
    found = Code(languages=both, language_column="lang")
    assert last_program("```java\n1\n```", ["python", "cpp"]) is None
    with pytest.raises(
        DataError, match="found 'java' in the column lang; expected one of python, cpp"
    ):
        found(RewardInput(text=marked, row={**row, "lang": "java"}))
    with pytest.raises(DataError, match="calls or asserts, which are Python's"):
        found(RewardInput(text=marked, row={"test_list": ["assert True"], "lang": "cpp"}))


def test_calls_and_asserts_are_answered_in_python() -> None:
    row = {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}}
    text = f"```python\n{FUNCTION}\n```\n```cpp\n{CPP}\n```"
    assert judged_text(text, row, languages=("cpp", "python")) == 1
    with pytest.raises(DataError, match="add python to languages"):
        judged_text(text, row, languages=("cpp",))


@needs_compiler
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "int main() { return x; }",
            "it does not compile: program.cpp:1:21: error: .x. was not declared",
        ),
        (
            "int f();\nint main() { return f(); }",
            "it does not compile: collect2: error: ld returned 1",
        ),
        ("", "it does not compile: collect2: error"),
        ("int main() { for (;;); }", "cpu"),
        ("int main() { *(volatile int*)0 = 1; }", "crash"),
        (
            "#include <vector>\nint main() { std::vector<char>(1 << 30); }",
            "crash: .*what\\(\\):  std::bad_alloc",
        ),
        ("int main() { return 3; }", "error"),
    ],
)
def test_a_program_that_fails_is_wrong_for_a_reason(program: str, reason: str) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=5.0, memory_mb=256)
    code = Code(limits=limits, languages=("cpp",))
    value = code(RewardInput(text=f"```cpp\n{program}\n```", row={"tests": APPS}))
    assert value == 0
    assert isinstance(value, Explained)
    assert re.match(f"test 1 of 2: {reason}", value.reply), value.reply


@needs_compiler
def test_a_program_is_compiled_once_and_no_test_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def counted(*arguments: Any) -> Any:
        sources.append(arguments[2])
        return compile_source(*arguments)

    monkeypatch.setattr("taut_tools.sandbox.code.compile_source", counted)
    program = """
    #include <fstream>
    #include <iostream>
    #include <unistd.h>
    int main() { int a, b; std::cin >> a >> b; std::cout << a + b; unlink("program"); symlink("/dev/null", "program"); }
    """
    assert judged_text(f"```cpp\n{program}\n```", {"tests": APPS}, languages=("cpp",)) == 1
    assert len(sources) == 1


@needs_compiler
def test_what_compiles_is_proved_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settled, decision = Code(languages=("python", "cpp", "c")).resolve_defaults()
    assert isinstance(settled, Code)
    assert decision is not None
    assert re.search(
        r"; cpp is compiled by g\+\+ [\d.]+; c is compiled by gcc [\d.]+$", decision.reason
    )
    unknown = Compilation(cpp_flags=("--unknown-flag",))
    with pytest.raises(SandboxError, match=r"made nothing of a known program .*unknown-flag"):
        Code(languages=("cpp",), compile=unknown).resolve_defaults()
    if kernel.landlock_version() >= kernel.LANDLOCK_OLDEST:
        with pytest.raises(
            SandboxError, match="the sandbox here is landlock, which starts no compiler"
        ):
            Code(languages=("cpp",), mechanism="landlock").resolve_defaults()
    with pytest.raises(ValueError, match=r"remote.service=piston and languages=.*cpp"):
        Code(languages=("cpp",), remote=Remote(service="piston", addresses=("http://a",)))
    monkeypatch.setenv("PATH", str(tmp_path))
    without = Code(languages=("cpp",), compile=Compilation(compiler="clang"))
    with pytest.raises(
        SandboxError, match=r"found no compiler for cpp .*\(clang\+\+\).* apt install"
    ):
        without.resolve_defaults()
