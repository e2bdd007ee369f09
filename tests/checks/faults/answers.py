"""Faults of what stands around answers: their beginning, where they meet the prompt, and which tokens are targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.checks.faults.template import PLAIN, WORDS, rows_of, templated, tokenized
from tests.checks.planting import Place, fault
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import CHATML, LLAMA3, QWEN3, TEMPLATES, tiny_tokenizer

from taut.checks.session import Session
from taut.data.render.render import Renderer
from taut.types import Sample

# -- template.bos


@fault("template.bos", says="twice running")
def bos_from_the_template_twice(place: Place, is_faulty: bool) -> Session:
    """As bos_token, and once more by name."""
    twice = LLAMA3.replace("bos_token + content", "bos_token + '<|begin_of_text|>' + content")
    place.patch.setitem(TEMPLATES, "llama3", twice if is_faulty else LLAMA3)
    return tokenized(place, "llama3", PLAIN)


@fault("template.bos", says="twice running")
def bos_from_rows_and_tokenizer(place: Place, is_faulty: bool) -> Session:
    """Texts that begin with BOS, and a tokenizer that puts one before each text."""
    model = save_tiny("llama", place.directory / "llama", tiny_tokenizer("gemma", adds_bos=True))
    bos = "<bos>" if is_faulty else ""
    rows = [{"text": f"{bos}{words} and {WORDS[0]}"} for words in WORDS]
    return place.session(model, place.data(rows))


# -- template.prompt


@fault("template.prompt", says="'assistant")
def a_generation_prompt_of_another_template(place: Place, is_faulty: bool) -> Session:
    """The header of answers and the generation prompt differ by a word."""
    other = CHATML.replace("<|im_start|>assistant\\n", "<|im_start|>model\\n")
    return templated(place, other if is_faulty else CHATML)


@fault("template.prompt", says="add_generation_prompt")
def a_template_without_a_generation_prompt(place: Place, is_faulty: bool) -> Session:
    """The model would have to write its own header, and servers would show it."""
    without = CHATML.partition("{% if add_generation_prompt %}")[0]
    return templated(place, without if is_faulty else CHATML)


@fault("template.prompt", says="the prompt has")
def a_system_prompt_at_inference_only(place: Place, is_faulty: bool) -> Session:
    """Words that the template writes where it prompts, and not where it trains."""
    hint = "{% if add_generation_prompt %}{{ 'Answer the question.' }}{% endif %}" + CHATML
    return templated(place, hint if is_faulty else CHATML)


# -- template.boundary


@fault("template.boundary", says="white space")
def a_space_at_the_end_of_prompts(place: Place, is_faulty: bool) -> Session:
    """'and: ' ends in a token that no row has: there the space belongs to the word after it."""
    space = (" ", "") if is_faulty else ("", " ")
    rows = [
        {"prompt": f"{words} and:{space[0]}", "completion": f"{space[1]}{words}"} for words in WORDS
    ]
    return place.session(data=place.data(rows))


# -- template.parts


@fault("template.parts", says="targets=assistant")
def history_is_trained_without_its_reasoning(place: Place, is_faulty: bool) -> Session:
    """With targets=all the answers of earlier turns are learned as the template rewrites them: without thought."""
    rows = rows_of("user", "assistant", "user", "assistant", reasoning_content="what about birds?")
    targets = "all" if is_faulty else "assistant"
    return templated(place, QWEN3, rows, data__targets=targets)


# -- template.targets


@fault("template.targets", says="is a target")
def a_template_that_repeats_the_question(place: Place, is_faulty: bool) -> Session:
    """The answer begins with what was asked, so that the model learns to say it again."""
    again = CHATML.replace(
        "message['content']",
        "(messages[loop.index0 - 1]['content'] + '\\n' if message['role'] == 'assistant' else '') + message['content']",
    )
    return templated(place, again if is_faulty else CHATML)


@fault("template.targets", says="is a target")
def every_token_is_a_target(place: Place, is_faulty: bool) -> Session:
    """A mask of assistant tokens that is all ones."""
    made = Renderer._sample

    def all_ones(self: Renderer, name: str, ids: list[int], _: Any, *more: Any) -> Sample:
        return made(self, name, ids, range(1, len(ids)), *more)

    if is_faulty:
        place.patch.setattr(Renderer, "_sample", all_ones)
    return place.session()


@fault("template.targets", says="is no target")
def the_first_token_of_answers_is_no_target(place: Place, is_faulty: bool) -> Session:
    """Labels that are shifted once too often."""
    made = Renderer._sample

    def shifted(self: Renderer, name: str, ids: list[int], target_at: Any, *more: Any) -> Sample:
        at = np.asarray(list(target_at))
        return made(self, name, ids, at[at.size > 1 :], *more)

    if is_faulty:
        place.patch.setattr(Renderer, "_sample", shifted)
    return place.session()
