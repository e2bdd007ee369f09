"""What a rollout with several turns takes against a simulated server: ``python benchmarks/rollouts.py [--quick]``.

The server answers each turn after a time drawn from a log-normal distribution (median 1, sigma 1 of its logarithm), and
the environment after one a tenth as long; a unit of time is ``--unit`` seconds. Nothing is computed while they wait, so
what is measured is who waits for whom. Requests, texts, templates and environments are the real ones of a run; only
the way to the server is not there.

    64 x 8      64 trajectories of 8 turns, all under way at a time
    256 x 16    256 trajectories of 16 turns, 128 requests under way at most

Compared in one run, with the same times for the same turns:

    apart       each trajectory goes on as soon as its answer is there
    together    the next turns of all trajectories are asked for at once, and the slowest is waited for
    bound       what no order can be faster than: the longest trajectory alone, or all times by the places there are

Results go to a JSON file and a table. Exit status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from machine import describe, print_machine
from taut.config import from_mapping
from taut.data.prompts import PromptRow
from taut.data.render import Renderer
from taut.data.stop_tokens import derive_stop_set
from taut.inference.engine import Sampling, Texts
from taut.inference.vllm import ServerConfig, ServerEngine
from taut.rl.environment import EnvironmentConfig, EnvironmentPool, Step
from taut.rl.feed import Feed
from taut.rl.sampler import sample_trajectories
from taut.rl.turns import Bridge

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
    """So many trajectories, and how many times as fast they shall be apart."""

    trajectories: int
    turns: int
    concurrency: int
    target: float

    @property
    def name(self) -> str:
        return f"{self.trajectories} x {self.turns}"


CASES = (Case(64, 8, 64, 2.5), Case(256, 16, 128, 4.0))


class Clock:
    """Sets the results of futures when it is time."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Future[Any], Any]] = []
        self._changed = Condition()
        self._count = 0
        Thread(target=self._run, daemon=True).start()

    def after(self, seconds: float, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + seconds, self._count, future, value))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                while not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    now = time.monotonic()
                _, _, future, value = heapq.heappop(self._due)
            future.set_result(value)


@dataclass
class Times:
    """The times of a case, in seconds, by trajectory and turn: of the server and of the environment."""

    server: Any
    environment: Any

    @classmethod
    def draw(cls, case: Case, unit: float, seed: int) -> Times:
        random = np.random.default_rng([case.trajectories, case.turns, seed])
        shape = case.trajectories, case.turns
        own, others = (unit * np.exp(SIGMA * random.standard_normal(shape)) for _ in range(2))
        return cls(own, ENVIRONMENT * others)

    def bound(self, case: Case) -> float:
        """No order is faster: the longest trajectory, or the server's times by its places."""
        longest = float((self.server + self.environment).sum(1).max())
        return max(longest, float(self.server.sum()) / case.concurrency)


@dataclass
class Endpoint:
    """Answers when it is time, with tokens that end at a stop."""

    clock: Clock
    times: Times
    size: int
    """Tokens of a row's prompt, the last of which is its number."""
    stop: int
    url: str = "http://127.0.0.1/v1"
    section: str = "rollout."
    asked: dict[int, int] = field(default_factory=dict)

    def start(self, path: str, body: dict[str, Any]) -> Future[Any]:
        number = body["prompt"][self.size - 1] - len(SPECIALS)
        turn = self.asked[number] = self.asked.get(number, -1) + 1
        ids = [len(SPECIALS)] * (TOKENS - 1) + [self.stop]
        choice = {
            "finish_reason": "stop",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [-1.0] * len(ids)},
        }
        return self.clock.after(float(self.times.server[number, turn]), {"choices": [choice]})

    def close(self) -> None:
        """Nothing is open."""


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

    class Asking:
        def reset(self, row: dict[str, Any]) -> None:
            self.number, self.turn = row["number"], 0

        def step(self, text: str, calls: list[Any]) -> Step:
            time.sleep(float(times.environment[self.number, self.turn]))
            self.turn += 1
            if self.turn == case.turns:
                return Step(done=True, reward=1.0)
            return Step([{"role": "user", "content": "Go on."}])

    return Asking


def roll(case: Case, times: Times, renderer: Renderer, *, is_apart: bool) -> float:
    """Seconds of a rollout."""
    stops = derive_stop_set(renderer).ids
    config = EnvironmentConfig(
        name="tools", tools=["calculator"], max_turns=case.turns + 1, workers=case.trajectories
    )
    environment, bridge = environment_of(case, times), Bridge(renderer, stops)
    pool = EnvironmentPool(config, environment, bridge, None, (), CONTEXT, None)
    messages = ({"role": "user", "content": "Begin."},)
    ids = renderer.prompt_ids(messages)
    rows = [  # a row's number is the last id of its prompt
        PromptRow(
            f"{n}", f"{n}", np.append(ids, n + len(SPECIALS)), messages, (), None, {"number": n}
        )
        for n in range(case.trajectories)
    ]
    endpoint: Any = Endpoint(Clock(), times, len(rows[0].ids_T), min(stops))
    keys = from_mapping(ServerConfig, {"concurrency": case.concurrency})
    texts = Texts(renderer.tokenizer, stops)
    engine = ServerEngine(endpoint, texts, keys, "model", "processed", CONTEXT, CONTEXT)
    began = time.perf_counter()
    if is_apart:
        with closing(Feed(engine, Sampling(), pool, None)) as feed:
            for number, row in enumerate(rows):
                feed.ask(number, row)
            found = []
            while feed.is_busy:
                found += feed.next().trajectories
    else:
        found = sample_trajectories(engine, rows, Sampling(), pool)
    seconds = time.perf_counter() - began
    assert all(t.error is None and t.num_turns == case.turns for t in found), found[0].error
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small case, one round")
    parser.add_argument("--unit", type=float, default=0.5, help="median seconds of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    machine = describe(1)
    print_machine(machine)
    renderer = Renderer(make_tokenizer())
    results, is_met = [], True
    print(f"{'':10}{'together':>10}{'apart':>8}{'bound':>8}{'faster':>8}{'of the bound':>14}")
    for case in CASES[:1] if arguments.quick else CASES:
        for number in range(rounds):
            times = Times.draw(case, arguments.unit, number)
            bound = times.bound(case)
            apart = roll(case, times, renderer, is_apart=True)
            other = roll(case, times, renderer, is_apart=False)
            faster, near = other / apart, bound / apart
            results.append({"case": asdict(case), "round": number, "unit": arguments.unit,
                            "apart": apart, "together": other, "bound": bound})  # fmt: skip
            is_met &= faster >= case.target and near >= NEAR
            print(
                f"{case.name:10}{other:10.2f}{apart:8.2f}{bound:8.2f}{faster:7.2f}x{near:14.0%}",
                flush=True,
            )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    print(f"\n{RESULTS}")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
