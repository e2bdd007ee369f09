"""Where a stop string ends a completion, and what its text is."""

from __future__ import annotations

import pytest
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.inference.engine import Texts

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TEXTS = Texts(TOKENIZER, [END])


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def first_stop(text: str, stops: list[str]) -> int | None:
    """After how many tokens of ``text`` a stop string is there."""
    ids = ids_of(text)
    return next((n for n in range(1, len(ids) + 1) if TEXTS.has_stop(ids[:n], stops)), None)


@pytest.mark.parametrize("stop", ["dog", "the dog", "a dog\n", "東京", "é", "g ran"])
def test_a_stop_string_is_seen_with_the_token_that_completes_it(stop: str) -> None:
    text = "the cat saw " + stop + " and went on"
    ids = ids_of(text)
    found = first_stop(text, ["nothing", stop])
    assert found is not None
    assert stop in TOKENIZER.decode(ids[:found])
    assert stop not in TOKENIZER.decode(ids[: found - 1])
    assert TEXTS.text(ids[:found], ["nothing", stop]) == text[: text.index(stop)]


def test_what_was_there_before_is_not_seen_again() -> None:
    ids = ids_of("dog and cat")
    assert not TEXTS.has_stop(ids, ["dog"])
    assert first_stop("cat and", ["dog"]) is None


def test_a_long_stop_string_is_found_far_back() -> None:
    long = "a sentence that goes on and on, with é and 東京, until here"
    assert first_stop("so: " + long + " more", [long]) is not None


def test_the_token_that_ended_it_is_no_text_and_others_stay_visible() -> None:
    ids = ids_of("a cat<|im_start|>")
    assert TEXTS.text([*ids, END]) == "a cat<|im_start|>"
    assert TEXTS.text([END]) == ""
    assert TEXTS.text([]) == ""
