"""``contract.json`` in a saved model directory: what its files say and what the model answers, so that anyone can check
that a server does the same (``taut verify``).

    facts      dtype, digests of template, tokenizer and what describes pictures, eos and pad wherever they are
               written, generation_config
    stops      the stop set: id, token, why
    goldens    prompts (messages or text, and their ids), the greedy continuation of each, the logprob of each of its
               ids at temperature 1, and its margin: the distance to the runner-up, in nats
    checks     how the model in training, the merged and the reloaded one compare (``taut.evals.reload``)

Golden prompts are a few prompts that a server can render by itself: what comes before the first learned turn of a row,
its ``prompt``, or the beginning of a document. The answer is greedy. Its logprobs and margins come from one forward
over prompt and answer, each pair alone, on the saved weights, loaded again and computed in float32.

No picture of the user's data is saved with a model: drawn rectangles replace the pictures of a row, the same on every
machine, as data URLs (so what is read again is what was sent, whichever library wrote the PNG). A model that takes
pictures has at least one such prompt.

The tokenizer's digest leaves out the order of keys and what calls of a tokenizer change (truncation, padding).
Engines are chosen, and servers judged, in commands/verify.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from PIL import Image, ImageDraw
from pydantic import Field
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import configclass
from taut.data.cache import default_directory
from taut.data.chat_template import Text
from taut.data.messages import (
    DEFAULT_MEDIA,
    Completion,
    Conversation,
    Document,
    Message,
    Part,
    Row,
    Tool,
    read_content,
)
from taut.data.packing import ALONE, pack
from taut.data.render import Renderer
from taut.data.stop_tokens import StopSet
from taut.errors import CheckFailed, ModelError
from taut.evals.reload import (
    Comparison,
    Trained,
    compare_adapted,
    compare_saved,
    load_anew,
    require_sound,
    room_for,
)
from taut.inference.engine import Sampling
from taut.inference.local import LocalEngine
from taut.io import files as durable
from taut.models import architecture
from taut.models.architecture import text_config
from taut.models.load import (
    checkpoint_dtype,
    context_length,
    is_reward_config,
    load_config,
    load_tokenizer,
)
from taut.models.save import FILES as PROCESSOR_FILES
from taut.models.scorer import Scorer
from taut.types import Prompt, Sample
from taut.vision.content import ImagesConfig
from taut.vision.image_store import ImageStore, open_image_store

SIZE = (112, 84)
"""Width and height: of several patches, and not square."""
_COLOURS = ("white", "red", "blue", "green", "yellow", "black", "orange", "purple")


def drawn(number: int) -> str:
    """The ``number``-th picture, as a data URL: a ground and two rectangles, whose colours and places depend on it."""
    width, height = SIZE
    ground, large, small = (_COLOURS[(number + step) % len(_COLOURS)] for step in (0, 1, 2))
    shift = 7 * (number % 4)
    image = Image.new("RGB", SIZE, ground)
    pen = ImageDraw.Draw(image)
    pen.rectangle((8 + shift, 8, width // 2 + shift, height - 12), fill=large)
    pen.rectangle((width - 40, 20 + shift, width - 12, 40 + shift), fill=small)
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


PROMPT_TOKENS = 1024
"""Longer prompts are passed over: a golden prompt is to be replayed in seconds."""
PICTURE_TOKENS = 4096
"""The same for prompts with pictures."""
ROWS_LOOKED_AT = 1000
"""Rows among which golden prompts are looked for."""
DOCUMENT_CHARACTERS = 200
"""How much of a plain document is the prompt."""

BUILT_IN = ("Hi", "Which city is the capital of France?", "Count from one to five.", "Tell a joke.")
"""What a model is asked where there are no data."""
ABOUT_A_PICTURE = "Which colours are in this picture?"


@configclass
class ContractConfig:
    """The golden prompts in model/contract.json."""

    prompts: Annotated[int, Field(ge=0)] = 4
    """How many prompts (of data.eval, else of the training data) are kept with the model's own answers; 0: none."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 32
    """Tokens an answer may have."""


@dataclass(frozen=True)
class Question:
    """A prompt as a server can render it itself: messages, or text."""

    id: str
    ids: list[int]
    messages: list[Message] | None = None
    """As JSON has them: a picture is a data URL."""
    tools: list[Tool] | None = None
    text: str | None = None

    @property
    def pictures(self) -> list[str]:
        """Data URLs."""
        lists = [it["content"] for it in self.messages or () if isinstance(it["content"], list)]
        return [part["image"] for parts in lists for part in parts if part["type"] == "image"]

    def asked(self) -> list[Message]:
        """The messages as a renderer takes them."""
        return [{**it, "content": self._content(it)} for it in self.messages or ()]

    def _content(self, message: Message) -> str | list[Part]:
        """Text as it is, which may be none where tools are called."""
        given = message["content"]
        if not isinstance(given, list):
            return given  # type: ignore[no-any-return]
        return read_content(given, self.id, message["role"], DEFAULT_MEDIA, ())


@dataclass(frozen=True)
class Golden:
    """A prompt and what the model answers."""

    prompt: Question
    ids: list[int]
    """The greedy continuation, the token that ended it included."""
    logp: list[float]
    """log-probability of each id at temperature 1."""
    margin: list[float]
    """That log-probability minus the runner-up's: near 0 where another engine may choose otherwise."""
    finish_reason: Literal["stop", "length"]
    answer: str
    """For people: the text."""


def choose_questions(rows: Iterable[Row], renderer: Renderer, count: int) -> list[Question]:
    """The first ``count`` different prompts among the first rows, none too long; and one with a picture, where the
    model takes pictures and none of these has one.
    """
    renderer = _by_itself(renderer)
    found: dict[tuple[object, ...], Question] = {}
    for row in islice(rows, ROWS_LOOKED_AT):
        if len(found) >= count:
            break
        question = question_of(row, renderer, f"prompt {len(found) + 1}", len(found))
        if question is not None and 0 < len(question.ids) <= _longest(question):
            found.setdefault((*question.ids, *question.pictures), question)
    chosen = list(found.values())
    can_ask = renderer.image_store is not None and renderer.template.template is not None
    if can_ask and not any(question.pictures for question in chosen):
        question = question_of(_about_a_picture(), renderer, f"prompt {len(chosen) + 1}")
        chosen += [question] if question is not None else []
    return chosen


def _longest(question: Question) -> int:
    return PICTURE_TOKENS if question.pictures else PROMPT_TOKENS


def _by_itself(renderer: Renderer) -> Renderer:
    """The renderer that ``taut verify`` has: a run's limits on pictures are not the model's."""
    if renderer.image_store is None:
        return renderer
    image_store = ImageStore(
        renderer.image_store.processor, ImagesConfig(), default_directory() / "pictures"
    )
    other = Renderer(renderer.tokenizer, renderer.template.template, image_store=image_store)
    other.template.day = renderer.template.day
    return other


def question_of(row: Row, renderer: Renderer, name: str, first: int = 0) -> Question | None:
    """What is asked by a row: what is before its first learned turn, its prompt, or a document's beginning. ``first``:
    the number of the first picture that is drawn.
    """
    name = f"{name} ({PurePath(row.place).name})"  # no path of this machine
    if isinstance(row, Conversation):
        index = min(row.learned, default=0)
        if index == 0:
            return None
        messages, tools = with_drawn(row.messages[:index], first), list(row.tools) or None
        question = Question(name, [], messages=messages, tools=tools)
        return replace(question, ids=rendered(question, renderer))
    text = row.prompt if isinstance(row, Completion) else row.text[:DOCUMENT_CHARACTERS].rstrip()
    return Question(name, text_ids(text, renderer), text=text)


def with_drawn(messages: Sequence[Message], first: int = 0) -> list[Message]:
    """The messages with a drawn picture in the place of each."""
    number, found = first, []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            parts: list[Part] = []
            for part in content:
                is_image = part["type"] == "image"
                parts.append({"type": "image", "image": drawn(number)} if is_image else part)
                number += is_image
            content = parts
        found.append({**message, "content": content})
    return found


def text_ids(text: str, renderer: Renderer) -> list[int]:
    """The ids of a text to be continued: with what the tokenizer puts in front, without what it puts behind."""
    key = Text(text, is_rendering=False)
    ids = renderer.template.encode([key])[key]
    ends = ids[-1:] == [renderer.tokenizer.eos_token_id] and not text.endswith(
        str(renderer.tokenizer.eos_token)
    )
    return ids[:-1] if ends else ids


def rendered(question: Question, renderer: Renderer) -> list[int]:
    """The ids of a golden prompt, rendered again."""
    if question.messages is not None:
        found: list[int] = renderer.prompt_ids(question.asked(), question.tools).tolist()
        return found
    assert question.text is not None, f"{question.id}: a prompt is messages or text"
    return text_ids(question.text, renderer)


def built_in_rows(renderer: Renderer) -> list[Row]:
    """Rows to ask a model without data."""
    if renderer.template.template is None:
        return [Document(f"built-in:{number}", text) for number, text in enumerate(BUILT_IN, 1)]
    turns = [
        ({"role": "user", "content": text}, {"role": "assistant", "content": "Hello."})
        for text in BUILT_IN
    ]
    rows: list[Row] = [
        Conversation(f"built-in:{number}", messages, learned=(1,))
        for number, messages in enumerate(turns, 1)
    ]
    return rows if renderer.image_store is None else [_about_a_picture(), *rows]


def _about_a_picture() -> Conversation:
    content = [{"type": "image", "image": drawn(0)}, {"type": "text", "text": ABOUT_A_PICTURE}]
    asked = {
        "role": "user",
        "content": read_content(content, "built-in:picture", "user", DEFAULT_MEDIA, ()),
    }
    told = {"role": "assistant", "content": "White, red and blue."}
    return Conversation("built-in:picture", (asked, told), learned=(1,))


def answer(
    questions: Sequence[Question],
    scorer: Scorer,
    renderer: Renderer,
    stop_ids: Sequence[int],
    num_tokens: int,
) -> list[Golden]:
    """What the model in ``scorer`` answers, greedily. Questions that leave no room for an answer are passed over."""
    context = context_length(text_config(scorer.model))
    engine = LocalEngine(scorer, renderer.tokenizer, stop_ids, context=context)
    questions = [q for q in questions if engine.context is None or len(q.ids) < engine.context]
    prompts = prompts_of(questions, renderer)
    completions = engine.generate(prompts, greedy(num_tokens))
    goldens = []
    for question, prompt, completion in zip(questions, prompts, completions, strict=True):
        assert completion.finish_reason != "error", f"{question.id}: {completion.error}"
        ids = completion.ids_N.tolist()
        logp_N, margin_N = teacher_forced(scorer, prompt, ids)
        goldens.append(
            Golden(
                prompt=question,
                ids=ids,
                logp=[round(value, 6) for value in logp_N.tolist()],
                margin=[round(value, 6) for value in margin_N.tolist()],
                finish_reason=completion.finish_reason,
                answer=completion.text,
            )
        )
    return goldens


def prompts_of(questions: Sequence[Question], renderer: Renderer) -> list[Prompt]:
    """The golden prompts as an engine takes them: of their own ids, whatever the template makes of them now."""
    prompts = []
    for question in questions:
        ids_T = np.asarray(question.ids, dtype=np.int64)
        placed = renderer.template.pictures.place_each(question.asked(), question.id)
        media = renderer.template.pictures.find(ids_T, placed, question.id)
        prompts.append(Prompt(question.id, ids_T, media=media))
    return prompts


def greedy(num_tokens: int) -> Sampling:
    """How goldens are answered."""
    return Sampling(temperature=0.0, max_new_tokens=num_tokens)


@torch.no_grad()
def teacher_forced(scorer: Scorer, prompt: Prompt, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """log-probability of each id given those before it, and by how much it beats the best other one; on the CPU."""
    whole = np.asarray([*prompt.ids_T, *ids], dtype=np.int64)
    at = np.arange(prompt.ids_T.size, whole.size)
    packed = pack([Sample("golden", whole, at, np.ones(at.size), prompt.media)], ALONE)
    every = torch.log_softmax(scorer.target_logits(packed).float(), dim=-1)
    target_N1 = packed.target_N[:, None].to(every.device)
    logp_N = every.gather(1, target_N1).squeeze(1)
    others = every.scatter(1, target_N1, -torch.inf).amax(1)
    return logp_N.cpu(), (logp_N - others).cpu()


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
    """What a saved model came from: what its contract records in addition to its files."""

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
    if not architecture.has_head(reloaded.model):
        return [], SILENT
    stateful = architecture.stateful_layers(reloaded.model)
    if stateful:
        return [], f"the local engine does not keep the state of {stateful[0]}"
    goldens = answer(questions, reloaded, renderer, stops.ids, config.max_new_tokens)
    return goldens, None if goldens else "no row has a prompt that can be asked"


def _renderer(
    directory: Path, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> Renderer:
    """The renderer that ``taut verify`` builds from the saved directory."""
    path, images, cache = str(directory), ImagesConfig(), default_directory()
    config = load_config(path, trust_remote_code)
    image_store = open_image_store(
        path, config, tokenizer, images, cache, trust_remote_code=trust_remote_code
    )
    return Renderer(tokenizer, image_store=image_store)


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
    )  # a best model's is written again in its place


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
        tokens=config.max_new_tokens,
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
