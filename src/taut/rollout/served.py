"""What a vLLM server is asked about its weights, beside completions.

    /v1/completions          prompt_logprobs of a fixed text
    /v1/load_lora_adapter, /v1/unload_lora_adapter          with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    /collective_rpc, /reset_prefix_cache                    with VLLM_SERVER_DEV_MODE=1; the methods are those of
                                                            rollout/worker/taut_worker.py

May import errors, types and what is beside it. ``sync.py`` imports it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from taut.errors import EngineError, RequestRefused
from taut.rollout.answer import Card, Models, parsed
from taut.rollout.endpoint import Endpoint
from taut.types import FloatArray, IntArray

EMPTYING = 5
"""How often a server is asked to empty its prefix cache: what has just ended may hold a block for a moment."""
PAUSE = 0.2
"""Seconds between."""
PUSHED = "-taut-"
"""In the names of adapters that were pushed; a killed run leaves its last one behind."""
LEAVING = 5.0
"""Seconds that a server is given to unload the last adapter."""


class Held(BaseModel):
    """What a worker says it has."""

    start: str
    """Of its process: another one after a restart."""
    version: int
    """Of what it loaded last; -1: nothing."""
    folder: str
    """Where that lay, under a name that no other push had."""
    dtype: str


class Report(BaseModel):
    """What a worker says of one of its parameters."""

    name: str
    parts: list[str]
    """The pushed tensors it is made of."""
    columns: list[int] | None
    """The columns that were read; None: all."""
    checksum: str | None
    """None where it could not be read."""


class _Failed(BaseModel):
    error: str | None = None


class _Reports(BaseModel):
    found: list[Report]


class _Results(BaseModel):
    results: list[Any]


class _Choice(BaseModel):
    prompt_logprobs: list[dict[str, dict[str, Any]] | None]


class _Probed(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Emptied(BaseModel):
    success: bool


@dataclass(frozen=True)
class Asked:
    """A server, by its two addresses."""

    openai: Endpoint
    """Where it answers as OpenAI's does, /v1."""
    root: Endpoint
    """Where vLLM's own questions go, with the time that loading weights may take."""
    base: str
    """The model's name there."""

    def held(self) -> list[Held]:
        """What each worker has."""
        return [parsed(Held, result) for result in self._call("taut_held")]

    def load(self, folder: Path, version: int) -> None:
        """Have every worker load a folder's weights."""
        for result in self._call("taut_load", folder=str(folder), version=version):
            error = parsed(_Failed, result).error
            if error is not None:
                raise EngineError(
                    f"server: it {error}; expected to see the files that were written there and be allowed to read "
                    "them; set rollout.server.sync.folder to a folder that both see under one name and that its user "
                    "may read, or run it as the user who trains (docs/weights.md)"
                )

    def checksums(self, folder: Path) -> list[list[Report]]:
        """What each worker says of its parameters."""
        results = self._call("taut_checksums", folder=str(folder))
        return [parsed(_Reports, {"found": result}).found for result in results]

    def load_adapter(self, name: str, folder: Path) -> None:
        """Under a name nobody else has. One that is sent again, since its answer was lost, vLLM refuses."""
        try:
            self.root.tell("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except RequestRefused as error:
            if not self.serves(name):
                raise RequestRefused(
                    f"{error} (to load it the server must see {folder} under this name and be allowed to read it: set "
                    "rollout.server.sync.folder, or run it as the user who trains; docs/weights.md)"
                ) from None

    def unload_adapter(self, name: str) -> None:
        """Once it is gone, vLLM knows no such name."""
        try:
            self.openai.tell("unload_lora_adapter", {"lora_name": name})
        except EngineError:
            if self.serves(name):
                raise

    def leave(self, name: str) -> None:
        """Unload an adapter, if that is soon done."""
        with suppress(EngineError, TimeoutError):
            self.root.tell("v1/unload_lora_adapter", {"lora_name": name}, LEAVING)

    def dtype(self) -> str:
        """What it computes in, as far as taut's extension is there to say; else unknown."""
        try:
            return self.held()[0].dtype
        except EngineError:
            return "unknown"

    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded while it runs; an empty request is refused where they can."""
        try:
            self.openai.tell("load_lora_adapter", {})
        except RequestRefused:
            return True
        except EngineError:
            return False
        return True

    def serves(self, name: str) -> bool:
        """Whether it answers for a model of this name."""
        return any(card.id == name for card in parsed(Models, self.openai.ask("models")).data)

    def empty_prefix_cache(self) -> None:
        """Forget keys and values of the old weights."""
        for _ in range(EMPTYING):
            if parsed(_Emptied, self.root.ask("reset_prefix_cache", {})).success:
                return
            time.sleep(PAUSE)
        raise EngineError(
            "server: its prefix cache cannot be emptied while requests are under way; expected none while weights are "
            "pushed; let nobody else ask this server"
        )

    def log_probs(self, name: str, ids_T: IntArray) -> FloatArray:
        """What it says of every id but the first."""
        body = {"model": name, "prompt": ids_T.tolist(), "max_tokens": 1, "temperature": 0}
        body |= {"prompt_logprobs": 0}
        places = parsed(_Probed, self.openai.ask("completions", body)).choices[0].prompt_logprobs
        try:
            values = [
                float((place or {})[f"{index}"]["logprob"])
                for place, index in zip(places[1:], ids_T[1:].tolist(), strict=True)
            ]
        except (KeyError, ValueError, TypeError):
            raise EngineError(
                "server: its prompt_logprobs are not those of the ids sent; expected one for each id; serve the model "
                "with vLLM"
            ) from None
        return np.array(values)

    def _call(self, method: str, **values: Any) -> list[Any]:
        """What each worker answers to a method of taut's extension."""
        body = {"method": method, "kwargs": values}
        return parsed(_Results, self.root.ask("collective_rpc", body)).results


def served_card(endpoint: Endpoint, name: str | None) -> Card:
    """The model to be asked."""
    served = parsed(Models, endpoint.ask("models")).data
    cards = [card for card in served if card.id == name or PUSHED not in card.id]
    names, key = ", ".join(card.id for card in cards) or "none", f"{endpoint.section}server.name"
    if name is None and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card.id == name:
            return card
    if name is None:
        raise EngineError(
            f"server: {endpoint.url} serves {len(cards)} models ({names}); expected one, or to be told which; "
            f"set {key}"
        )
    raise EngineError(
        f"server: {endpoint.url} serves {names}; expected {key}={name}; set it to a name that is served"
    )
