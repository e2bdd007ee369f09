"""Golden prompts: a few prompts as a server can render them itself, and what a model answers.

The answer is greedy. Its log-probabilities and margins come from one forward over prompt and answer, each pair alone.
Prompts are what is before the first learned turn of a row, its ``prompt``, or the beginning of a document. In the place
of a row's pictures are drawn ones (vision/drawn.py): nobody's pictures are saved with a model. One that takes pictures
is asked about at least one.

``contract`` and ``commands`` import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from taut.attention.layout import Layout
from taut.config import configclass
from taut.data.cache import default_directory
from taut.data.formats import Completion, Conversation, Document, Message, Row, Tool
from taut.data.media import HERE, Part, read_content
from taut.data.pack import ALONE, pack
from taut.data.render import Renderer
from taut.data.template import Text
from taut.models.anatomy import text_config
from taut.models.load import context_length
from taut.models.score import Scorer
from taut.rollout.engine import Sampling
from taut.rollout.local import LocalEngine
from taut.types import Prompt, Sample
from taut.vision.album import Album
from taut.vision.drawn import drawn
from taut.vision.picture import ImagesConfig

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
    tokens: Annotated[int, Field(ge=1)] = 32
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
        return read_content(given, self.id, message["role"], HERE, ())


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
    can_ask = renderer.album is not None and renderer.template.template is not None
    if can_ask and not any(question.pictures for question in chosen):
        question = question_of(_about_a_picture(), renderer, f"prompt {len(chosen) + 1}")
        chosen += [question] if question is not None else []
    return chosen


def _longest(question: Question) -> int:
    return PICTURE_TOKENS if question.pictures else PROMPT_TOKENS


def _by_itself(renderer: Renderer) -> Renderer:
    """The renderer as whoever verifies has it: a run's limits on pictures are not the model's."""
    if renderer.album is None:
        return renderer
    album = Album(renderer.album.processor, ImagesConfig(), default_directory() / "pictures")
    other = Renderer(renderer.tokenizer, renderer.template.template, album=album)
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
    """The ids of a golden prompt, rendered anew."""
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
    return rows if renderer.album is None else [_about_a_picture(), *rows]


def _about_a_picture() -> Conversation:
    content = [{"type": "image", "image": drawn(0)}, {"type": "text", "text": ABOUT_A_PICTURE}]
    asked = {"role": "user", "content": read_content(content, "built-in:picture", "user", HERE, ())}
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
    last_T = None if packed.last_T is None else packed.last_T.numpy()
    layout = Layout(packed.reach_T.numpy(), last_T, scorer.device)
    packed = packed.to(scorer.device)
    logits = scorer.next_logits(
        packed.ids_T, packed.position_ids, layout, packed.predictor_N, packed.media
    )
    every = torch.log_softmax(logits.float(), dim=-1)
    logp_N = every.gather(1, packed.target_N[:, None]).squeeze(1)
    others = every.scatter(1, packed.target_N[:, None], -torch.inf).amax(1)
    return logp_N.cpu(), (logp_N - others).cpu()
