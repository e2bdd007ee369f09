"""Faults of the engine that generates on the weights that train."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from tests.checks.planting import Place, fault

from taut.checks.session import Session
from taut.inference import engine, local
from taut.inference.local import draw


@fault("engine.logps", says="engine and trainer differ")
def log_probs_of_another_temperature(place: Place, is_faulty: bool) -> Session:
    """The engine reports logprobs of colder logits than it was asked for."""

    def colder(logits_BV: Any, sampling: Any, history: Any, uniform_B: Any) -> Any:
        return draw(logits_BV, replace(sampling, temperature=0.7), history, uniform_B)

    if is_faulty:
        place.patch.setattr(local, "draw", colder)
    return place.session()


@fault("engine.logps", says="engine and trainer differ")
def an_engine_with_weights_of_its_own(place: Place, is_faulty: bool) -> Session:
    """The engine has a copy of the weights, and the updates never reach it."""
    make = local.LocalEngine.__init__

    def apart(self: Any, scorer: Any, *args: Any, **keywords: Any) -> None:
        other = copy.deepcopy(scorer)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.02)
        make(self, other, *args, **keywords)

    if is_faulty:
        place.patch.setattr(local.LocalEngine, "__init__", apart)
    return place.session()


@fault("engine.logps", says="engine and trainer differ")
def positions_that_stand_still(place: Place, is_faulty: bool) -> Session:
    """Each new token is given the position of the last one of the prompt."""
    if is_faulty:
        place.patch.setattr(local.Group, "depth", property(lambda group: group.size))
    return place.session()


@fault("engine.logps", says="engine and trainer differ")
def ids_that_are_not_those_sampled(place: Place, is_faulty: bool) -> Session:
    """What is handed on has been written as text and tokenized again."""
    make = local.LocalEngine._completion

    def again(self: Any, row: Any, sampling: Any) -> Any:
        done = make(self, row, sampling)
        ids_N = done.ids_N[::-1].copy()  # as many ids, and others
        return replace(done, ids_N=ids_N)

    if is_faulty:
        place.patch.setattr(local.LocalEngine, "_completion", again)
    return place.session()


@fault("engine.seed", says="asked the same again")
def draws_that_no_seed_reaches(place: Place, is_faulty: bool) -> Session:
    """Each call draws from another stream."""
    calls: list[int] = []

    def another(seed: int, prompt_id: str, index: int) -> int:
        calls.append(index)
        return engine.stream_seed(seed + len(calls), prompt_id, index)

    if is_faulty:
        place.patch.setattr(local, "stream_seed", another)
    return place.session()


@fault("engine.seed", says="asked with fewer others")
def one_stream_for_all_that_is_generated(place: Place, is_faulty: bool) -> Session:
    """A completion's stream is chosen by its place in the batch."""
    generate = local.LocalEngine.generate
    begun: list[str] = []

    def placed(seed: int, prompt_id: str, index: int) -> int:
        begun.append(prompt_id)
        return engine.stream_seed(seed, str(len(begun)), index)

    def anew(self: Any, *args: Any, **keywords: Any) -> Any:
        begun.clear()
        return generate(self, *args, **keywords)

    if is_faulty:
        place.patch.setattr(local, "stream_seed", placed)
        place.patch.setattr(local.LocalEngine, "generate", anew)
    return place.session()
