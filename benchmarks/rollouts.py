"""What rollouts take against a simulated server: ``python benchmarks/rollouts.py [--quick]``.

The server answers each turn after a time drawn from a log-normal distribution (median 1, sigma 1 of its logarithm), the
environment after one a tenth as long, and the judge each answer after one as long as a turn; a unit of time is
``--unit`` seconds. Nothing is computed while they wait, so what is measured is who waits for whom. Texts, templates,
environments, feeds and rollouts are the real ones of a run; only the server, the judge and the training are not there.

    64 x 8      64 trajectories of 8 turns, all under way at a time
    256 x 16    256 trajectories of 16 turns, 128 requests under way at most
    judged      12 rollouts of 16 groups of 4 trajectories of 4 turns, 64 requests and 32 judgments under way at most,
                and a training of 10 units after each; a fifth of the unit
    slow judge  the same, and judges that take three times as long as a turn

Compared in one run, with the same times for the same turns and answers:

    together    the next turns of all trajectories are asked for at once, and the slowest is waited for; judged after
                the last trajectory
    apart       each trajectory goes on as soon as its answer is there
    lag=k       that, each group judged as soon as it is finished, and with k above 0 while the training goes on
    free        the same with servers and judges that take everything at once: what the lag alone costs
    bound       what no order can be faster than: the longest trajectory alone, or all times by the places there are; of
                several rollouts the server's, the judge's or the training's times, whichever are the most. It knows
                nothing of lag

Seconds of this process's processor time are printed: where they are no small part of the others, what is measured is
the machine. Results go to a JSON file and a table. Exit status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from machine import describe, print_machine
from taut.config import from_mapping
from taut.data.order import Order
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.prompts import PromptRow
from taut.inference.vllm import ServerEngine
from taut.rewards.reward_set import RewardResult
from taut.rl.async_rollouts import AsyncRollouts
from taut.rl.dynamic_sampling import GroupChoice
from taut.rl.environment import EnvironmentPool, Step
from taut.rl.rollout import RolloutRequest, RolloutState
from taut.rl.sampler import sample_trajectories
from taut.rl.settings import EnvironmentConfig, RolloutConfig
from taut.rl.turns import Bridge
from taut.rl.worker import RolloutWorker
from taut.train.distributed import Ranks
from taut.types import Completion, Prompt

RESULTS = Path(".cache/benchmarks/rollouts.json")
SIGMA = 1.0
"""Deviation of the logarithm of a server's time."""
ENVIRONMENT = 0.1
"""The environment's times by the server's."""
TOKENS = 4
"""Of a turn."""
CONTEXT = 8192
SPECIALS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEAR = 0.9
"""The least that the bound may be of what a rollout takes."""


@dataclass(frozen=True)
class Case:
    """Rollouts, and how many times as fast as together they shall be."""

    name: str
    groups: int
    turns: int
    places: int
    target: float
    size: int = 1
    """Trajectories of a group."""
    rollouts: int = 1
    judge: float = 1.0
    """The judge's times by the server's."""
    judge_places: int = 32


CASES = (Case("64 x 8", 64, 8, 64, 2.5), Case("256 x 16", 256, 16, 128, 4.0))
JUDGED = (
    Case("judged", 16, 4, 64, 1.0, size=4, rollouts=12),
    Case("slow judge", 16, 4, 64, 1.0, size=4, rollouts=12, judge=3.0),
)
FREE = 10**6
"""Places of servers and judges that never let anything wait."""
TRAINING = 10.0
"""Units of a training."""
TARGETS = {0: 1.3, 1: 2.0, 4: 2.0}
"""How many times as fast as together judged rollouts shall be, by their lag."""


class Clock:
    """Sets the results of futures when it is time, for at most so many at once: those of the lowest priority number
    first, then those that came first.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[int, int, float, Future[None]]] = []
        self._due: list[tuple[float, int, Future[None]]] = []
        self._changed = Condition()
        self._count = 0
        Thread(target=self._run, daemon=True).start()

    def start(self, seconds: float, priority: int = 0) -> Future[None]:
        future: Future[None] = Future()
        with self._changed:
            self._count += 1
            heapq.heappush(self._waiting, (priority, self._count, seconds, future))
            self._fill()
            self._changed.notify()
        return future

    def _fill(self) -> None:
        while self._free and self._waiting:
            _, count, seconds, future = heapq.heappop(self._waiting)
            if not future.set_running_or_notify_cancel():
                continue
            self._free -= 1
            heapq.heappush(self._due, (time.monotonic() + seconds, count, future))

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                while not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    now = time.monotonic()
                *_, future = heapq.heappop(self._due)
                self._free += 1
                self._fill()
            future.set_result(None)


@dataclass
class Times:
    """The times of a case, in seconds, by prompt, trajectory of its group and turn."""

    server: Any
    environment: Any
    judge: Any
    """By prompt and trajectory."""
    training: float

    @classmethod
    def draw(cls, case: Case, unit: float, seed: int) -> Times:
        random = np.random.default_rng([case.groups * case.size, case.turns, seed])
        shape = case.groups * case.rollouts, case.size, case.turns
        own, others = (unit * np.exp(SIGMA * random.standard_normal(shape)) for _ in range(2))
        judge = case.judge * unit * np.exp(SIGMA * random.standard_normal(shape[:2]))
        return cls(own, ENVIRONMENT * others, judge, TRAINING * unit)

    def bound(self, case: Case) -> float:
        """No order is faster."""
        longest = float((self.server + self.environment).sum(2).max())
        least = max(longest, float(self.server.sum()) / case.places)
        if case.rollouts == 1:
            return least
        judged = float(self.judge.sum()) / case.judge_places
        return max(least, judged, case.rollouts * self.training)


class Server(ServerEngine):
    """Answers when it is time, with tokens that end at a stop."""

    def __init__(self, case: Case, times: Times, stop: int) -> None:
        self.clock, self.times, self.stop, self.case = Clock(case.places), times, stop, case
        self.version = 0

    @property
    def places(self) -> int:
        return self.case.places

    def require_possible(self, prompts: Any, sampling: Any) -> None:
        """All are."""

    def shared(self, work: Callable[[], Any], ranks: Any) -> list[Any]:
        return [work()]

    def close(self) -> None:
        """Nothing to close."""

    def update(self, version: int) -> None:
        self.version = version

    @property
    def sync(self) -> Any:  # type: ignore[override]
        """What says the version of the weights."""
        return SimpleNamespace(version=self.version)

    def start(self, prompt: Prompt, index: int, sampling: Any, *rest: Any) -> Any:
        """As ``ServerEngine.start``, whose last argument is the priority."""
        path, turn = prompt.id.split("@")
        row, sample = path.split("#")
        seconds = self.times.server[int(row.split()[0]), int(sample), int(turn)]
        self.started[prompt.id] = self.version
        return self.clock.start(float(seconds), int(rest[-1]) if rest else 0)

    @cached_property
    def started(self) -> dict[str, int]:
        """The version of the weights when a prompt was asked."""
        return {}

    def completion(self, prompt: Prompt, index: int, sampling: Any, answer: Any) -> Completion:
        answer.result()
        ids_N = np.array([len(SPECIALS)] * (TOKENS - 1) + [self.stop])
        version = self.started.pop(prompt.id)
        return Completion(
            prompt.id, index, ids_N, np.zeros(TOKENS), None, "stop", "", version=version
        )

    def generate(self, prompts: Any, sampling: Any, on_done: Any = None) -> list[Completion]:
        answers = [self.start(prompt, 0, sampling) for prompt in prompts]
        pairs = zip(prompts, answers, strict=True)
        return [self.completion(prompt, 0, sampling, answer) for prompt, answer in pairs]


class Judge:
    """A reward set that takes its time for each answer."""

    def __init__(self, case: Case, times: Times) -> None:
        self.clock, self.times = Clock(case.judge_places), times

    def close(self) -> None:
        """Nothing to close."""

    def grade(self, answers: Any) -> list[RewardResult]:
        """The answers of a group, or of several, in their order."""
        seen: Counter[int] = Counter()
        waited = []
        for answered in answers:
            number = answered.row["number"]
            waited.append(self.clock.start(float(self.times.judge[number, seen[number]])))
            seen[number] += 1
        for future in waited:
            future.result()
        return [RewardResult({}, float(number % 2)) for number, _ in enumerate(waited)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIALS[1],
        additional_special_tokens=SPECIALS[:1],
        chat_template=TEMPLATE,
    )


def environment_of(case: Case, times: Times) -> Callable[[], Any]:
    """An environment that takes its time and asks for the next turn."""
    begun: Counter[int] = Counter()

    class Asking:
        def reset(self, row: dict[str, Any]) -> None:
            self.number, self.turn = row["number"], 0
            self.sample = begun[self.number] % case.size
            begun[self.number] += 1

        def step(self, text: str, calls: list[Any]) -> Step:
            time.sleep(float(times.environment[self.number, self.sample, self.turn]))
            self.turn += 1
            if self.turn == case.turns:
                return Step(done=True)
            return Step([{"role": "user", "content": "Go on."}])

    return Asking


def worker_of(case: Case, times: Times, renderer: Renderer, lag: int) -> RolloutWorker:
    """What a run has to generate and judge, with this server, environment and judge."""
    stops = derive_stop_set(renderer).ids
    config = EnvironmentConfig(
        name="tools",
        tools=["calculator"],
        max_turns=case.turns + 1,
        workers=case.groups * case.size * 2,
    )
    environment, bridge = environment_of(case, times), Bridge(renderer, stops)
    pool = EnvironmentPool(config, environment, bridge, None, (), CONTEXT, None)
    messages = ({"role": "user", "content": "Begin."},)
    ids_T = renderer.prompt_ids(messages)
    rows = [
        PromptRow(f"{n}", f"{n}", ids_T, messages, (), None, {"number": n})
        for n in range(case.groups * case.rollouts)
    ]
    keys = {"n": case.size, "lag": lag, "engine": "server", "urls": "http://127.0.0.1/v1"}
    reward_set: Any = Judge(case, times) if case.rollouts > 1 else None
    return RolloutWorker(
        config=from_mapping(RolloutConfig, keys),
        prompts=rows,
        engine=Server(case, times, min(stops)),
        reward_set=reward_set,
        environments=pool,
        seed=0,
        ranks=Ranks(0, 1, torch.device("cpu")),
        is_judged=reward_set is not None,
    )


def train(
    case: Case, times: Times, renderer: Renderer, *, lag: int = 0, is_together: bool = False
) -> float:
    """Seconds of the rollouts, and of the training after each of several."""
    worker = worker_of(case, times, renderer, lag)
    lagging = AsyncRollouts(worker, GroupChoice(), RolloutState())
    order = Order((len(worker.prompts),), (1.0,), 0, case.groups, is_shuffled=False)
    began, seen = time.perf_counter(), []
    for number in range(case.rollouts):
        worker.engine.update(number)
        first = number * case.groups
        if is_together:
            rows = worker.prompts[first : first + case.groups]
            sampling = worker.config.sampling(number)
            sampled = sample_trajectories(worker.engine, rows, sampling, worker.environments)
            worker.judge(sampled)
        elif lag:
            rollout = lagging.take(RolloutRequest(number, order, number, case.rollouts - number))
            lagging.commit(rollout, [])
            sampled = [t for group in rollout.all_groups for t in group.trajectories]
        else:
            rollout = worker.take(RolloutRequest(number, order))
            sampled = [t for group in rollout.all_groups for t in group.trajectories]
        assert all(t.error is None and t.num_turns == case.turns for t in sampled)
        assert all(number - t.version <= lag for t in sampled)
        seen += [t.row.id for t in sampled]
        if case.rollouts > 1:
            time.sleep(times.training)
    seconds = time.perf_counter() - began
    if lag:
        lagging.close()
    assert sorted(seen) == sorted(row.id for row in worker.prompts for _ in range(case.size))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small case, one round")
    parser.add_argument("--unit", type=float, default=0.5, help="median seconds of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    names = [case.name for case in (*CASES, *JUDGED)]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE")
    arguments = parser.parse_args()
    machine = describe(1)
    print_machine(machine)
    renderer = Renderer(make_tokenizer())
    results: list[dict[str, Any]] = []
    is_met = True
    print(
        f"{'':24}{'together':>10}{'seconds':>9}{'CPU':>7}{'bound':>8}{'faster':>8}{'of the bound':>14}"
    )

    def run(
        case: Case, times: Times, how: str, unit: float, *, lag: int = 0, is_together: bool = False
    ) -> dict[str, Any]:
        began = time.process_time()
        seconds = train(case, times, renderer, lag=lag, is_together=is_together)
        cpu = time.process_time() - began
        return {
            "case": asdict(case), "how": how, "unit": unit, "seconds": seconds, "cpu": cpu,
            "bound": times.bound(case),
        }  # fmt: skip

    def show(found: dict[str, Any], together: float) -> float:
        """How many times as fast it is."""
        results.append(found | {"together": together})
        faster, near = together / found["seconds"], found["bound"] / found["seconds"]
        numbers = f"{together:10.2f}{found['seconds']:9.2f}{found['cpu']:7.2f}{found['bound']:8.2f}"
        name = f"{found['case']['name']} {found['how']}"
        print(f"{name:24}{numbers}{faster:7.2f}x{near:14.0%}", flush=True)
        return faster

    chosen = [case for case in CASES if case.name in arguments.cases]
    for case in chosen[:1] if arguments.quick else chosen:
        for number in range(1 if arguments.quick else arguments.rounds):
            times = Times.draw(case, arguments.unit, number)
            found = run(case, times, "apart", arguments.unit)
            together = run(case, times, "together", arguments.unit, is_together=True)
            is_met &= show(found, together["seconds"]) >= case.target
            is_met &= found["bound"] / found["seconds"] >= NEAR
    for case in JUDGED:
        if arguments.quick or case.name not in arguments.cases:
            continue
        unit = arguments.unit / 5
        times = Times.draw(case, unit, 0)
        seconds = run(case, times, "together", unit, is_together=True)["seconds"]
        for lag, target in TARGETS.items():
            is_met &= show(run(case, times, f"lag={lag}", unit, lag=lag), seconds) >= target
        free = replace(case, places=FREE, judge_places=FREE)
        for lag in [lag for lag in TARGETS if lag]:
            show(run(free, times, f"lag={lag} free", unit, lag=lag), seconds)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    print(f"\n{RESULTS}")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
