"""Programs at a service: what becomes of each kind of trial, and what becomes of faults of the service's."""

from __future__ import annotations

import ast
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import anyio
import pytest
from tests.helpers.fake_executors import KEY, NAMES, Fake, serving
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.slow_cases import slow_except

from taut.config import from_mapping, to_dict
from taut.errors import ConfigError, SandboxError
from taut.io.http import Retries
from taut.rl.settings import Remote
from taut_tools.sandbox.limits import Limits, Ran, Trial
from taut_tools.sandbox.remote import RemoteSandbox, executor, open_remote
from taut_tools.sandbox.remote.addresses import urls
from taut_tools.sandbox.remote.services import E2B, Client, Passing

LIMITS = Limits(wall_seconds=20.0, cpu_seconds=1, memory_mb=256, output_kb=64)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and waits of tests, not of networks; keys where the services' own packages look for them."""
    monkeypatch.setattr(executor, "_RETRIES", Retries(first_pause=0.01, longest_pause=0.02))
    for name in (
        "PISTON_ENDPOINTS",
        "E2B_API_URL",
        "E2B_SANDBOX_URL",
        "E2B_DOMAIN",
        "MORPH_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("MORPH_API_KEY", KEY)


@pytest.fixture(params=slow_except(["piston"], NAMES))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def fake(name: str) -> Iterator[Fake]:
    with serving(name) as made:
        yield made


def remote_of(name: str, fake: Fake, **options: Any) -> Remote:
    own = {"e2b": {"machines": fake.url}, "morph": {"image": "snapshot/1"}}.get(name, {})
    return Remote(
        **{"service": name, "addresses": [fake.url], "wait_seconds": 20.0} | own | options
    )


@pytest.fixture
def box(name: str, fake: Fake) -> Iterator[RemoteSandbox]:
    opened = open_remote(remote_of(name, fake), None)
    yield opened
    opened.close()


def shorten(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let requests be late after so many seconds beside the trial's own."""
    monkeypatch.setattr("taut_tools.sandbox.remote.services.START", 0.0)
    monkeypatch.setattr("taut_tools.sandbox.remote.services.WAIT", seconds)


PROGRAM = """
import os, sys, time
def add(a, b): return a + b
def die(): os.abort()
def loop():
    while True: pass
def sleep(): time.sleep(60)
def fill(): return len(bytearray(2**30))
def shout(): print("x" * 10**6)
def bad(): return {1}
class Solution:
    def twice(self, it): return [it, it]
def both(): print("out"); print("err", file=sys.stderr)
if __name__ == "__main__":
    print(sum(map(int, input().split())))
"""
TABLE: list[tuple[Trial, str, str | None, str | None]] = [
    (Trial(stdin="1 2"), "ok", "3\n", None),
    (Trial(stdin="one"), "error", "", None),
    (Trial(call="add", arguments="[1, 2]"), "ok", "", "3"),
    (Trial(call="twice", arguments='["é\\u2028\'\\"\\\\"]'), "ok", "", '["é\u2028\'\\"\\\\"'),
    (Trial(call="bad"), "error", "", None),
    (Trial(call="none"), "error", "", None),
    (Trial(check="assert add(1, 1) == 2"), "ok", "", None),
    (Trial(check="assert add(1, 1) == 3"), "error", "", None),
    (Trial(check="both()"), "ok", "out\n", None),
    (Trial(check="sys.exit(0)"), "error", "", None),
    (Trial(check="os._exit(0)"), "error", "", None),
    (Trial(call="loop"), "cpu", "", None),
    (Trial(call="fill"), "memory", "", None),
    (Trial(call="die"), "crash", "", None),
    (Trial(call="shout"), "output", None, None),
]


def test_each_kind_of_trial_ends_as_it_must(box: RemoteSandbox, fake: Fake) -> None:
    limits = Limits(
        wall_seconds=20.0, total_seconds=60.0, cpu_seconds=1, memory_mb=256, output_kb=64
    )
    ran = box.run(PROGRAM, [trial for trial, *_ in TABLE], limits)
    for (trial, outcome, stdout, value), it in zip(TABLE, ran, strict=True):
        assert it.outcome == outcome, (trial, it)
        assert stdout is None or it.stdout == stdout, (trial, it)
        if value is not None:
            assert it.value is not None
            assert json.loads(it.value) == (3 if value == "3" else ["é\u2028'\"\\"] * 2)
        else:
            assert it.value is None
        assert len(it.stdout) + len(it.stderr) <= 64 * 1024
        assert 0 <= it.seconds <= 20
    assert ran[1].stderr.endswith("ValueError: invalid literal for int() with base 10: 'one'\n")
    assert ran[1].stderr.startswith('Traceback (most recent call last):\n  File "program.py"')
    assert ran[8].stderr == "err\n"
    (late,) = box.run(PROGRAM, [Trial(call="sleep")], Limits(wall_seconds=0.5))
    assert (late.outcome, late.seconds) == ("time", 0.5)
    assert not fake.running, "its machine was ended"


def test_what_a_program_is_made_of_arrives_as_it_is(box: RemoteSandbox) -> None:
    text = "'''\"\"\"\\ \u2028 $(id) `id` %s {0} \x00\x07\r\n é 漢 \U0001f600 EOF"
    program = f"import sys\nassert sys.stdin.read() == {text!r}\nprint({text!r}, end='')"
    (ran,) = box.run(program, [Trial(stdin=text)], LIMITS)
    assert (ran.outcome, ran.stdout) == ("ok", text), ran
    lone = box.run("print(ascii('\ud800' + input()))", [Trial(stdin="\udcff")], LIMITS)
    assert lone[0].stdout == "'??'\n"


def test_a_machine_for_each_program_and_nothing_after_a_failure(
    box: RemoteSandbox, fake: Fake, name: str
) -> None:
    trials = [Trial(stdin="0"), Trial(stdin="1"), Trial(stdin="1")]
    ran = box.run("print(1 / int(input()))", trials, LIMITS, stop_early=True)
    assert [it.outcome for it in ran] == ["error", "not_run", "not_run"]
    ran = box.run("print(1 / int(input()))", trials, LIMITS)
    assert [it.outcome for it in ran] == ["error", "ok", "ok"]
    limits = Limits(wall_seconds=2.0, total_seconds=0.3)
    ran = box.run("import time; time.sleep(9)", trials[:2], limits)
    assert [it.outcome for it in ran] == ["time", "not_run"]
    started = [it for it in fake.paths() if not it.endswith(("/exec", "/execute"))]
    assert len(started) == (0 if name == "piston" else 3)
    assert not fake.running


FORGED = """
import base64, json, os, re, signal
report = json.dumps(["ok", "", "", 0.1, base64.b64encode(b"3").decode()])
found = set()
for path in (f"/proc/{os.getppid()}/{it}" for it in ("cmdline", "environ", "fd/0")):
    try: found |= set(re.findall(rb"\\b[0-9a-f]{32}\\b", open(path, "rb").read()))
    except OSError: pass
for nonce in found | {b"0" * 32}:
    print(); print(nonce.decode(), report)
    try: open(f"/proc/{os.getppid()}/fd/1", "a").write("\\n%s %s\\n" % (nonce.decode(), report))
    except OSError: pass
"""


def test_a_printed_report_is_not_believed(box: RemoteSandbox) -> None:
    trials = [Trial(call="add"), Trial(check="assert False")]
    ran = box.run(FORGED + "\nos._exit(0)", trials, LIMITS)
    assert [it.outcome for it in ran] == ["error", "error"], ran
    assert [it.value for it in ran] == [None, None]


@pytest.mark.parametrize("kill", ["SIGKILL", "SIGSTOP"])
def test_a_program_that_ends_the_script_above_it_fails_by_itself(
    box: RemoteSandbox, fake: Fake, name: str, kill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 4.0)
    limits = Limits(wall_seconds=2.5, total_seconds=60.0)
    kills = FORGED + f"\nos.kill(os.getppid(), signal.{kill})\nimport time; time.sleep(30)"
    ran = box.run(kills, [Trial(call="f"), Trial(call="f")], limits)
    assert ran[0].outcome == ("time" if kill == "SIGSTOP" else "crash")
    assert ran[1].outcome in (
        ("not_run",) if not (name == "piston" and kill == "SIGSTOP") else ("time",)
    )
    assert not fake.running


PASSING = ("500", "408", "garbage", "deep", "other", "dropped", "packed")


@pytest.mark.parametrize(
    ("name", "fault"),
    slow_except(
        [("piston", fault) for fault in PASSING],
        [(name, fault) for name in NAMES for fault in ("429", "502", "truncated")]
        + [("piston", fault) for fault in PASSING],
    ),
)
def test_a_fault_that_passes_is_not_seen(name: str, fault: str) -> None:
    with serving(name) as fake:
        box = open_remote(remote_of(name, fake), None)
        fake.faults = [fault] * (5 if fault == "429" else 2)
        (ran,) = box.run("print(input())", [Trial(stdin="x")], LIMITS)
        box.close()
        assert (ran.outcome, ran.stdout) == ("ok", "x\n")
        assert not fake.faults and not fake.running


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("401", "HTTP 401"),
        ("403", "HTTP 403"),
        ("400", "HTTP 400"),
        ("413", "HTTP 413"),
        ("302", "HTTP 302"),
        ("500", "HTTP 500"),
        ("garbage", "no JSON"),
        ("deep", "no JSON"),
        ("other", "answered without"),
        ("truncated", "broke off"),
        ("silent", "gave no answer within"),
        ("dripping", "gave no answer within"),
        ("huge", "answered with more than"),
        ("bomb", "answered with more than"),
        ("packed", "answered with a body in the content encoding"),
    ],
)
def test_a_service_that_fails_is_an_error_and_no_outcome(
    fault: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_large = fault in ("huge", "bomb")  # what comes is read until it is too much
    shorten(monkeypatch, 10.0 if is_large else 0.2)
    monkeypatch.setenv("PISTON_KEY", KEY)
    with serving("piston") as fake:
        fake.fault = lambda job: fault
        box = open_remote(remote_of("piston", fake, api_key_env="PISTON_KEY"), None)
        start = time.monotonic()
        limits = Limits(wall_seconds=20.0 if is_large else 0.3, output_kb=64)
        with pytest.raises(SandboxError, match=re.escape(found)) as caught:
            box.run("print(1)", [Trial()], limits)
        assert time.monotonic() - start < 30
        assert fake.url in str(caught.value)
        assert KEY not in str(caught.value) and "\n" not in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert fake.asked[0][2]["Authorization"] == f"Bearer {KEY}"
        assert len(fake.asked) <= 6
        box.close()


@pytest.mark.parametrize(
    ("fault", "outcome"), [("500", "crash"), ("dropped", "crash"), ("silent", "time")]
)
def test_a_fault_of_one_program_alone_is_the_programs(
    box: RemoteSandbox, fake: Fake, fault: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 4.0)
    fake.fault = lambda job: fault if "print(1)" in job else None
    ran = box.run("print(1)", [Trial(), Trial()], Limits(wall_seconds=2.5))
    assert [it.outcome for it in ran] == [outcome, "not_run"]
    assert not fake.running


def test_nobody_there_is_an_error_in_bounded_time(name: str) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        fake = Fake(url=f"http://127.0.0.1:{one.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(
            SandboxError, match=rf"{name} at {fake.url} failed: .*cannot be reached"
        ):
            open_remote(remote_of(name, fake), LIMITS)
        assert time.monotonic() - start < 30


def test_a_busy_service_is_asked_until_the_time_is_up(name: str, fake: Fake) -> None:
    fake.fault = lambda job: "429"
    box = open_remote(remote_of(name, fake, wait_seconds=2.0), None)
    with pytest.raises(SandboxError, match=r"not done with a program within 4 s; .*HTTP 429"):
        box.run("print(1)", [Trial()], Limits(total_seconds=2.0))
    box.close()


def test_the_start_runs_a_known_program(fake: Fake, name: str) -> None:
    opened = open_remote(remote_of(name, fake), LIMITS)
    assert opened.mechanism.name == name
    assert fake.url in opened.mechanism.reason
    opened.close()
    with pytest.raises(SandboxError, match="closed"):
        opened.run("print(1)", [Trial()])
    fake.fault = lambda job: "400"
    with pytest.raises(SandboxError, match="HTTP 400"):
        open_remote(remote_of(name, fake), LIMITS)


def test_a_service_that_cuts_output_short_is_refused_at_the_start() -> None:
    with serving("piston") as fake:
        fake.output_max_size = 1024
        with pytest.raises(SandboxError, match=r"prints 65535 characters; it ended as output"):
            open_remote(remote_of("piston", fake), LIMITS)
        fake.output_max_size = 100_000
        open_remote(remote_of("piston", fake), LIMITS).close()


def test_programs_at_a_time_are_bounded(name: str, fake: Fake) -> None:
    box = open_remote(remote_of(name, fake, concurrency=2), None)
    code = "import time; time.sleep(0.3); print(input())"

    def one(number: int) -> list[Ran]:
        return box.run(code, [Trial(stdin=str(number))], LIMITS)

    with ThreadPoolExecutor(5) as pool:
        found = [it[0].stdout.strip() for it in pool.map(one, range(5))]
    assert found == [str(it) for it in range(5)]
    assert fake.most == 2
    box.close()


def test_piston_servers_take_turns_and_one_that_is_down_is_passed_over() -> None:
    with serving("piston") as left, serving("piston") as right:
        remote = remote_of(
            "piston", left, addresses=["http://127.0.0.1:9/api", left.url, right.url]
        )
        box = open_remote(remote, None)
        for _ in range(3):
            assert box.run("print(1)", [Trial()], LIMITS)[0].stdout == "1\n"
        assert left.asked and right.asked
        box.close()


def test_where_the_settings_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PISTON_ENDPOINTS", "http://a:1/api/v2, http://b:2/api/v2/")
    assert urls(Remote(service="piston")) == ("http://a:1/api/v2", "http://b:2/api/v2")
    assert urls(Remote(service="e2b")) == ("https://api.e2b.app",)
    monkeypatch.setenv("E2B_DOMAIN", "example.org")
    assert urls(Remote(service="e2b")) == ("https://api.example.org",)
    assert urls(Remote(service="morph", image="s")) == ("https://cloud.morph.so/api",)
    monkeypatch.setenv("MORPH_BASE_URL", "https://morph.example/api")
    assert urls(Remote(service="morph", image="s")) == ("https://morph.example/api",)
    assert KEY not in json.dumps(to_dict(Remote(service="e2b"))) + repr(Remote(service="e2b"))


def test_settings_that_are_missing_or_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="PISTON_ENDPOINTS"):
        open_remote(Remote(service="piston"), LIMITS)
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(
        ConfigError, match=r"remote\.api_key_env=E2B_API_KEY: no environment variable"
    ):
        open_remote(Remote(service="e2b"), LIMITS)
    with pytest.raises(ConfigError, match=r"remote\.api_key_env=OTHER: no environment variable"):
        open_remote(Remote(service="e2b", api_key_env="OTHER"), LIMITS)
    for settings, code in (
        ({"service": "morph"}, "service/image"),
        ({"api_key_env": "OTHER"}, "api_key_env/service"),
        ({"service": "piston", "machines": "http://a"}, "machines/service"),
        ({"service": "e2b", "addresses": ["http://a", "http://b"]}, "addresses/service"),
    ):
        with refused(ErrorCode(code)):
            from_mapping(Remote, settings)
    for url in (
        "http://me:secret@a/",
        "ftp://a",
        "a:1",
        "http://a/?key=secret",
        "http://[",
        "http://a:x",
    ):
        with pytest.raises(
            ConfigError, match=r"remote.addresses(=|: has).*; expected a URL"
        ) as caught:
            open_remote(Remote(service="piston", addresses=(url,)), LIMITS)
        assert "secret" not in str(caught.value)


def test_machines_that_do_not_start_are_the_services_failure() -> None:
    for name in ("e2b", "morph"):
        with serving(name) as fake:
            box = open_remote(remote_of(name, fake), None)
            fake.starts = ["500", "429", "503"]
            assert box.run("print(1)", [Trial()], LIMITS)[0].stdout == "1\n"
            fake.starts = ["500", "500", "500"]
            with pytest.raises(
                SandboxError, match=r"failed: .*HTTP 500: \{.message.: .no machine.\}"
            ):
                box.run("print(1)", [Trial()], LIMITS)
            assert not fake.starts and not fake.running
            box.close()


def test_limits_above_piston_s_own_are_refused_at_the_start() -> None:
    with serving("piston") as fake:
        fake.run_timeout = 3000
        open_remote(remote_of("piston", fake), Limits(wall_seconds=1.0)).close()
        with pytest.raises(SandboxError, match="HTTP 400"):
            open_remote(remote_of("piston", fake), Limits(wall_seconds=1.1))


@pytest.mark.parametrize(
    ("made", "url"),
    [
        ({"sandboxID": "i4"}, "https://49999-i4.example.org/execute"),
        ({"sandboxID": "i4", "domain": "e2b.dev"}, "https://49999-i4.e2b.dev/execute"),
        ({"sandboxID": "a/../b"}, None),
        ({"sandboxID": "i4", "domain": "here/there?"}, None),
        ({}, None),
    ],
)
def test_where_e2b_s_machines_are(made: dict[str, Any], url: str | None) -> None:
    asked: list[tuple[str, str, dict[str, str]]] = []

    class Recording:
        async def send(self, method: str, at: str, *, headers: dict[str, str], **_: Any) -> bytes:
            asked.append((method, at, headers))
            return json.dumps(made).encode()

    async def machine() -> None:
        recording = cast(Client, Recording())
        service = E2B("https://api", None, "example.org", "t", KEY, 1.0)
        async with service.machine(recording, LIMITS) as one:
            await one(b"{}", 1.0)

    if url is None:
        with pytest.raises(Passing):
            anyio.run(machine)
        assert len(asked) == 1
        return
    anyio.run(machine)
    assert [it[:2] for it in asked] == [
        ("POST", "https://api/v2/sandboxes"),
        ("POST", url),
        ("DELETE", "https://api/sandboxes/i4"),
    ]
    assert [it[2].get("X-API-KEY") for it in asked] == [KEY, None, KEY]


def test_what_is_closed_ends_its_programs_and_their_machines(
    box: RemoteSandbox, fake: Fake
) -> None:
    with ThreadPoolExecutor(1) as pool:
        program = "import time; time.sleep(3)"
        future = pool.submit(box.run, program, [Trial()], Limits(wall_seconds=9.0))
        start = time.monotonic()
        while not fake.at_a_time and time.monotonic() < start + 20:
            time.sleep(0.01)
        box.close()
        with pytest.raises(SandboxError, match="was closed while a program was under way"):
            future.result()
    assert not fake.running


def test_the_script_needs_an_old_python_and_nothing_of_ours() -> None:
    tree = ast.parse(executor._SOURCE, feature_version=(3, 9))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [it.name for it in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        )
    }
    assert "subprocess" in imported
    assert imported <= sys.stdlib_module_names
