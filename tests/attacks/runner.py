"""The process that runs attacks for one mechanism as one user: reads requests as JSON lines, answers in JSON lines.

{"run": NAME}      run the attack of that name; then another program; then look whether the host is as it was;
                   with "is_compiled": as a compiled program that becomes it
{"source": NAME}   compile and run the source of that name; then the same
{"kill": NAMES}    run each of them below a host of its own, kill the hosts, and say what is alive a second later
{"beside": NAMES}  run honest programs while those attacks run in other threads, and say how the honest ones ended
{"end": true}      close the sandbox, and say what processes are left below this one

python -m tests.attacks.runner MECHANISM             answers "ready" first
python -m tests.attacks.runner MECHANISM NAME GIVEN  is such a host
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from tests.attacks.host import Planted, descendants, marked, memory
from tests.attacks.programs import AFTER_MB, ATTACKS, DURING_MB, Attack, Must
from tests.attacks.sources import SOURCES, Source, as_c

from taut.rewards.verifier import RewardInput
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.code import Code
from taut_tools.sandbox.compiled import (
    Compilation,
    CompiledLanguage,
    Uncompiled,
    compile_source,
    find_compiler,
)
from taut_tools.sandbox.limits import Limits, Ran, Trial
from taut_tools.sandbox.probe import choose
from taut_tools.sandbox.shared import close_shared

NO_WALL = "none"
HONEST = """
import os
children = []
try:
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            os._exit(7)
except PermissionError:  # where a program may have none
    children = []
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(sum(map(int, input().split())))
"""
COMPILING = Limits(cpu_seconds=6, wall_seconds=12.0, memory_mb=1024, scratch_mb=128, output_kb=8192)
_ROWS = {attack.name: attack for attack in ATTACKS}
_SOURCES = {source.name: source for source in SOURCES}


def main() -> None:
    mechanism, *rest = sys.argv[1:]
    if rest:
        _host(mechanism, json.loads(rest[0]))
        return
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become ours: the host sees who is left
    planted = Planted(has_wall=mechanism != NO_WALL)
    try:
        runner = _Runner(mechanism, planted)
        _say({"ready": runner.sandbox.mechanism.reason})
        for line in sys.stdin:
            request = json.loads(line)
            if "run" in request:
                _say(runner.run(_ROWS[request["run"]], request.get("is_compiled", False)))
            elif "source" in request:
                _say(runner.run_source(_SOURCES[request["source"]]))
            elif "kill" in request:
                _say(runner.kill(request["kill"]))
            elif "beside" in request:
                _say(runner.beside(request["beside"]))
            else:
                _say(runner.end())
    finally:
        planted.close()


def _host(mechanism: str, given: dict[str, dict[str, Any]]) -> None:
    """Run the attacks with these names, each in a thread, with time enough; print the name of each that has ended."""
    sandbox = Sandbox(Mechanism(mechanism, "tested"))  # type: ignore[arg-type]
    limits = Limits(
        memory_mb=512, processes=8, wall_seconds=100.0, total_seconds=100.0, cpu_seconds=50
    )

    def run(name: str) -> None:
        sandbox.run(_ROWS[name].text(given[name]), _ROWS[name].trials, limits)
        _say(name)

    for name in given:
        threading.Thread(target=run, args=(name,)).start()


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


class _NoWall:
    """Runs programs as they are: what the table finds then is what it is able to find. For harmless rows only."""

    mechanism = Mechanism(NO_WALL, "for a comparison")  # type: ignore[arg-type]

    def run(self, program: str, trials: Any, limits: Limits | None = None) -> list[Ran]:
        rans = []
        for trial in trials:
            line = [sys.executable, "-c", program]
            done = subprocess.run(
                line,
                input=trial.stdin,
                capture_output=True,
                text=True,
                close_fds=False,
                check=False,
            )
            rans.append(Ran(done.stdout, done.stderr, "error" if done.returncode else "ok", 0.0))
        return rans

    def close(self) -> None:
        pass


class _Runner:
    def __init__(self, mechanism: str, planted: Planted) -> None:
        self.mechanism = mechanism
        self.planted = planted
        packages = [str(planted.package)]
        if mechanism == NO_WALL:
            self.sandbox: Any = _NoWall()
        else:
            self.sandbox = Sandbox(choose(mechanism), packages)  # type: ignore[arg-type]
        self._compilers: dict[str, Sandbox] = {}

    def compiled(self, language: CompiledLanguage, source: str) -> str | Uncompiled:
        """A source as a program for the sandbox, compiled in one that may read what the compiler needs."""
        compilation = Compilation(c_flags=("-O0",), limits=COMPILING)
        compiler = find_compiler(language, compilation)
        if language not in self._compilers:
            mechanism = self.sandbox.mechanism
            self._compilers[language] = Sandbox(mechanism, files=compiler.files)
        return compile_source(compiler, self._compilers[language], source, compilation.limits)

    def run_source(self, row: Source) -> dict[str, Any]:
        """{"uncompiled", "rans", "seconds", "after", "changes", "error"}"""
        answer: dict[str, Any] = {"uncompiled": None, "rans": [], "error": ""}
        start = time.monotonic()
        try:
            program = self.compiled("cpp", row.source(self.planted.given()))
            if isinstance(program, Uncompiled):
                answer["uncompiled"] = program.reason
            else:
                answer["rans"] = self.sandbox.run(program, [Trial()], row.limits)
        except Exception as error:  # noqa: BLE001
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["seconds"] = time.monotonic() - start
        return answer | self._afterwards()

    def run(self, attack: Attack, is_compiled: bool = False) -> dict[str, Any]:
        """{"rans", "reward", "held_mb", "after", "changes", "error"}"""
        answer: dict[str, Any] = {"rans": [], "reward": None, "error": "", "held_mb": {}}
        text = attack.text(self.planted.given())
        try:
            if is_compiled:
                made = self.compiled("c", as_c(self.planted.given()["python"], text))
                assert isinstance(made, str), made
                text = made
            program, trials = attack.before
            if program:
                self.sandbox.run(program, trials)
            if attack.row:
                code = Code(program="text", limits=attack.limits, mechanism=self.mechanism)  # type: ignore[arg-type]
                answer["reward"] = code(RewardInput(text=text, row=dict(attack.row)))
            elif attack.must is Must.STAY_SMALL:
                answer["rans"], answer["held_mb"] = self._measured(attack, text)
            else:
                answer["rans"] = self.sandbox.run(text, attack.trials, attack.limits)
        except Exception as error:  # noqa: BLE001 (whatever a program makes the sandbox or the reward raise is reported)
            answer["error"] = f"{type(error).__name__}: {error}"
        return answer | self._afterwards()

    def _afterwards(self) -> dict[str, Any]:
        """What became of another program, and what is not as it was: {"after", "changes"}"""
        after: Any
        try:
            after = self.sandbox.run("print(6 * 7)", [Trial()])[0][:3]
        except Exception as error:  # noqa: BLE001
            after = str(error)
        changes = self.planted.changes()
        _end_all(marked(self.planted.mark))
        return {"after": after, "changes": changes}

    def _measured(self, attack: Attack, text: str) -> tuple[Any, dict[str, int]]:
        """What the host holds more, at most, while the program runs ("during"), and when it has ended ("after").

        The smallest of three measurements counts: the kernel allocates for others, too.
        """
        rans: Any = []
        least = {"during": sys.maxsize, "after": sys.maxsize}
        for _ in range(3):
            before = memory(self.planted.mark)
            peaks, is_over = [0], threading.Event()

            def watch(before=before, peaks=peaks, is_over=is_over) -> None:  # type: ignore[no-untyped-def]
                while not is_over.wait(0.02):
                    now = memory(self.planted.mark)
                    peaks.append(sum(now.values()) - sum(before.values()))

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                rans = self.sandbox.run(text, attack.trials, attack.limits)
            finally:
                is_over.set()
                watcher.join()
            for _ in range(20):
                after = sum(memory(self.planted.mark).values()) - sum(before.values())
                if after <= AFTER_MB:
                    break
                time.sleep(0.05)
            least = {
                "during": min(least["during"], max(peaks)),
                "after": min(least["after"], after),
            }
            if least["during"] <= DURING_MB and least["after"] <= AFTER_MB:
                break
        return rans, least

    def kill(self, names: list[str]) -> dict[str, Any]:
        """{"running": names of those that ran when their host was killed, "alive": processes a second later}"""
        marks = {name: f"{self.planted.mark[:9]}{place:02}-" for place, name in enumerate(names)}
        given = {name: {**self.planted.given(), "mark": marks[name]} for name in names}
        line = [sys.executable, "-m", "tests.attacks.runner", self.mechanism, json.dumps(given)]
        host = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert host.stdout is not None
        os.set_blocking(host.stdout.fileno(), False)
        ended, began = b"", set()
        last = time.monotonic() + 20
        while len(began) < len(names) and time.monotonic() < last:
            time.sleep(0.05)
            ended += host.stdout.read() or b""
            began = {
                it
                for it in names
                if json.dumps(it).encode() in ended or set(marked(marks[it])) - {host.pid}
            }
        time.sleep(0.3)
        below = set(descendants(host.pid))
        running = [name for name in names if set(marked(marks[name])) - {host.pid}]
        host.kill()
        host.wait()
        host.stdout.close()
        time.sleep(1.0)
        left = {
            *below & set(descendants(os.getpid())),
            *(pid for mark in marks.values() for pid in marked(mark)),
        }
        alive = [f"{pid} {_line(pid)}" for pid in left]
        _end_all(left)
        return {"running": running, "alive": alive}

    def beside(self, names: list[str]) -> dict[str, Any]:
        """{"honest": what became of honest programs, "changes"}"""
        rows = [_ROWS[name] for name in names]
        attackers = [
            threading.Thread(
                target=self.sandbox.run,
                args=(row.text(self.planted.given()), row.trials, row.limits),
            )
            for row in rows
        ]
        limits = Limits(memory_mb=256, processes=4, wall_seconds=20.0)
        honest = []
        for attacker in attackers:
            attacker.start()
        while any(attacker.is_alive() for attacker in attackers):
            (ran,) = self.sandbox.run(HONEST, [Trial(stdin="20 22")], limits)
            honest.append([ran.stdout, ran.stderr, ran.outcome])
        return {"honest": honest, "changes": self.planted.changes()}

    def end(self) -> dict[str, Any]:
        for sandbox in (self.sandbox, *self._compilers.values()):
            sandbox.close()
        close_shared()
        time.sleep(0.2)
        left = [pid for pid in descendants(os.getpid()) if pid != self.planted.victim.pid]
        return {"left": [f"{pid} {_line(pid)}" for pid in left]}


def _end_all(pids: Iterable[int]) -> None:
    """Of programs that got away."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def _line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return file.read()[-80:].decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
