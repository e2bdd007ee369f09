"""Faults of memory: a step that does not fit, and layers that keep more than the model's code says."""

from __future__ import annotations

import os
from typing import Any

from tests.checks.planting import Place, fault
from transformers import PreTrainedModel

from taut.checks.session import Session
from taut.run import setup


@fault("memory.peak", says="activation_checkpointing=true")
def a_device_that_is_too_small(place: Place, is_faulty: bool) -> Session:
    """The machine has 25 pages of memory, and the run is told not to recompute."""
    ask = os.sysconf
    pages = {"SC_PHYS_PAGES": 25} if is_faulty else {}
    place.patch.setattr(os, "sysconf", lambda name: pages.get(name) or ask(name))
    return place.session(activation_checkpointing=False)


@fault("memory.measured", says="keeps tensors")
def a_hook_that_keeps_what_it_sees(place: Place, is_faulty: bool) -> Session:
    """A library has put a hook on the loaded model's layers that keeps copies."""
    load, kept = setup.load_model, []

    def hooked(*args: Any, **keywords: Any) -> PreTrainedModel:
        model = load(*args, **keywords)
        for layer in model.model.layers if is_faulty else ():
            layer.register_forward_hook(lambda *seen: kept.append(seen[2].repeat(1, 1, 40)))
        return model

    place.patch.setattr(setup, "load_model", hooked)
    return place.session()
