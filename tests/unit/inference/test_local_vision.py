"""The local engine with pictures: what the library itself generates from the same ids and pixels, and what the scorer
says of the same path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.slow_cases import slow_except
from tests.helpers.vision_models import FAMILIES, vision_config, vision_model, vision_tokenizer
from tests.helpers.vision_processors import save_processor
from torch import Tensor

from taut.data.packing import ALONE, pack
from taut.inference import local
from taut.inference.local import LocalEngine
from taut.inference.settings import ConversationConfig, Sampling
from taut.models.attention_backends import PREFIX
from taut.models.scorer import Scorer
from taut.types import Completion, Media, Prompt, Sample
from taut.vision import tower
from taut.vision.placeholders import Processor
from taut.vision.processors import open_processor

NEW = 3
GREEDY = Sampling(max_new_tokens=NEW, temperature=0)
SIZES = ((20, 12), (9, 30), (16, 16))
"""Of pictures, in pixels."""


@dataclass(frozen=True)
class Shown:
    """A picture in memory."""

    processor: Processor
    image: Image.Image
    num_pictures: int
    source: str = ""
    content: str = ""

    @property
    def digest(self) -> str:
        return f"{hash((self.image.tobytes(), self.num_pictures)) % 2**60:015x}"

    def expect(self) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.processor.tensors(self.image, self.num_pictures))


@dataclass(frozen=True, eq=False)
class Vision:
    """A family's tiny model, and how its prompts are made."""

    kind: str
    scorer: Scorer
    tokenizer: Any
    processor: Processor
    library: Any
    """The same model with the library's own attention."""

    def prompt(self, name: str, *parts: str | Image.Image) -> Prompt:
        images = [part for part in parts if not isinstance(part, str)]
        text, shapes = "", []
        for part in parts:
            if not isinstance(part, str):
                shapes.append(self.processor.shape(*part.size, len(images)))
            text += part if isinstance(part, str) else shapes[-1].text
        ids_T = np.array(self.tokenizer.encode(text, add_special_tokens=False))
        at = np.flatnonzero(ids_T == self.processor.image_id)
        stops = np.cumsum([shape.num_tokens for shape in shapes], dtype=int)
        media = tuple(
            Media(
                Shown(self.processor, image, len(images)),
                int(at[stop - shape.num_tokens]),
                int(at[stop - 1]) + 1,
                shape.grid,
                self.processor.is_two_way,
            )
            for image, shape, stop in zip(images, shapes, stops, strict=True)
        )
        return Prompt(name, ids_T, media=media)

    def engine(self, **config: int) -> LocalEngine:
        return LocalEngine(
            self.scorer, self.tokenizer, (), context=512, config=ConversationConfig(**config)
        )


@cache
def vision(kind: str) -> Vision:
    model, tokenizer = vision_model(kind), vision_tokenizer(kind)
    model.set_attn_implementation({"text_config": f"{PREFIX}reference", "vision_config": "sdpa"})
    directory = Path(mkdtemp())
    save_processor(kind, directory)
    processor = open_processor(str(directory), vision_config(kind), tokenizer)
    assert processor is not None
    return Vision(kind, Scorer(model), tokenizer, processor, vision_model(kind).eval())


def picture(number: int, size: tuple[int, int] | None = None) -> Image.Image:
    width, height = size or SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def asked(it: Vision) -> list[Prompt]:
    """Text among pictures: one, two in a prompt, one twice in two prompts, two of one size."""
    return [
        it.prompt("text", "What is this? A very short question, then."),
        it.prompt("one", "Look: ", picture(0), " what is it?"),
        it.prompt("other words", "Look: ", picture(0), " how many are there?"),
        it.prompt("another of its size", "Look: ", picture(3), " what is it?"),
        it.prompt("two", picture(1), " and ", picture(2), " which one is larger?"),
    ]


def library(it: Vision, prompt: Prompt) -> list[int]:
    """What the library generates by itself."""
    tensors = [one.picture.tensors() for one in prompt.media]
    ids = torch.from_numpy(prompt.ids_T)[None]
    is_image = (ids == it.processor.image_id).long()
    given: dict[str, Any] = {}
    for name in tensors[0] if tensors else ():
        joined = torch.cat([one[name] for one in tensors])
        given[name] = joined.double() if joined.is_floating_point() else joined
    if it.kind in ("idefics3", "smolvlm"):
        given = {name: value[None] for name, value in given.items()}
    if "qwen" in it.kind:
        given["mm_token_type_ids"] = is_image
    if it.kind == "gemma3":
        given["token_type_ids"] = is_image
    if it.kind == "llava_onevision" and tensors:
        given["batch_num_images"] = torch.tensor([len(tensors)])
    out = it.library.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    return out[0, prompt.ids_T.size :].tolist()


def scored(it: Vision, prompt: Prompt, done: Completion) -> np.ndarray:
    ids_T = np.concatenate([prompt.ids_T, done.ids_N])
    at = np.arange(prompt.ids_T.size, ids_T.size)
    packed = pack([Sample("s", ids_T, at, np.ones(at.size), prompt.media)], ALONE)
    with torch.no_grad():
        return it.scorer(packed).logp_N.double().numpy()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_engine_generates_what_the_library_does(kind: str) -> None:
    it = vision(kind)
    prompts = [prompt for prompt in asked(it) if prompt.id in ("text", "one", "two")]
    for prompt, done in zip(prompts, it.engine().generate(prompts, GREEDY), strict=True):
        assert done.ids_N.tolist() == library(it, prompt), prompt.id
        assert np.abs(done.logp_one_N - scored(it, prompt, done)).max() < 1e-9, prompt.id


@pytest.mark.parametrize("kind", ["qwen3_vl", "idefics3", "llava_onevision", "gemma3"])
def test_company_changes_nothing(kind: str) -> None:
    it = vision(kind)
    prompts = asked(it)
    drawn = Sampling(n=2, max_new_tokens=NEW, seed=1)
    together = it.engine(sequences=6).generate(prompts, drawn)
    alone = [one for prompt in prompts for one in it.engine().generate([prompt], drawn)]
    for left, right in zip(together, alone, strict=True):
        assert left.ids_N.tolist() == right.ids_N.tolist(), left.prompt_id
        assert np.abs(left.logp_N - right.logp_N).max() < 1e-9


def sizes_of(it: Vision, prompts: list[Prompt]) -> list[int]:
    """Tokens of each forward."""
    sizes: list[int] = []
    forward = it.scorer.next_logits

    def heard(ids_T: Tensor, *rest: Any) -> Tensor:
        sizes.append(ids_T.numel())
        return forward(ids_T, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(it.scorer, "next_logits", heard)
        it.engine().generate(prompts, GREEDY)
    return sizes


@pytest.mark.parametrize("kind", slow_except(["qwen2_vl"], FAMILIES))
def test_a_turn_after_pictures_is_what_it_is_alone(kind: str) -> None:
    """Two conversations that differ in their first picture only go on, and one begins as the first up to its second
    picture.
    """
    it, drawn = vision(kind), Sampling(max_new_tokens=NEW, seed=1)

    def shown(name: str, first: int, second: int, more: str = "") -> Prompt:
        both = "Look: ", picture(first), " and ", picture(second)
        return it.prompt(name, *both, f" which one is larger?{more}")

    first = [shown("one", 0, 2), shown("other", 3, 2)]
    more = " And which is not?"
    second = [shown("one", 0, 2, more), shown("other", 3, 2, more), shown("edited", 0, 1)]
    engine = it.engine()
    with engine.conversation(), pytest.MonkeyPatch.context() as patch:
        before = engine.generate(first, drawn)
        computed: list[int] = []
        forward = it.scorer.next_logits
        patch.setattr(
            it.scorer,
            "next_logits",
            lambda ids_T, *rest: computed.append(ids_T.numel()) or forward(ids_T, *rest),
        )
        after = engine.generate(second, drawn)
    new = [p.ids_T.size - p.media[p.id != "edited"].stop for p in second]
    assert computed[0] <= sum(new)
    for prompts, done in ((first, before), (second, after)):
        for prompt, completion in zip(prompts, done, strict=True):
            (alone,) = it.engine().generate([prompt], drawn)
            assert completion.ids_N.tolist() == alone.ids_N.tolist(), prompt.id
            assert np.abs(completion.logp_N - alone.logp_N).max() < 1e-9, prompt.id


def test_pictures_are_read_ahead_and_steps_do_not_look_for_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, heard = vision("qwen2_vl"), []
    monkeypatch.setattr(Shown, "expect", lambda self: heard.append(self.digest))
    monkeypatch.setattr(tower, "vision_parameters", lambda _: pytest.fail("parameters are listed"))
    prompts = [it.prompt(f"{number}", picture(number), " what?") for number in range(3)]
    first, second, third = (prompt.media[0].picture.digest for prompt in prompts)
    it.engine(sequences=1).generate(prompts, GREEDY)
    assert heard[:2] == [first, second]  # the next one's before the first is computed
    assert list(dict.fromkeys(heard)) == [first, second, third]
    assert heard.index(third) < len(heard) - 1 - heard[::-1].index(second)


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_a_picture_is_shared_and_another_of_its_size_is_not(kind: str) -> None:
    it = vision(kind)
    one, same, other = (
        it.prompt(name, picture(number), f" and tell me in a few words {name}?")
        for name, number in (("what", 0), ("how", 0), ("why", 3))
    )
    sizes = [prompt.ids_T.size for prompt in (one, same, other)]
    length = min(sizes[:2])
    shared = int((one.ids_T[:length] != same.ids_T[:length]).argmax())
    assert one.media[0].stop < shared
    assert one.media[0].picture.digest != other.media[0].picture.digest
    assert sizes_of(it, [one, same, other])[0] == sum(sizes) - shared


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_placeholder_that_the_model_writes_itself_is_no_picture(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = vision(kind)
    prompt = it.prompt("one", "Look: ", picture(0), " what is it?")
    said = [it.processor.image_id, 7, 9]

    def forced(logits_BV: Tensor, *_: Any, given: list[int] = [*said]) -> tuple[Tensor, ...]:  # noqa: B006
        index = given.pop(0)
        logp = torch.log_softmax(logits_BV, -1)[:, index]
        return torch.tensor([index]), logp, logp

    monkeypatch.setattr(local, "draw", forced)
    (done,) = it.engine().generate([prompt], Sampling(max_new_tokens=3))
    assert done.ids_N.tolist() == said
    assert np.abs(done.logp_one_N - scored(it, prompt, done)).max() < 1e-9
