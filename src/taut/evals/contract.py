"""``contract.json`` in a saved model directory: the facts in its files and the model's answers, with which
``taut verify`` checks that a server behaves the same.

    facts      dtype, digests of template, tokenizer and the files that describe pictures, eos and pad in every file
               that has them, generation_config
    stops      the stop set: id, token, why
    goldens    prompts (messages or text, and their ids), the greedy continuation of each, the logprob of each of its
               ids at temperature 1, and its margin: the distance to the runner-up, in nats
    checks     comparisons of the model in training, the merged and the reloaded one (``taut.evals.round_trip``)

Golden prompts are a few prompts that a server can render by itself: the messages before the first learned turn of a
row, its ``prompt``, or the beginning of a document. The answer is greedy. Its logprobs and margins come from one
forward over prompt and answer, each pair alone, on the saved weights, loaded again and computed in float32.

No picture of the user's data is saved with a model: drawn rectangles replace the pictures of a row, the same on every
machine, as data URLs (so the bytes read again are those sent, whichever library wrote the PNG). A model that takes
pictures has at least one such prompt.

The tokenizer's digest leaves out the order of keys and the settings that calls of a tokenizer change (truncation,
padding). Engines are chosen, and servers judged, in commands/verify.py.
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
from typing import Any, Literal

import numpy as np
import pydantic
import torch
from PIL import Image, ImageDraw
from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.data.packing import ALONE, pack
from taut.data.render.chat_template import Text
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import StopSet
from taut.data.rows.messages import (
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
from taut.data.store.cache import default_directory
from taut.errors import CheckFailed, ModelError
from taut.evals.round_trip import (
    Comparison,
    Room,
    Trained,
    compare_adapted,
    compare_saved,
    load_anew,
    require_sound,
    room_for,
)
from taut.evals.settings import ContractConfig
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.io import files
from taut.io.temporary import TemporaryFolder
from taut.models import architecture
from taut.models.architecture import text_config
from taut.models.load import (
    checkpoint_dtype,
    context_length,
    is_reward_config,
    load_config,
    load_tokenizer,
    quiet_library,
)
from taut.models.save import FILES as PROCESSOR_FILES
from taut.models.save import generation_to_save, serving_tokenizer
from taut.models.scorer import Scorer
from taut.types import IntArray, Prompt, Sample
from taut.vision.image_store import ImageStore, open_image_store
from taut.vision.settings import ImagesConfig

SIZE = (112, 84)
"""Width and height: of several patches, and not square."""
COLORS = ("white", "red", "blue", "green", "yellow", "black", "orange", "purple")


def drawn(number: int) -> str:
    """The ``number``-th picture, as a data URL: two rectangles whose colors and places depend on ``number``."""
    width, height = SIZE
    background, large, small = (COLORS[(number + step) % len(COLORS)] for step in (0, 1, 2))
    shift = 7 * (number % 4)
    image = Image.new("RGB", SIZE, background)
    pen = ImageDraw.Draw(image)
    pen.rectangle((8 + shift, 8, width // 2 + shift, height - 12), fill=large)
    pen.rectangle((width - 40, 20 + shift, width - 12, 40 + shift), fill=small)
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


PROMPT_TOKENS = 1024
"""Longer prompts are skipped: a golden prompt must be replayed in seconds."""
PICTURE_TOKENS = 4096
"""Longest prompt with pictures."""
SEARCHED_ROWS = 1000
"""Rows searched for golden prompts."""
DOCUMENT_CHARACTERS = 200
"""Characters of a plain document that are the prompt."""

BUILT_IN = ("Hi", "Which city is the capital of France?", "Count from one to five.", "Tell a joke.")
"""Questions to a model without data."""
ABOUT_A_PICTURE = "Which colours are in this picture?"


@dataclass(frozen=True)
class Question:
    """A prompt as a server can render it itself: messages, or text."""

    id: str
    ids: list[int]
    messages: list[Message] | None = None
    """Messages as in JSON: a picture is a data URL."""
    tools: list[Tool] | None = None
    text: str | None = None

    @property
    def pictures(self) -> list[str]:
        """Data URLs."""
        contents = [message["content"] for message in self.messages or ()]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return [part["image"] for part in parts if part["type"] == "image"]

    def parsed_messages(self) -> list[Message]:
        """The messages as a renderer takes them."""
        messages: list[Message] = []
        for message in self.messages or ():
            content = message["content"]  # None where tools are called
            if isinstance(content, list):
                content = read_content(content, self.id, message["role"], DEFAULT_MEDIA, ())
            messages.append({**message, "content": content})
        return messages


@dataclass(frozen=True)
class Golden:
    """A prompt and the model's answer."""

    prompt: Question
    ids: list[int]
    """The greedy continuation, including the token that ended it."""
    logp: list[float]
    """Logprob of each id at temperature 1."""
    margin: list[float]
    """That logprob minus the runner-up's: near 0 where another engine may choose the other."""
    finish_reason: Literal["stop", "length"]
    answer: str
    """The text, for human readers."""


def choose_questions(rows: Iterable[Row], renderer: Renderer, count: int) -> list[Question]:
    """The first ``count`` different prompts among the first rows, none too long; and one with a picture, where the
    model takes pictures and none of these has one.
    """
    takes_pictures = renderer.image_store is not None and renderer.template.template is not None
    if renderer.image_store is not None:
        # as in taut verify: a run's limits on pictures are not the model's
        processor, day = renderer.image_store.processor, renderer.template.day
        image_store = ImageStore(processor, ImagesConfig(), default_directory() / "pictures")
        template = renderer.template.template
        renderer = Renderer(renderer.tokenizer, template, image_store=image_store)
        renderer.template.day = day
    # different prompts, none too long
    chosen: dict[tuple[object, ...], Question] = {}
    for row in islice(rows, SEARCHED_ROWS):
        if len(chosen) >= count:
            break
        question = question_of(row, renderer, f"prompt {len(chosen) + 1}", len(chosen))
        if question is None:
            continue
        longest = PICTURE_TOKENS if question.pictures else PROMPT_TOKENS
        if 0 < len(question.ids) <= longest:
            chosen.setdefault((*question.ids, *question.pictures), question)
    # one with a picture at least
    questions = list(chosen.values())
    if takes_pictures and not any(question.pictures for question in questions):
        question = question_of(_about_a_picture(), renderer, f"prompt {len(questions) + 1}")
        questions += [question] if question is not None else []
    return questions


def question_of(row: Row, renderer: Renderer, name: str, first_picture: int = 0) -> Question | None:
    """The question in a row: the messages before its first learned turn, its prompt, or a document's beginning; None if
    the first turn is learned, or a server would render the row otherwise: it has values of its own for the template's
    variables, or control tokens that are text. Drawn pictures, numbered from ``first_picture``, replace those of the
    row.
    """
    name = f"{name} ({PurePath(row.place).name})"  # no path of this machine
    if not isinstance(row, Conversation):
        if isinstance(row, Completion):
            text = row.prompt
        else:
            text = row.text[:DOCUMENT_CHARACTERS].rstrip()
        return Question(name, text_ids(text, renderer), text=text)
    if row.template_variables:
        return None
    messages: list[Message] = []
    number = first_picture
    for message in row.messages[: min(row.learned, default=0)]:
        content = message["content"]
        if isinstance(content, list):
            parts: list[Part] = []
            for part in content:
                is_image = part["type"] == "image"
                parts.append({"type": "image", "image": drawn(number)} if is_image else part)
                number += is_image
            content = parts
        messages.append({**message, "content": content})
    if not messages:
        return None
    template = renderer.template
    if template.is_as_text and template.apply(messages, row.tools, name).has_marks:
        return None
    question = Question(name, [], messages=messages, tools=list(row.tools) or None)
    return replace(question, ids=rendered(question, renderer))


def text_ids(text: str, renderer: Renderer) -> list[int]:
    """The ids of a text to be continued: with the tokenizer's bos, without the eos it may append."""
    key = Text(text, is_rendering=False)
    ids, tokenizer = renderer.template.encode([key])[key], renderer.tokenizer
    is_own = text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] and not is_own else ids


def rendered(question: Question, renderer: Renderer) -> list[int]:
    """The ids of a golden prompt, rendered again."""
    if question.messages is not None:
        messages = question.parsed_messages()
        ids: list[int] = renderer.prompt_ids(messages, question.tools).tolist()
        return ids
    assert question.text is not None, f"{question.id}: a prompt is messages or text"
    return text_ids(question.text, renderer)


def built_in_rows(renderer: Renderer) -> list[Row]:
    """Rows with questions to a model without data."""
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
    question = {
        "role": "user",
        "content": read_content(content, "built-in:picture", "user", DEFAULT_MEDIA, ()),
    }
    reply = {"role": "assistant", "content": "White, red and blue."}
    return Conversation("built-in:picture", (question, reply), learned=(1,))


@torch.no_grad()
def answer(
    questions: Sequence[Question],
    scorer: Scorer,
    renderer: Renderer,
    stop_ids: Sequence[int],
    num_tokens: int,
) -> list[Golden]:
    """The greedy answers of the model in ``scorer``. Questions that leave no room for an answer are skipped."""
    # greedy answers
    context = context_length(text_config(scorer.model))
    engine = LocalEngine(scorer, renderer.tokenizer, stop_ids, context=context)
    questions = [q for q in questions if engine.context is None or len(q.ids) < engine.context]
    prompts = prompts_of(questions, renderer)
    completions = engine.generate(prompts, greedy(num_tokens))
    goldens = []
    for question, prompt, completion in zip(questions, prompts, completions, strict=True):
        assert completion.finish_reason != "error", f"{question.id}: {completion.error}"
        # their logprobs and margins, from one forward
        logp_NV = logps_of(scorer, prompt, completion.ids_N)
        target_N1 = torch.from_numpy(completion.ids_N)[:, None].to(logp_NV.device)
        logp_N = logp_NV.gather(1, target_N1).squeeze(1)
        margin_N = logp_N - logp_NV.scatter(1, target_N1, -torch.inf).amax(1)
        goldens.append(
            Golden(
                prompt=question,
                ids=completion.ids_N.tolist(),
                logp=[round(value, 6) for value in logp_N.tolist()],
                margin=[round(value, 6) for value in margin_N.tolist()],
                finish_reason=completion.finish_reason,
                answer=completion.text,
            )
        )
    return goldens


@torch.no_grad()
def logps_of(scorer: Scorer, prompt: Prompt, ids_N: IntArray) -> torch.Tensor:
    """The logprobs [N, V] of every token at the place of each id of an answer, from one forward over both."""
    ids_T = np.concatenate([prompt.ids_T, ids_N])
    at_N = np.arange(prompt.ids_T.size, ids_T.size)
    sample = Sample("golden", ids_T, at_N, np.ones(at_N.size), prompt.media)
    logits_NV = scorer.target_logits(pack([sample], ALONE))
    return torch.log_softmax(logits_NV.float(), dim=-1)


def prompts_of(questions: Sequence[Question], renderer: Renderer) -> list[Prompt]:
    """The golden prompts for an engine, with the recorded ids; the template is not applied again."""
    prompts = []
    for question in questions:
        ids_T = np.asarray(question.ids, dtype=np.int64)
        placed = renderer.template.pictures.place_each(question.parsed_messages(), question.id)
        media = renderer.template.pictures.find(ids_T, placed, question.id)
        prompts.append(Prompt(question.id, ids_T, media=media))
    return prompts


def greedy(num_tokens: int) -> Sampling:
    """The sampling of golden answers."""
    return Sampling(temperature=0.0, max_new_tokens=num_tokens)


FILE = "contract.json"
FORMAT = 1
"""Raised whenever a reader of an older file could misread a newer one."""

TOKENIZER_BYTES = 2**30
"""Largest tokenizer.json; one with many tokens is larger than other JSON files."""
NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\]")
"""A list of numbers, a number a line: no string in JSON has a line break."""
VERSIONS = ("taut", "torch", "transformers", "tokenizers")
"""Packages whose versions are recorded."""
SILENT = "a reward model writes nothing"
"""Why a reward model has no goldens."""


@dataclass(frozen=True)
class Stop:
    """A token that ends an answer."""

    id: int
    token: str
    reason: str


@dataclass(frozen=True)
class Facts:
    """The facts in the files of a model directory."""

    dtype: str
    template: str | None
    """SHA-256 of the chat template."""
    tokenizer: str
    """SHA-256 of tokenizer.json without the settings that calls change."""
    eos: dict[str, list[int]]
    """File -> ids."""
    pad: dict[str, int | None]
    generation_config: dict[str, Any]
    processor: str | None = None
    """SHA-256 of the files that describe the processing of pictures; None if the model takes none."""


@dataclass(frozen=True)
class Contract:
    """The contents of ``contract.json``."""

    versions: dict[str, str]
    facts: Facts
    stops: list[Stop]
    goldens: list[Golden]
    tokens: int
    """Largest number of tokens of an answer."""
    note: str | None = None
    """Why there are no goldens."""
    checks: list[Comparison] = field(default_factory=list)
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class SavedModelTest:
    """The test of a saved model: what it is compared with, and what it is asked."""

    trained: Trained
    questions: Sequence[Question]
    """Questions with the ids that training rendered."""
    stops: StopSet
    config: ContractConfig
    device: torch.device
    trust_remote_code: bool = False
    adapted: Callable[[], Scorer] | None = None
    """Loads the base model with the saved adapter."""

    def run(self, directory: Path, report: Callable[[Comparison], None]) -> Contract:
        """Prove that ``directory`` holds the trained model, ask it the golden prompts, and write its contract.

        ``report`` is called with every comparison. Raises CheckFailed where one failed; then nothing is written.
        """
        # ask it first: to compare it changes its weights
        use = room_for(self.trained.model, self.device), self.trust_remote_code
        tokenizer, reloaded, goldens, note = _ask_saved(
            directory, self.questions, self.stops, self.config, use
        )
        checks = compare_saved(self.trained, reloaded)
        del reloaded  # before another model is loaded
        if self.adapted is not None:
            checks.append(compare_adapted(self.trained, self.adapted()))
        for check in checks:
            report(check)
        require_sound(checks)
        trust = self.trust_remote_code
        return _write(directory, tokenizer, trust, self.stops, self.config, goldens, checks, note)


def write_best_contract(
    directory: Path, stops: StopSet, config: ContractConfig, trust_remote_code: bool
) -> None:
    """Write the contract of a model that is saved during training: the facts in its files, and no answers yet."""
    tokenizer = load_tokenizer(str(directory), trust_remote_code)
    later = "saved while training; its golden prompts are answered when the run ends"
    note = later if config.prompts else "contract.prompts=0"
    if is_reward_config(load_config(str(directory), trust_remote_code)):
        note = SILENT
    _write(directory, tokenizer, trust_remote_code, stops, config, note=note)


def complete_best_contract(
    directory: Path,
    questions: Sequence[Question],
    stops: StopSet,
    config: ContractConfig,
    use: tuple[Room, bool],
) -> None:
    """Complete that contract after training. ``use``: the room, and whether the model's own code may run."""
    tokenizer, _, goldens, note = _ask_saved(directory, questions, stops, config, use)
    _write(directory, tokenizer, use[1], stops, config, goldens, note=note)


def _ask_saved(
    directory: Path,
    questions: Sequence[Question],
    stops: StopSet,
    config: ContractConfig,
    use: tuple[Room, bool],
) -> tuple[PreTrainedTokenizerBase, Scorer, list[Golden], str | None]:
    """The tokenizer and the model of a saved directory, the golden answers, and why there are none. ``use``: see
    ``complete_best_contract``. Raises CheckFailed where the tokenizer renders a prompt otherwise than in training.
    """
    room, trust_remote_code = use
    path = str(directory)
    tokenizer = load_tokenizer(path, trust_remote_code)
    # the saved files render the prompts as training did
    image_store = open_image_store(
        path,
        load_config(path, trust_remote_code),
        tokenizer,
        ImagesConfig(),
        default_directory(),
        trust_remote_code=trust_remote_code,
    )
    renderer = Renderer(tokenizer, image_store=image_store)
    for question in questions:
        if rendered(question, renderer) != question.ids:
            raise CheckFailed(
                f"{question.id}: the saved tokenizer and template render other ids than training did; expected the "
                "same; nothing was put in place; please report the model"
            )
    # the saved weights answer
    reloaded = load_anew(path, room, trust_remote_code)
    stateful = architecture.stateful_layers(reloaded.model)
    goldens: list[Golden] = []
    note: str | None = None
    if not config.prompts:
        note = "contract.prompts=0"
    elif not architecture.has_head(reloaded.model):
        note = SILENT
    elif stateful:
        note = f"the local engine does not keep the state of {stateful[0]}"
    else:
        goldens = answer(questions, reloaded, renderer, stops.ids, config.max_new_tokens)
        note = None if goldens else "no row has a prompt that can be asked"
    return tokenizer, reloaded, goldens, note


def read_contract(directory: Path) -> Contract:
    """The contract of a model directory."""
    file = directory / FILE
    try:
        text = files.read_text(file)
    except FileNotFoundError:
        if not directory.exists():
            remedy = "there is no such directory; check the path"
        elif (directory / "model" / FILE).is_file():
            remedy = f"expected a model directory; did you mean {directory / 'model'}?"
        elif (directory / "adapter_config.json").is_file():
            remedy = "it is an adapter; merge it (taut merge BASE ADAPTER out=DIR) and verify that"
        else:
            remedy = "expected a model directory that taut wrote (taut sft, taut merge); name one"
        raise ModelError(f"{directory} has no {FILE}; {remedy}") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); make it readable") from error
    try:
        file_format = json.loads(text).get("format")
        if file_format != FORMAT:
            raise ModelError(
                f"{file} has format {file_format}; this version of taut reads format {FORMAT}; use the version "
                "of taut that wrote it"
            )
        return pydantic.TypeAdapter(Contract).validate_json(text)
    except ModelError:
        raise
    except (ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"{file} is not a contract: {reason}; save the model again with taut"
        raise ModelError(message) from error


def _write(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
    stops: StopSet,
    config: ContractConfig,
    goldens: Sequence[Golden] = (),
    checks: Sequence[Comparison] = (),
    note: str | None = None,
) -> Contract:
    """Write the contract of a directory, with the facts in its files. ``tokenizer`` is the one loaded from it."""
    contract = Contract(
        versions={name: version(name) for name in VERSIONS},
        facts=facts_of(directory, tokenizer, trust_remote_code),
        stops=_listed(stops, tokenizer),
        goldens=list(goldens),
        tokens=config.max_new_tokens,
        note=note,
        checks=list(checks),
    )
    _put(directory, contract)  # in place of a best model's
    return contract


def _listed(stops: StopSet, tokenizer: PreTrainedTokenizerBase) -> list[Stop]:
    tokens = tokenizer.convert_ids_to_tokens(list(stops.reasons))
    pairs = zip(stops.reasons.items(), tokens, strict=True)
    return [Stop(index, str(token), reason) for (index, reason), token in pairs]


def _put(directory: Path, contract: Contract) -> None:
    text = pydantic.TypeAdapter(Contract).dump_json(contract, indent=1).decode()
    text = NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    files.write_text(directory / FILE, text + "\n")


_NAMING_ENDS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""Files that say where answers end."""


def rewrite_stops(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    stops: StopSet,
    trust_remote_code: bool = False,
) -> None:
    """Write this stop set into tokenizer, config, generation_config and contract of a saved model. Weights and golden
    answers stay as they are. ``tokenizer`` is the one loaded from ``directory``, with one chat template or none.
    """
    contract, generation = read_contract(directory), None
    template = tokenizer.chat_template
    # the files as a save would write them; of these, those that name ends
    served = serving_tokenizer(tokenizer, stops.ids, None if template is None else str(template))
    with TemporaryFolder("stops") as place, quiet_library():
        if (directory / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(directory)
        generation_to_save(generation, served, stops.ids).save_pretrained(place)
        served.save_pretrained(place)
        config = files.read_json(directory / "config.json")
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part |= {"eos_token_id": stops.ids[0], "pad_token_id": served.pad_token_id}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        names = {file.name for file in place.iterdir()} & {*_NAMING_ENDS}
        for file in (place / name for name in sorted(names)):
            files.write_bytes(directory / file.name, file.read_bytes())
    tokenizer = load_tokenizer(str(directory), trust_remote_code)
    facts = facts_of(directory, tokenizer, trust_remote_code)
    _put(directory, replace(contract, stops=_listed(stops, tokenizer), facts=facts))


def facts_of(
    directory: Path, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> Facts:
    """The facts in the files of ``directory`` now. ``tokenizer`` is the one loaded from it."""
    whole = load_config(str(directory), trust_remote_code)
    config = whole.get_text_config()
    file = directory / "generation_config.json"
    # the settings of generation, but not who wrote them
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    generation = {
        name: value
        for name, value in generation.items()
        if name != "transformers_version" and not name.startswith("_")
    }
    tokenizer_tree = files.read_json(directory / "tokenizer.json", TOKENIZER_BYTES)
    for key in ("padding", "truncation"):  # calls change these
        tokenizer_tree.pop(key, None)
    described = [directory / name for name in PROCESSOR_FILES if (directory / name).is_file()]
    pictures = {file.name: files.read_json(file) for file in described}
    return Facts(
        dtype=str(checkpoint_dtype(whole)).removeprefix("torch."),
        template=template_digest(tokenizer.chat_template),
        tokenizer=_digest(tokenizer_tree),
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
        processor=_digest(pictures) if pictures else None,
    )


def template_digest(template: str | dict[str, str] | None) -> str | None:
    """SHA-256 of a chat template; of several, of all of them."""
    if isinstance(template, str):
        return hashlib.sha256(template.encode()).hexdigest()
    return None if template is None else _digest(template)


def _digest(tree: Any) -> str:
    """SHA-256 of JSON, whatever the order of keys."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
