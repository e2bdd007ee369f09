"""Faults of runs on answers that are judged: their data, their reference, their scores."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.checks.faults.attention import _reaching
from tests.checks.planting import Place, fault
from tests.helpers.chat_runs import WORDS
from torch import Tensor
from transformers import AutoModelForCausalLM

from taut.attention.layout import Layout
from taut.checks.session import Session
from taut.data import batching
from taut.losses import preference
from taut.methods.reference import Start
from taut.models import save
from taut.models.lora.adapters import apply_lora
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.types import Packed

NUM_ROWS = 12


def compared(number: int = NUM_ROWS, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of answers, the better of which has a word of its own."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))

    return [
        {"prompt": f"{text(12)}?", "chosen": f" {text(6)} blue", "rejected": f" {text(6)} red"}
        for _ in range(number)
    ]


def labeled(number: int = NUM_ROWS) -> list[dict[str, Any]]:
    """Good answers and bad ones, one after the other."""
    rows = compared(number)
    sides = ("chosen", "rejected")
    return [
        {"prompt": row["prompt"], "completion": row[sides[at % 2]], "label": at % 2 == 0}
        for at, row in enumerate(rows)
    ]


def turned(row: dict[str, Any]) -> dict[str, Any]:
    """A pair the other way round."""
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


# -- data


@fault("data.pairs", says="contradict", part="quick")
def sides_that_were_swapped_while_joining(place: Place, is_faulty: bool) -> Session:
    """The same pairs came from two files, one of which had its columns the other way round."""
    rows = compared()
    again = [turned(row) for row in rows] if is_faulty else compared(seed=1)
    return place.session(data=place.data([*rows, *again]), method="simpo")


@fault("data.flips", says="look flipped", part="quick")
def a_third_of_labels_flipped(place: Place, is_faulty: bool) -> Session:
    """An annotator who mistook the buttons."""
    draw, rows = random.Random(0), compared(600)
    if is_faulty:
        rows = [turned(row) if draw.random() < 0.3 else row for row in rows]
    return place.session(data=place.data(rows), method="simpo")


@fault("data.labels", says="labeled true", part="quick")
def answers_of_one_kind(place: Place, is_faulty: bool) -> Session:
    """The file with the bad answers was forgotten."""
    rows = [{**row, "label": row["label"] or is_faulty} for row in labeled()]
    return place.session(data=place.data(rows), method="kto")


@fault("data.margins", says="no row has a margin", part="quick")
def margins_that_no_row_has(place: Place, is_faulty: bool) -> Session:
    """The loss is told to read margins, and the column has another name."""
    name = "strength" if is_faulty else "margin"
    rows = [{**row, name: 1.0 + at} for at, row in enumerate(compared())]
    return place.session(data=place.data(rows), method="dpo", dpo__margin=0.1)


@fault("data.packing", says="not in one micro-batch with what it is compared with", part="quick")
def pairs_that_are_cut(place: Place, is_faulty: bool) -> Session:
    """Each answer is laid out for itself, and compared with nothing."""
    if is_faulty:
        layouts = batching.layouts

        def apart(trees: Any, *args: Any) -> list[Packed]:
            singles = [replace(tree, samples=(one,)) for tree in trees for one in tree.samples]
            return [packed for one in singles for packed in layouts((one,), *args)]

        place.patch.setattr("taut.data.batching.layouts", apart)
    return place.session(data=place.data(compared()), method="simpo")


# -- the reference


def _adapter(model: Path, directory: Path) -> str:
    """An adapter that has learned something."""
    plain: Any = AutoModelForCausalLM.from_pretrained(model)
    adapted: Any = apply_lora(plain, LoraConfig(rank=2, targets=["q_proj", "v_proj"]))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=draw)
    adapted.save_pretrained(directory)
    return str(directory)


@fault("reference.start", says="adapter left out")
def the_base_model_in_the_place_of_the_adapter(place: Place, is_faulty: bool) -> Session:
    """DPO goes on from an adapter of SFT, and the reference is the model without any."""
    model = place.model()
    if is_faulty:
        init = Start.__init__

        def bare(self: Any, scorer: Any, trained: Any, *rest: Any) -> None:
            init(self, scorer, trained, *rest)
            names = {id(p): name for name, p in scorer.named_parameters()}
            for number, parameter in enumerate(trained):
                if "lora_B" in names[id(parameter)]:
                    self.get_buffer(f"tensor_{number}").zero_()

        place.patch.setattr(Start, "__init__", bare)
    adapter = _adapter(model, place.directory / "adapter")
    return place.session(model, place.data(compared()), method="dpo", lora__adapter=adapter)


@fault("reference.start", says="policy and reference differ by")
def a_reference_in_another_precision(place: Place, is_faulty: bool) -> Session:
    """The policy computes in bfloat16, the reference in float32."""
    if is_faulty:
        streams = Start.streams

        def wide(self: Any, packed: Packed) -> dict[str, Tensor]:
            with torch.autocast("cpu", enabled=False):
                return streams(self, packed)

        place.patch.setattr(Start, "streams", wide)
    return place.session(data=place.data(compared()), method="dpo", dtype="bfloat16")


@fault("reference.start", says="ln 2")
def a_loss_that_is_twice_what_it_is_named_after(place: Place, is_faulty: bool) -> Session:
    """The formula has a factor that nobody asked for."""
    if is_faulty:
        plain = preference.VARIANTS["sigmoid"]
        twice = plain._replace(value=lambda pairs: 2 * plain.value(pairs))
        place.patch.setitem(preference.VARIANTS, "sigmoid", twice)
    return place.session(data=place.data(compared()), method="dpo")


# -- scores


def _read(place: Place, move: Callable[[Packed], Tensor]) -> None:
    """Where a sample is scored once, it is read somewhere else."""
    forward = Scorer.forward

    def moved(self: Any, packed: Packed, *args: Any, **keywords: Any) -> Any:
        if packed.num_reads == packed.num_samples:
            packed = replace(packed, read_R=move(packed), layout=None, host=None)
        return forward(self, packed, *args, **keywords)

    place.patch.setattr(Scorer, "forward", moved)


@fault("reward.batch", says="another sample's token")
def scores_of_the_sample_beside(place: Place, is_faulty: bool) -> Session:
    """Scores are given to the wrong rows of a batch."""
    if is_faulty:
        _read(place, lambda packed: packed.read_R.roll(1))
    return place.session(data=place.data(compared()), method="reward")


@fault("reward.library", says="read at another token")
def scores_one_token_early(place: Place, is_faulty: bool) -> Session:
    """The score is read before the token that ends the answer."""
    if is_faulty:
        _read(place, lambda packed: (packed.read_R - 1).clamp_min(0))
    return place.session(data=place.data(compared()), method="reward")


@fault("reward.library", says="a pad that ends no answer")
def a_pad_that_ends_answers(place: Place, is_faulty: bool) -> Session:
    """The library looks for the last token that is not the pad; saved so, it would miss the one that was trained."""
    if is_faulty:
        place.patch.setattr(save, "_pad_token", lambda served, ends, has_scalar: served.eos_token)
    return place.session(data=place.data(compared()), method="reward")


@fault("attention.neighbor", says="a score of")
def scores_that_know_of_a_neighbor(place: Place, is_faulty: bool) -> Session:
    """A reward model whose attention sees the whole pack."""
    if is_faulty:
        _reaching(place, lambda layout: Layout(np.full(layout.num_tokens, layout.num_tokens)))
    return place.session(data=place.data(compared()), method="reward")


@fault("data.pairs", says="have the same score", part="quick", outcome="warning")
def pairs_of_one_score(place: Place, is_faulty: bool) -> Session:
    """Ties were kept, and one of the two is called the chosen one."""
    rows = [
        {**row, "score_chosen": 4.0, "score_rejected": 4.0 if is_faulty and at % 3 else 2.0}
        for at, row in enumerate(compared(24))
    ]
    return place.session(data=place.data(rows), method="dpo", data__apply_chat_template=True)


@fault("data.pairs", says="differ in punctuation alone", part="quick", outcome="warning")
def pairs_that_say_the_same(place: Place, is_faulty: bool) -> Session:
    """Half of the rejected answers are the chosen ones, tidied."""
    rows = compared(24)
    for row in rows[::2] if is_faulty else ():
        row["rejected"] = f" {row['chosen'].strip().capitalize()}."
    return place.session(data=place.data(rows), method="dpo", data__apply_chat_template=True)
