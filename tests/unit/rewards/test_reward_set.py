"""Reward sets: many rewards of many answers; functions of the user in worker processes, and all they may do wrong."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taut.errors import ConfigError, UserCodeError
from taut.rewards import RewardInput, Score
from taut.rewards.registry import files_of
from taut.rewards.reward_set import (
    RewardResult,
    RewardSet,
    open_rewards,
    tally,
)
from taut.rewards.settings import GradingConfig, RewardSpec
from taut.rewards.text_match import ExactMatch
from taut.rewards.worker import SPARE, _memory

OWN = """
import os, random, signal, subprocess, sys, threading, time
import numpy as np
from decimal import Decimal
from dataclasses import dataclass

@dataclass
class Scale:
    by: float

def brevity(text, by=1.0):
    from taut.rewards import Explained
    value = Scale(by).by / (1 + len(text))
    return Explained(value, "too long") if len(text) == 1 else value

def judged(text, references, row):
    if text == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", row["mark"]])
        while True:
            pass
    if text == "die":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), 9)
    if text == "exit":
        sys.exit("enough")
    if text == "raise":
        raise KeyError("nothing\\nhere")
    found = {"nan": float("nan"), "inf": -float("inf"), "true": True, "none": None}
    found |= {"np.true": np.True_, "np.false": np.bool_(False), "np.float32": np.float32(0.5), "np.int64": np.int64(3)}
    found |= {"word": "1.0", "list": [1], "array": np.array(1.0), "decimal": Decimal(1)}
    return found.get(text, len(references))

def everything(text, references, row, num_tokens, finish_reason, prompt, messages):
    assert isinstance(references, list)
    return len(text) + len(references) + row["n"] + num_tokens + len(prompt) + len(messages)

def talks(text):
    print("a reward that prints:", text, flush=True)
    return 1.0

def drawn():
    return random.random()

def where():
    return float("torch" in sys.modules) + 2 * (os.getsid(0) == os.getpid())

def left():
    return signal.getitimer(signal.ITIMER_PROF)[0]

def first():
    return float(open("/proc/self/oom_score_adj").read())

def leaving(text, row):
    if text:
        child = subprocess.Popen(["sleep", "60"])
        open(row["mark"] + "/pids", "w").write(f"{os.getpid()} {child.pid}")
        threading.Timer(0.05, os._exit, [0]).start()
    return 1.0

def careless(text, row):
    # what none should do in the process where it runs
    if text == "close":
        os.closerange(0, 4096)
    if text == "fork":
        os.fork()
    if text == "fork, then exit" and os.fork() == 0:
        sys.exit(3)
    if text == "write":
        for number in range(3, 4096):
            try:
                os.write(number, b"\\0\\0\\0\\5hello")
            except OSError:
                pass
    if text == "escape" and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(row["mark"] + "/escaped", "w").write(str(os.getpid()))
            time.sleep(60)
        os._exit(0)
    return 1.0

def positional(said, /):
    return 1.0

def stranger(text, tokenizer):
    return 1.0

def whatever(**known):
    return float(len(known))
"""

ONE = GradingConfig(workers=1)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def reward_set(own: Path) -> Iterator[RewardSet]:
    """One for most tests: two processes, and half a second for ``judged``."""
    rewards: list[str | RewardSpec] = [
        RewardSpec(name=f"{own}:judged", timeout=0.5),
        RewardSpec(name=f"{own}:brevity", weight=10.0, options={"by": 2}),
        f"{own}:everything",
        f"{own}:drawn",
        f"{own}:where",
        f"{own}:whatever",
        RewardSpec(name="exact_match", label="same", weight=0.5),
        RewardSpec(name="regex", timeout=0.3, options={"pattern": r"^(a+)+$"}),
        RewardSpec(name="regex", label="whole", options={"pattern": "a.c", "is_whole": True}),
    ]
    with open_rewards(rewards, GradingConfig(workers=2)) as opened:
        yield opened


def said(reward_set: RewardSet, label: str, *texts: str, mark: str = "") -> list[Score]:
    answers = [RewardInput(text=text, references=("a", "b"), row={"mark": mark}) for text in texts]
    return [reward_result.parts[label] for reward_result in reward_set.grade(answers, [label])]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def forget_processes(reward_set: RewardSet) -> None:  # the next answer gets a new one
    assert reward_set._workers is not None
    for worker in reward_set._workers._workers:
        worker.helper.end()


def test_a_function_is_given_what_it_asks_for_and_its_options(reward_set: RewardSet) -> None:
    answered = RewardInput(
        text="abc",
        references=("x", "y"),
        row={"n": 100},
        num_tokens=1000,
        prompt=({"role": "user", "content": "?"},),
        messages=({"role": "assistant", "content": "abc"},) * 2,
    )
    (reward_result,) = reward_set.grade([answered], ["everything", "brevity", "whatever"])
    assert reward_result.parts["everything"] == Score(1108.0)
    assert reward_result.parts["brevity"] == Score(0.5)
    assert reward_result.parts["whatever"] == Score(7.0)


def test_what_goes_wrong_is_an_error_of_that_answer_and_the_others_are_in_their_order(
    reward_set: RewardSet,
) -> None:
    texts = ["a", "hang", "b", "die", "c", "kill", "exit", "raise", "nan", "inf", "none", "d"]
    begun = time.monotonic()
    scores = dict(zip(texts, said(reward_set, "judged", *texts), strict=True))
    assert time.monotonic() - begun < 30
    assert [scores[it] for it in "abcd"] == [Score(2.0)] * 4
    assert scores["none"] == Score()
    errors = {text: score.error for text, score in scores.items() if score.error}
    assert errors == {
        "hang": "judged took longer than 0.5 s and was killed",
        "die": "judged ended its process, which exited with 3",
        "kill": "judged ended its process, which was ended by SIGKILL",
        "exit": "SystemExit: enough (own.py:26)",
        "raise": "KeyError: 'nothing\\nhere' (own.py:28)",
        "nan": "judged returned nan; expected a finite number or None",
        "inf": "judged returned -inf; expected a finite number or None",
    }
    assert all(score.value is None for score in scores.values() if score.error)


def test_a_function_may_explain_its_number(reward_set: RewardSet) -> None:
    assert said(reward_set, "brevity", "a", "abc") == [Score(1.0, reply="too long"), Score(0.5)]


def test_true_and_false_are_1_and_0_and_numpy_s_numbers_are_numbers(reward_set: RewardSet) -> None:
    texts = ["true", "np.true", "np.false", "np.float32", "np.int64"]
    assert [score.value for score in said(reward_set, "judged", *texts)] == [
        1.0,
        1.0,
        0.0,
        0.5,
        3.0,
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("word", "'1.0' of type str"),
        ("list", "[1] of type list"),
        ("array", "array(1.) of type ndarray"),
        ("decimal", "Decimal('1') of type Decimal"),
    ],
)
def test_a_value_of_the_wrong_type_stops_the_run_at_the_first(
    reward_set: RewardSet, text: str, kind: str
) -> None:
    """It is a bug that hits some answers and not others, so no share of it is tolerated."""
    with pytest.raises(UserCodeError) as stopped:
        said(reward_set, "judged", *"abcdefgh", text)
    assert str(stopped.value) == (
        f"the reward judged returned {kind}; expected a number, True, False or None; it judged the answer {text!r}; "
        "return float(...) of it"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_killed_function_started_is_killed_with_it(reward_set: RewardSet) -> None:
    mark = f"taut-{os.getpid()}-{time.monotonic_ns()}"
    (score,) = said(reward_set, "judged", "hang", mark=mark)
    assert score.error is not None

    def is_there() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if mark in path.read_text():
                    return True
            except OSError:
                continue
        return False

    deadline = time.monotonic() + 30
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_there()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_worker_left_that_ended_by_itself_is_killed(own: Path, tmp_path: Path) -> None:
    with open_rewards(f"{own}:leaving", ONE) as alone:
        assert said(alone, "leaving", "go", mark=str(tmp_path)) == [Score(1.0)]
        (_, child) = map(int, (tmp_path / "pids").read_text().split())
        deadline = time.monotonic() + 30
        while is_there(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_there(child)
        assert said(alone, "leaving", "") == [Score(1.0)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "close",
            "careless ended its process, which found its descriptors closed; expected a reward",
        ),
        ("fork", "careless forked and returned in the copy, too; expected it to return once"),
        ("write", "careless ended its process, which had something else written into its pipe"),
        ("fork, then exit", None),
        ("escape", None),
    ],
)
def test_a_careless_reward_is_an_error_in_one_line(
    own: Path, tmp_path: Path, text: str, error: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of its answer alone, without a word of its process; what it leaves behind ends with the worker."""
    with open_rewards(f"{own}:careless", ONE) as alone:
        (score,) = said(alone, "careless", text, mark=str(tmp_path))
        assert score == Score(1.0) if error is None else str(score.error).startswith(error)
        assert "\n" not in str(score.error)
        assert said(alone, "careless", "none") == [Score(1.0)]
    if text == "escape" and sys.platform == "linux":
        assert not is_there(int((tmp_path / "escaped").read_text()))
    assert "Traceback" not in capfd.readouterr().err


def test_what_kept_a_reward_from_being_loaded_may_pass(own: Path, tmp_path: Path) -> None:
    path = tmp_path / "loaded.py"
    path.write_text(f"open({str(tmp_path / 'there')!r})\ndef f(): return 1.0\n")
    (tmp_path / "there").touch()
    with open_rewards(f"{path}:f", ONE) as alone:
        forget_processes(alone)
        (tmp_path / "there").unlink()
        (score,) = said(alone, "f", "a")
        assert "FileNotFoundError" in str(score.error)
        (tmp_path / "there").touch()
        assert said(alone, "f", "a") == [Score(1.0)]


def test_a_process_that_cannot_be_started_is_an_error_of_the_answer(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_rewards(f"{own}:where", ONE) as alone:
        forget_processes(alone)

        def refuse(*_: object, **__: object) -> None:
            raise BlockingIOError(11, "no more processes")

        with monkeypatch.context() as patch:
            patch.setattr("taut.io.worker_process.subprocess.Popen", refuse)
            (score,) = said(alone, "where", "a")
        assert "a worker cannot be started ([Errno 11] no more processes)" in str(score.error)
        assert said(alone, "where", "a") == [Score(2.0)]


def test_two_files_of_one_name_are_two(tmp_path: Path) -> None:
    code = "import sys\nVALUE = {}\ndef f(): return sys.modules[__name__].VALUE\n"
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "own.py").write_text(code.format(number))
    specs = [RewardSpec(name=f"{tmp_path}/{k}/own.py:f", label=str(k)) for k in (1, 2)]
    with open_rewards(specs, ONE) as reward_set:
        (reward_result,) = reward_set.grade([RewardInput(text="a")])
    assert reward_result.parts == {"1": Score(1.0), "2": Score(2.0)}


def test_threads_of_a_function_s_own_have_the_time_of_all_cores(own: Path) -> None:
    with open_rewards([RewardSpec(name=f"{own}:left", timeout=100)], ONE) as alone:
        (score,) = said(alone, "left", "a")
    assert score.value == pytest.approx(SPARE * 101 * (os.cpu_count() or 1), rel=0.1)


def test_a_reward_may_print_where_nothing_can_be_printed(own: Path) -> None:
    kept, full = os.dup(1), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    try:
        with open_rewards(f"{own}:talks", ONE) as alone:
            found = said(alone, "talks", "a", "b")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(full)
    assert found == [Score(1.0), Score(1.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_are_killed_before_what_trains(own: Path) -> None:
    with open_rewards(f"{own}:first", ONE) as alone:
        assert said(alone, "first", "a") == [Score(1000.0)]


def test_ctrl_c_ends_what_judges_in_the_caller_s_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(ExactMatch, "__call__", interrupted)
    with open_rewards("exact_match") as here, pytest.raises(KeyboardInterrupt):
        here.grade([RewardInput(text="a", references=("a",))])


def test_time_limits_hold_in_any_thread(reward_set: RewardSet) -> None:
    found: list[Score] = []
    thread = threading.Thread(target=lambda: found.extend(said(reward_set, "judged", "hang", "a")))
    thread.start()
    thread.join(10)
    assert [bool(score.error) for score in found] == [True, False]


def test_workers_load_no_torch_and_hear_no_ctrl_c(reward_set: RewardSet) -> None:
    assert said(reward_set, "where", "a") == [Score(2.0)]


def test_an_expression_that_never_ends_is_ended(reward_set: RewardSet) -> None:
    slow = Score(0.0, unjudged="regex took longer than 0.3 s and was killed")
    texts = ["aaaa", "b", "a" * 40 + "b", "a"]
    assert said(reward_set, "regex", *texts) == [Score(1.0), Score(0.0), slow, Score(1.0)]
    assert [it.value for it in said(reward_set, "whole", "abc", "xabc", "abcx")] == [1.0, 0.0, 0.0]


def test_the_same_answers_have_the_same_verdicts(reward_set: RewardSet, own: Path) -> None:
    texts = [str(number) for number in range(20)]
    first = said(reward_set, "drawn", *texts)
    assert len(set(first)) == 20
    assert said(reward_set, "drawn", *reversed(texts)) == first[::-1]
    with open_rewards(f"{own}:drawn", ONE) as alone:
        assert said(alone, "drawn", *texts) == first


def test_the_total_is_the_weighted_sum_of_what_gave_a_number(reward_set: RewardSet) -> None:
    labels = ["brevity", "same", "judged"]
    answers = [
        RewardInput(text="a", references=("a",)),
        RewardInput(text="none"),
        RewardInput(text="raise", references=("a",)),
    ]
    totals = [reward_result.total for reward_result in reward_set.grade(answers, labels)]
    assert totals == [10 * 1.0 + 0.5 * 1 + 1, 10 * 2 / 5, None]
    assert [reward_result.total for reward_result in reward_set.grade(answers[1:2], ["same"])] == [
        None
    ]
    errors = [reward_result.error for reward_result in reward_set.grade(answers, labels)]
    assert errors[:2] == [None, None]
    assert str(errors[2]).startswith("KeyError")


def test_a_tally_counts_what_each_reward_said() -> None:
    scores = [Score(1.0), Score(0.0), Score(), Score(error="late")]
    reward_results = [RewardResult({"a": score, "b": Score()}, score.value) for score in scores]
    found = tally(reward_results)
    assert (found["a"].num_scored, found["a"].num_not_applicable) == (2, 1)
    assert (found["a"].mean, found["a"].errors, found["a"].error_share) == (0.5, ("late",), 0.25)
    assert (found["b"].mean, found["b"].error_share) == (None, 0.0)
    assert tally([]) == {}


def test_no_answers_are_no_verdicts_and_a_closed_panel_judges_none(own: Path) -> None:
    reward_set = open_rewards(f"{own}:where", GradingConfig(workers=1))
    assert reward_set.grade([]) == []
    reward_set.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        reward_set.grade([RewardInput(text="a")])


def test_the_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import os\ndef f(text):\n    return 1.0 if text else os._exit(1)\n")
    with open_rewards(f"{path}:f", GradingConfig(workers=1)) as reward_set:
        path.write_text("def f(text):\n    return 2.0\n")
        scores = [
            reward_result.parts["f"]
            for reward_result in reward_set.grade([RewardInput(text=""), RewardInput(text="a")])
        ]
    assert scores[0].error is not None
    assert scores[1] == Score(1.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exactmatch", "expected one of exact_match, contains, numeric.*did you mean exact_match"),
        ("missing.py:f", "there is no file missing.py"),
        ("{own}:absent", "has no function 'absent'; expected one of .*brevity"),
        ("{own}:", "has no function ''"),
        (
            "{own}:stranger",
            "takes 'tokenizer'; expected parameters by the names text, references, row",
        ),
        ("{own}:positional", "takes 'said'; expected parameters"),
        ("{broken}:f", r"cannot be run: ModuleNotFoundError: .*absent_package"),
        ("{words}:f", "expected a file that ends in .py"),
    ],
)
def test_a_reward_that_cannot_be_had(spec: str, message: str, own: Path, tmp_path: Path) -> None:
    broken, words = tmp_path / "broken.py", tmp_path / "own.txt"
    broken.write_text("import absent_package")
    words.write_text("f")
    with pytest.raises(ConfigError, match=message):
        open_rewards(spec.format(own=own, broken=broken, words=words), GradingConfig(workers=1))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RewardSpec(name="{own}:brevity", options={"bye": 1}), "is given the option 'bye'"),
        (RewardSpec(name="{own}:brevity", options={"text": 1}), "is given the option 'text'"),
        (
            RewardSpec(name="numeric", options={"by": 1}),
            "'by' in the options of the reward numeric",
        ),
    ],
)
def test_options_are_those_the_reward_has(spec: RewardSpec, message: str, own: Path) -> None:
    spec = RewardSpec(name=spec.name.format(own=own), options=spec.options)
    with pytest.raises(ConfigError, match=message):
        open_rewards([spec], GradingConfig(workers=1))


def test_names_of_metrics_are_unique(own: Path) -> None:
    twice = [RewardSpec(name="numeric"), RewardSpec(name="exact_match", label="numeric")]
    with pytest.raises(ConfigError, match="there is another metric 'numeric'"):
        open_rewards(twice)
    with pytest.raises(ConfigError, match="there is another metric 'drawn'"):
        open_rewards(f"{own}:drawn", reserved=["drawn"])


def test_one_name_need_not_be_a_list() -> None:
    specs: list[str | RewardSpec] = ["exact_match", RewardSpec(name="own.py:f")]
    assert files_of("own.py:f") == files_of(specs) == [Path("own.py")]
    assert files_of("exact_match") == []
    with open_rewards("exact_match") as one, open_rewards(["exact_match"]) as listed:
        assert one.names == listed.names == ["exact_match"]


STOPPED = """
import os, signal

def judged(text):
    if text == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return os.getpid()
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[RewardSet]:
    """One worker, whose reward is its process id."""
    (tmp_path / "own.py").write_text(STOPPED)
    with open_rewards(
        [RewardSpec(name=f"{tmp_path / 'own.py'}:judged", timeout=0.7)], ONE
    ) as reward_set:
        yield reward_set


LATE = Score(error="judged took longer than 0.7 s and was killed")


def one(reward_set: RewardSet, text: str) -> tuple[Score, float]:
    """The score of an answer, and how long it took."""
    began = time.monotonic()
    (reward_result,) = reward_set.grade([RewardInput(text=text)])
    return reward_result.parts["judged"], time.monotonic() - began


def require_gone(process: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_worker_that_is_stopped_in_an_answer_is_killed_in_time_and_replaced(
    stopped: RewardSet,
) -> None:
    first, _ = one(stopped, "go")
    assert first.value is not None
    score, seconds = one(stopped, "stop")
    assert score == LATE and seconds < 3
    require_gone(int(first.value))
    second, _ = one(stopped, "go")
    assert second.value is not None and second.value != first.value


@pytest.mark.parametrize("length", [2, 4_000_000])
def test_a_worker_that_is_stopped_between_answers_is_killed_in_time_and_replaced(
    stopped: RewardSet, length: int
) -> None:
    """An answer too long for the pipe's buffer cannot even be sent."""
    first, _ = one(stopped, "go")
    assert first.value is not None
    os.kill(int(first.value), signal.SIGSTOP)
    score, seconds = one(stopped, "x" * length)
    assert score == LATE and seconds < 3
    require_gone(int(first.value))
    second, _ = one(stopped, "x" * length)
    assert second.value is not None and second.value != first.value


def test_a_system_that_does_not_tell_memory_has_no_limit_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """macOS has no /proc; rewards such as math run there as well."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "read_text", lambda path: Path("/nonexistent").stat())
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with _memory(2**30):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


LISTS = """
import asyncio
import numpy as np

def of_trl(completions, prompts, target):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(messages[0]["content"] == right) for messages, right in zip(completions, target)]

async def later(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [len(nums) for nums in columns["nums"]]

class Orm:
    def __init__(self, args=None, **kwargs):
        self.best = 7.0
    def __call__(self, completions, target, **kwargs):
        return [self.best if text == right else None for text, right in zip(completions, target)]

def two(completions):
    return [1.0, 2.0]

def rank(completions, **columns):
    sizes = [len(messages[0]["content"]) for messages in completions]
    return [sum(size > other for other in sizes) / (len(sizes) - 1) for size in sizes]

def above_mean(queries, prompts, labels):
    sizes = np.array([len(query) for query in queries], dtype=float)
    return {"rewards": sizes - sizes.mean(), "extra_logs": {"sizes": sizes, "mean": sizes.mean()}}

class Shares:
    def __call__(self, completions, **columns):
        return [completions.count(text) / len(completions) for text in completions]

def first_fails(completions, **columns):
    raise ValueError(len(completions))

def of_openrlhf(queries, prompts, labels, **kwargs):
    right = [float(q == p + l) for q, p, l in zip(queries, prompts, labels)]
    return {"rewards": np.array(right), "scores": right, "extra_logs": {"seen": len(queries)}}

def listed(queries, prompts, labels):
    return [np.float32(len(prompt)) for prompt in prompts]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, worth=1.0):
    assert data_source == "sums" and extra_info == {"index": 3}
    return {"score": worth * (solution_str == ground_truth), "pred": solution_str}

def of_verl(data_source, solution_str, ground_truth, extra_info):
    return solution_str == ground_truth

def no_rewards(queries, prompts, labels):
    return {"scores": [1.0]}

def tokens(completions, completion_ids):
    return [1.0]

def unknown(solution_str, ground_truth, num_turns):
    return 1.0
"""


def test_functions_of_other_frameworks_are_called_with_lists_of_one(tmp_path: Path) -> None:
    path = tmp_path / "lists.py"
    path.write_text(LISTS)
    asked = ({"role": "user", "content": "?"},)
    row = {"target": "yes", "nums": [1, 2, 3]}
    answers = [RewardInput(text=text, row=row, prompt=asked) for text in ("yes", "no")]
    names = [f"{path}:{name}" for name in ("of_trl", "later", "Orm")]
    with open_rewards(names, ONE) as reward_set:
        parts = [reward_result.parts for reward_result in reward_set.grade(answers)]
    assert [part["of_trl"].value for part in parts] == [1.0, 0.0]
    assert [part["later"].value for part in parts] == [3.0, 3.0]
    assert [part["Orm"].value for part in parts] == [7.0, None]


def test_functions_that_take_lists_get_the_answers_to_a_prompt_and_may_compare_them(
    tmp_path: Path,
) -> None:
    """Three answers to one row, and one to another: each is compared with those to its own prompt."""
    path = tmp_path / "lists.py"
    path.write_text(LISTS)
    asked = ({"role": "user", "content": "?"},)
    row: dict[str, object] = {"target": "yes"}
    texts = ("a", "bbb", "a")
    answers = [RewardInput(text=text, row=row, prompt=asked) for text in texts]
    answers.append(RewardInput(text="cc", row=dict(row), prompt=asked))
    names = [f"{path}:{name}" for name in ("above_mean", "Shares", "first_fails")]
    with open_rewards(names, ONE) as reward_set:
        parts = [reward_result.parts for reward_result in reward_set.grade(answers)]
    mean = (2 + 4 + 2) / 3  # of "?" and the answer
    assert [part["above_mean"].value for part in parts] == [2 - mean, 4 - mean, 2 - mean, 0.0]
    assert "'sizes': 4.0" in str(parts[1]["above_mean"].reply)
    assert [part["Shares"].value for part in parts] == [2 / 3, 1 / 3, 2 / 3, 1.0]
    errors = [str(part["first_fails"].error) for part in parts]
    assert [error.partition(" (")[0] for error in errors] == ["ValueError: 3"] * 3 + [
        "ValueError: 1"
    ]
    with open_rewards([f"{path}:rank"], ONE) as reward_set:
        values = [reward_result.total for reward_result in reward_set.grade(answers[:3])]
    assert values == [0.0, 1.0, 0.0]


def test_functions_of_openrlhf_and_verl_are_called_by_their_own_names(tmp_path: Path) -> None:
    """OpenRLHF's prompt of one message is its text; verl's truth is in the row, or the row's right answer."""
    path = tmp_path / "lists.py"
    path.write_text(LISTS)
    row = {"data_source": "sums", "extra_info": {"index": 3}}
    asked = ({"role": "user", "content": "1+1="},)
    truth = {"reward_model": {"style": "rule", "ground_truth": "2"}}
    answers = [
        RewardInput(text="2", references=("2",), row=row, prompt=asked),
        RewardInput(text="3", references=("3",), row=row | truth, prompt="1+1="),
    ]
    names = [f"{path}:{name}" for name in ("of_openrlhf", "listed", "of_verl")]
    twice = RewardSpec(name=f"{path}:compute_score", options={"worth": 2.0})
    with open_rewards([*names, twice], ONE) as reward_set:
        parts = [reward_result.parts for reward_result in reward_set.grade(answers)]
    assert [part["of_openrlhf"].value for part in parts] == [1.0, 1.0]
    assert "'seen': 1" in str(parts[0]["of_openrlhf"].reply)
    assert [part["listed"].value for part in parts] == [4.0, 4.0]
    assert [part["of_verl"].value for part in parts] == [1.0, 0.0]
    assert [part["compute_score"].value for part in parts] == [2.0, 0.0]
    assert parts[1]["compute_score"].reply == "{'pred': '3'}"


@pytest.mark.parametrize(
    ("name", "says"), [("two", "expected a list of 1"), ("no_rewards", "'rewards'")]
)
def test_another_frameworks_function_that_returns_something_else_stops_the_run(
    tmp_path: Path, name: str, says: str
) -> None:
    path = tmp_path / "lists.py"
    path.write_text(LISTS)
    with (
        open_rewards([f"{path}:{name}"], ONE) as reward_set,
        pytest.raises(UserCodeError, match=says),
    ):
        reward_set.grade([RewardInput(text="2")])


@pytest.mark.parametrize(("name", "says"), [("tokens", "completion_ids"), ("unknown", "num_turns")])
def test_a_parameter_of_another_framework_without_a_value_is_refused_before_the_run(
    tmp_path: Path, name: str, says: str
) -> None:
    path = tmp_path / "lists.py"
    path.write_text(LISTS)
    with pytest.raises(ConfigError, match=says):
        open_rewards([f"{path}:{name}"], ONE)
