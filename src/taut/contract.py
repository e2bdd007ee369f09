"""``contract.json`` in a saved model directory: what its files say and what the model answers, so that anyone can check
that a server does the same (``taut verify``).

    facts      dtype, digests of template, tokenizer and what describes pictures, eos and pad wherever they are written,
               generation_config
    stops      the stop set: id, token, why
    goldens    prompts (messages or text, and their ids), the greedy continuation of each, the log-probability of each
               of its ids at temperature 1, and its margin: by how much it beats the runner-up, in nats
    checks     how the model in training, the merged and the reloaded one compared (``taut.reloaded``)

Goldens describe the saved weights, loaded anew and computed in float32. The tokenizer's digest leaves out what calls
of a tokenizer change (truncation, padding) and the order of keys.

Does not choose an engine and does not judge (``commands/verify.py`` does). ``api`` and ``commands`` import it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydantic
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut import durable
from taut.data.cache import default_directory
from taut.data.render import Renderer
from taut.data.stops import StopSet
from taut.errors import CheckFailed, ModelError
from taut.golden import ContractConfig, Golden, Question, answer, rendered
from taut.models import anatomy
from taut.models.load import checkpoint_dtype, is_reward_config, load_config, load_tokenizer
from taut.models.processor_files import FILES as PROCESSOR_FILES
from taut.models.score import Scorer
from taut.reloaded import (
    Comparison,
    Trained,
    compare_adapted,
    compare_saved,
    load_anew,
    require_sound,
    room_for,
)
from taut.vision.opening import open_album
from taut.vision.picture import ImagesConfig

FILE = "contract.json"
FORMAT = 1
"""Raised whenever a reader of an older file could misread a newer one."""

NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\]")
"""A list of numbers, a number a line: no string in JSON has a line break."""
VERSIONS = ("taut", "torch", "transformers", "tokenizers")
"""What took part."""
SILENT = "a reward model writes nothing"
"""Why there are no goldens of one."""


@dataclass(frozen=True)
class Stop:
    """A token that ends an answer."""

    id: int
    token: str
    reason: str


@dataclass(frozen=True)
class Facts:
    """What the files of a model directory say."""

    dtype: str
    template: str | None
    """SHA-256 of the chat template."""
    tokenizer: str
    """SHA-256 of tokenizer.json without what calls change."""
    eos: dict[str, list[int]]
    """File -> ids."""
    pad: dict[str, int | None]
    generation_config: dict[str, Any]
    processor: str | None = None
    """SHA-256 of the files that say what becomes of a picture; None: the model takes none."""


@dataclass(frozen=True, eq=False)
class Origin:
    """What a saved model came from: all that its contract says beside its files."""

    trained: Trained
    questions: Sequence[Question]
    """As rendered in training."""
    stops: StopSet
    config: ContractConfig
    device: torch.device
    trust_remote_code: bool = False
    adapted: Callable[[], Scorer] | None = None
    """Loads the base model with the saved adapter."""


@dataclass(frozen=True)
class Contract:
    """The file."""

    versions: dict[str, str]
    facts: Facts
    stops: list[Stop]
    goldens: list[Golden]
    tokens: int
    """How many an answer could have."""
    note: str | None = None
    """Why there are no goldens."""
    checks: list[Comparison] = field(default_factory=list)
    format: int = FORMAT


def seal(directory: Path, origin: Origin, report: Callable[[Comparison], None]) -> Contract:
    """Prove that ``directory`` holds what was trained, ask it the golden prompts, and write its contract.

    ``report`` is told every comparison. Raises CheckFailed where one failed; then nothing is written.
    """
    trained = origin.trained
    tokenizer = load_tokenizer(str(directory), origin.trust_remote_code)
    renderer = _renderer(directory, tokenizer, origin.trust_remote_code)
    _require_same_prompts(origin.questions, renderer)
    device = room_for(trained.model, origin.device)
    reloaded = load_anew(str(directory), device, origin.trust_remote_code)
    goldens, note = _goldens(origin.questions, origin.stops, origin.config, reloaded, renderer)
    checks = compare_saved(trained, reloaded)
    del reloaded  # before another model is loaded
    if origin.adapted is not None:
        checks.append(compare_adapted(trained, origin.adapted()))
    for check in checks:
        report(check)
    require_sound(checks)
    facts = facts_of(directory, tokenizer, origin.trust_remote_code)
    contract = describe(facts, tokenizer, origin.stops, origin.config, goldens, checks, note)
    write_contract(directory, contract)
    return contract


def seal_best(
    directory: Path, stops: StopSet, config: ContractConfig, trust_remote_code: bool
) -> None:
    """Write the contract of a model that is saved while another goes on training: its files, and no answers yet."""
    tokenizer = load_tokenizer(str(directory), trust_remote_code)
    later = "saved while training; its golden prompts are answered when the run ends"
    note = later if config.prompts else "contract.prompts=0"
    if is_reward_config(load_config(str(directory), trust_remote_code)):
        note = SILENT
    facts = facts_of(directory, tokenizer, trust_remote_code)
    write_contract(directory, describe(facts, tokenizer, stops, config, note=note))


def answer_best(
    directory: Path,
    questions: Sequence[Question],
    stops: StopSet,
    config: ContractConfig,
    use: tuple[torch.device, bool],
) -> None:
    """Complete that contract when the run has ended. ``use``: the device, and whether the model's own code may run."""
    tokenizer = load_tokenizer(str(directory), use[1])
    renderer = _renderer(directory, tokenizer, use[1])
    _require_same_prompts(questions, renderer)
    reloaded = load_anew(str(directory), *use)
    goldens, note = _goldens(questions, stops, config, reloaded, renderer)
    facts = facts_of(directory, tokenizer, use[1])
    write_contract(directory, describe(facts, tokenizer, stops, config, goldens, note=note))


def _goldens(
    questions: Sequence[Question],
    stops: StopSet,
    config: ContractConfig,
    reloaded: Scorer,
    renderer: Renderer,
) -> tuple[list[Golden], str | None]:
    """The golden prompts with their answers, or why there are none."""
    if not config.prompts:
        return [], "contract.prompts=0"
    if not anatomy.has_head(reloaded.model):
        return [], SILENT
    stateful = anatomy.stateful_layers(reloaded.model)
    if stateful:
        return [], f"the local engine does not keep the state of {stateful[0]}"
    goldens = answer(questions, reloaded, renderer, stops.ids, config.tokens)
    return goldens, None if goldens else "no row has a prompt that can be asked"


def _renderer(
    directory: Path, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> Renderer:
    """As whoever verifies will have it."""
    path, images, cache = str(directory), ImagesConfig(), default_directory()
    config = load_config(path, trust_remote_code)
    album = open_album(path, config, tokenizer, images, cache, trust_remote_code=trust_remote_code)
    return Renderer(tokenizer, album=album)


def _require_same_prompts(questions: Sequence[Question], renderer: Renderer) -> None:
    """The saved tokenizer must render a prompt as training did."""
    for question in questions:
        if rendered(question, renderer) != question.ids:
            raise CheckFailed(
                f"{question.id}: the saved tokenizer and template render other ids than training did; expected the "
                "same; nothing was put in place; please report the model"
            )


def read_contract(directory: Path) -> Contract:
    """The contract of a model directory."""
    file = directory / FILE
    try:
        text = durable.read_text(file)
    except FileNotFoundError:
        raise ModelError(f"{directory} has no {FILE}; {_remedy(directory)}") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); make it readable") from error
    try:
        found = json.loads(text).get("format")
        if found != FORMAT:
            raise ModelError(
                f"{file} has format {found}; this version of taut reads format {FORMAT}; use the version of "
                "taut that wrote it"
            )
        return pydantic.TypeAdapter(Contract).validate_json(text)
    except (ValueError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{file} is not a contract: {reason}; save the model again with taut"
        ) from error


def _remedy(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory; check the path"
    if (directory / "model" / FILE).is_file():
        return f"expected a model directory; did you mean {directory / 'model'}?"
    if (directory / "adapter_config.json").is_file():
        return "it is an adapter, of which there is none; merge it (taut merge BASE ADAPTER out=DIR) and verify that"
    return (
        "expected a model directory that taut wrote (taut sft, taut merge): only for one of those is it known what "
        "the model should answer"
    )


def write_contract(directory: Path, contract: Contract) -> None:
    """Write the file into a model directory."""
    text = pydantic.TypeAdapter(Contract).dump_json(contract, indent=1).decode()
    in_lines = NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    durable.write_text(
        directory / FILE, in_lines + "\n"
    )  # a best model's is written anew in its place


def describe(
    facts: Facts,
    tokenizer: PreTrainedTokenizerBase,
    stops: StopSet,
    config: ContractConfig,
    goldens: Sequence[Golden] = (),
    checks: Sequence[Comparison] = (),
    note: str | None = None,
) -> Contract:
    """The contract of a directory of which ``facts`` were read. ``tokenizer`` is the one loaded from it."""
    reasons = stops.reasons
    names = tokenizer.convert_ids_to_tokens(list(reasons))
    return Contract(
        versions={name: version(name) for name in VERSIONS},
        facts=facts,
        stops=[
            Stop(index, str(token), reasons[index])
            for index, token in zip(reasons, names, strict=True)
        ],
        goldens=list(goldens),
        tokens=config.tokens,
        note=note,
        checks=list(checks),
    )


def facts_of(
    directory: Path, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> Facts:
    """What the files of ``directory`` say now. ``tokenizer`` is the one loaded from it."""
    whole = load_config(str(directory), trust_remote_code)
    config = whole.get_text_config()
    file = directory / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    generation = {
        name: value
        for name, value in generation.items()
        if name != "transformers_version" and not name.startswith("_")
    }
    return Facts(
        dtype=str(checkpoint_dtype(whole)).removeprefix("torch."),
        template=template_digest(tokenizer.chat_template),
        tokenizer=tokenizer_digest(directory),
        eos={
            "tokenizer": _as_list(tokenizer.eos_token_id),
            "config": _as_list(config.eos_token_id),
            "generation_config": _as_list(generation.get("eos_token_id")),
        },
        pad={
            "tokenizer": tokenizer.pad_token_id,
            "config": config.pad_token_id,
            "generation_config": generation.get("pad_token_id"),
        },
        generation_config=generation,
        processor=processor_digest(directory),
    )


def template_digest(template: str | dict[str, str] | None) -> str | None:
    """SHA-256 of a chat template; of several, of all of them."""
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_digest(directory: Path) -> str:
    """SHA-256 of what tokenizer.json says."""
    tree = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    said = {key: value for key, value in tree.items() if key not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def processor_digest(directory: Path) -> str | None:
    """SHA-256 of the files that describe a model's pictures, if it has any."""
    files = [directory / name for name in PROCESSOR_FILES if (directory / name).is_file()]
    if not files:
        return None
    said = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
