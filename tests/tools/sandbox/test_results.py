"""What a program that behaves, or merely fails, gets back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from taut.errors import SandboxError
from taut_tools.sandbox.box import Sandbox
from taut_tools.sandbox.limits import Limits, Outcome, Trial
from taut_tools.sandbox.probe import open_sandbox
from taut_tools.sandbox.shared import close_shared, run_python, shared


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    try:
        sandbox = open_sandbox()
    except SandboxError:
        pytest.skip("no mechanism holds programs here; test_probe.py has the refusal")
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    ("program", "outcome", "stdout", "stderr"),
    [
        ("a, b = map(int, input().split()); print(a + b)", "ok", "3\n", ""),
        ("import sys; print(sys.stdin.read().split(), end='')", "ok", "['1', '2']", ""),
        ("import sys; sys.exit(0)", "ok", "", ""),
        ("import sys; sys.exit('why')", "error", "", "why\n"),
        ("print(1)\nraise SystemExit(3)", "error", "1\n", ""),
        ("1 +", "error", "", "SyntaxError: invalid syntax\n"),
        ("import os; os.abort()", "crash", "", ""),
        ("print('\\ud800')", "error", "", "UnicodeEncodeError"),
        (
            "import sys; sys.setrecursionlimit(10**5)\ndef f(): f()\nf()",
            "error",
            "",
            "RecursionError",
        ),
        ("if __name__ == '__main__': print('main')", "ok", "main\n", ""),
        ("import atexit; atexit.register(print, 'end')", "ok", "end\n", ""),
        ("import atexit, sys; atexit.register(print, 'end'); sys.exit(0)", "ok", "end\n", ""),
        ("print(5)\nexit()", "ok", "5\n", ""),
        ("print(5)\nquit(3)", "error", "5\n", ""),
        ("import sys; print(5); sys.stdout.close()", "ok", "5\n", ""),
        ("print({'a', 'b', 'c', 'd', 'e'} == set('abcde'))", "ok", "True\n", ""),
    ],
)
def test_scripts(box: Sandbox, program: str, outcome: Outcome, stdout: str, stderr: str) -> None:
    (ran,) = box.run(program, [Trial(stdin="1 2\n")], Limits(memory_mb=256))
    assert (ran.outcome, ran.stdout) == (outcome, stdout), ran
    assert stderr in ran.stderr
    assert bool(stderr) == bool(ran.stderr) or outcome == "crash"


def test_a_traceback_shows_the_program_and_nothing_of_ours(box: Sandbox) -> None:
    (ran,) = box.run("def f():\n    return 1 / 0\nf()", [Trial()])
    assert ran.stderr == (
        "Traceback (most recent call last):\n"
        '  File "program.py", line 3, in <module>\n    f()\n'
        '  File "program.py", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    )


def test_a_thread_that_does_the_work_is_waited_for(box: Sandbox) -> None:
    if box.mechanism.name == "landlock":
        pytest.skip("no threads under landlock")
    code = "import threading\nthreading.stack_size(2**26)\nthreading.Thread(target=lambda: print(9)).start()"
    for end in ("", "\nexit()"):
        assert box.run(code + end, [Trial()])[0].stdout == "9\n"


def test_calls_give_their_value_as_json(box: Sandbox) -> None:
    program = "def f(a, b=2): return (a, b)\nclass Solution:\n    def g(self, x): return x * 2"
    ran = box.run(
        program,
        [
            Trial(call="f", arguments="[1]"),
            Trial(call="g", arguments="[[1, 2]]"),
            Trial(call="h"),
            Trial(call="f", arguments="[1, 2, 3]"),
        ],
    )
    assert [it.outcome for it in ran] == ["ok", "ok", "error", "error"]
    assert [it.value for it in ran] == ["[1, 2]", "[1, 2, 1, 2]", None, None]


@pytest.mark.parametrize("end", ["import sys; sys.exit(0)", "import os; os._exit(0)", "exit()"])
def test_an_exit_before_the_check_does_not_pass(box: Sandbox, end: str) -> None:
    trials = [Trial(check="assert False"), Trial(call="f")]
    ran = box.run(f"def f(): return 1\ndel f\n{end}", trials)
    assert [it.outcome for it in ran] == ["error", "error"]


def test_checks(box: Sandbox) -> None:
    trials = [Trial(check="assert f(1) == 2"), Trial(check="assert f(1) == 3, 'no'")]
    ran = box.run("def f(x): return x + 1", trials)
    assert [it.outcome for it in ran] == ["ok", "error"]
    assert ran[1].stderr.endswith("AssertionError: no\n")


def test_what_follows_a_failure_or_the_end_of_the_time_is_not_run(box: Sandbox) -> None:
    trials = [Trial(stdin="0"), Trial(stdin="1"), Trial(stdin="1")]
    ran = box.run("print(1 / int(input()))", trials, stop_early=True)
    assert [it.outcome for it in ran] == ["error", "not_run", "not_run"]
    limits = Limits(wall_seconds=5.0, total_seconds=0.3)
    ran = box.run("import time; time.sleep(9)", trials, limits)
    assert [it.outcome for it in ran] == ["time", "not_run", "not_run"]
    ran = box.run("print('x' * 1000)", [Trial()] * 20, Limits(output_kb=1))
    assert [it.outcome for it in ran] == ["ok"] * 17 + ["not_run"] * 3


def test_processor_time_is_bounded(box: Sandbox) -> None:
    (ran,) = box.run("while True: pass", [Trial()], Limits(cpu_seconds=1, wall_seconds=30.0))
    assert ran.outcome == "cpu"


def test_megabytes_go_in_and_come_out(box: Sandbox) -> None:
    text = "word " * 400_000
    limits = Limits(output_kb=4096)
    (ran,) = box.run("print(input())", [Trial(stdin=text)], limits)
    assert ran.stdout == f"{text}\n"
    (unread,) = box.run("print('x')", [Trial(stdin=text)], limits)
    assert (unread.outcome, unread.stdout) == ("ok", "x\n")


def test_many_threads_share_it(box: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(lambda n: box.run(f"print({n})", [Trial()])[0].stdout, range(12)))
    assert said == [f"{n}\n" for n in range(12)]


def test_a_worker_survives_the_thread_that_started_it() -> None:
    """PR_SET_PDEATHSIG would end it with the thread."""
    try:
        sandbox = open_sandbox()
    except SandboxError:
        pytest.skip("no mechanism holds programs here")
    thread = threading.Thread(target=lambda: sandbox.run("print(1)", [Trial()]))
    thread.start()
    thread.join()
    assert sandbox.run("print(2)", [Trial()])[0].stdout == "2\n"
    sandbox.close()


def test_packages_can_be_imported_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "planted_package.py").write_text("value = 5")
    try:
        sandbox = open_sandbox(packages=[str(tmp_path)])
    except SandboxError:
        pytest.skip("no mechanism holds programs here")
    tmp_path.chmod(0o777)
    (tmp_path / "planted_package.py").chmod(0o644)
    ran, outside = (
        sandbox.run(code, [Trial()])[0]
        for code in (
            "import planted_package; print(planted_package.value)",
            f"open({str(tmp_path / 'x')!r}, 'w')",
        )
    )
    sandbox.close()
    assert ran.stdout == "5\n", ran
    assert outside.outcome == "error"
    assert not (tmp_path / "x").exists()


def test_the_python_tool(box: Sandbox) -> None:
    assert run_python("print(input())", stdin="hello").stdout == "hello\n"
    assert shared() is shared()
    close_shared()
    assert run_python("1 / 0").outcome == "error"
    close_shared()
