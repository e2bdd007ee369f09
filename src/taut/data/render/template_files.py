"""Chat templates that are given: a file of the user's, the template itself, or by name one that comes with taut
(``templates/``).

    hermes    ChatML with tools in Hermes' format: <tools>, <tool_call>, <tool_response> (as Qwen2.5 and Hermes 2 Pro
              write them), for models whose own template writes no tools. Without tools it is plain ChatML

A template of taut needs its marks as tokens of the tokenizer: as text a mark could be written by anyone, and the model
could not stop at it. Imports no jinja2: recipes are read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from taut.config import Decision, home_path, user_path
from taut.errors import ConfigError
from taut.io import files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED: Mapping[str, tuple[str, ...]] = {"hermes": ("<|im_start|>", "<|im_end|>")}
"""Templates that come with taut -> the tokens that each writes."""


def is_template(value: str) -> bool:
    """Whether a value is the template itself: it has marks of Jinja."""
    return any(mark in value for mark in ("{{", "{%", "{#"))


def is_template_file(value: str | None) -> bool:
    """Whether a template is given as a file."""
    return value is not None and value not in SHIPPED and not is_template(value)


def read_template(
    value: str | None, tokenizer: PreTrainedTokenizerBase, key: str, *, is_of_run: bool = True
) -> str | None:
    """The template that ``value`` of the setting ``key`` names, if any. ``is_of_run``: a path is that of a run's
    configuration.

    Raises ConfigError for a file that cannot be read, and a shipped template whose tokens the tokenizer lacks.
    """
    if value is None:
        return None
    if value in SHIPPED:
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in SHIPPED[value] if token not in vocabulary]
        if missing:
            raise ConfigError(
                f"{key}={value} writes {' and '.join(missing)}, which the tokenizer does not have; expected both; set "
                "tokens.add, or give a template of your own as a file"
            )
        return (Path(__file__).parent / f"templates/{value}.jinja").read_text()
    if not is_template_file(value):
        return value
    try:
        return files.read_text(user_path(value, key) if is_of_run else home_path(value))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key}: cannot read {value}: {reason}; expected a file with a chat template, or one of "
            f"{', '.join(SHIPPED)}"
        ) from None


def template_decision(value: str | None) -> list[Decision]:
    """The decision that a template of taut replaces the model's own."""
    if value not in SHIPPED:
        return []
    reason = "data.template; it is taut's, takes the place of the model's own, and is saved with the model"
    return [Decision("chat template", str(value), reason)]
