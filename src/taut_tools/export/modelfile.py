"""Write an Ollama Modelfile for a GGUF file: its name, the chat template, the stop tokens, the system prompt.

    FROM ./model.gguf
    TEMPLATE \"\"\"...\"\"\"           in Go's template language, which Ollama renders instead of Jinja
    PARAMETER stop "<|im_end|>"    one for each end token
    SYSTEM \"\"\"...\"\"\"

Ollama never renders the Jinja template in a GGUF file: without a TEMPLATE line it looks for one of its own for a
similar text, and if it knows none it puts nothing around a prompt. So the template is translated if it only puts a text
before and after each message, by role, perhaps a default system message, and a prompt for the answer. Rendering finds
these texts; then conversations are rendered both ways, and must come out the same. If one does not (dates, messages
that are trimmed or rewritten), there is no TEMPLATE line, and ``Translation`` says why. Tools are not translated:
Ollama refuses them for a template that does not name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from taut.errors import ModelError
from taut.io.limited_call import FunctionFailed

Chat: TypeAlias = Sequence[tuple[str, str]]
"""Messages as (role, content)."""
Render: TypeAlias = Callable[[Chat], str]
"""Renders a chat with the prompt for its answer; raises FunctionFailed for a chat that a template refuses."""

ROLES = ("system", "user", "assistant")
PROBES: tuple[Chat, ...] = (
    (("user", "Q1"),),
    (("user", "Q1"), ("assistant", "A1"), ("user", "Q2")),
    (("system", "S1"), ("user", "Q1")),
    (("system", "S1"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2")),
    (("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"), ("user", "Q3")),
)
TEXTS = (
    "plain",
    'two\n\nlines {{ .Role }} """ {% x %}',
    "  spaces around\n",
    "<think>why</think>\n\nso",
)
"""Contents of messages that some templates trim or rewrite."""
CHANGING = ("strftime", "date_string", "currentDate")
"""Words in the text of templates that depend on the day."""


@dataclass(frozen=True)
class Affixes:
    """Texts that a template writes around messages."""

    around: Mapping[str, tuple[str, str]]
    """Texts before and after the content of each role."""
    default: str
    """Text in front of a chat without a system message."""
    answer: str
    """Text after the last message."""

    def render(self, chat: Chat) -> str:
        """Render a chat as Ollama renders ``go``."""
        has_system = any(role == "system" for role, _ in chat)
        turns = [f"{self.around[role][0]}{content}{self.around[role][1]}" for role, content in chat]
        return "".join(["" if has_system else self.default, *turns, self.answer])

    @property
    def go(self) -> str:
        """The template in Go's language, without actions that trim white space."""
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        turns = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in self.around.items()
        )
        return (
            f"{default}{{{{ range .Messages }}}}{{{{ {turns}{{{{ end }}}}{{{{ end }}}}{self.answer}"
        )


@dataclass(frozen=True)
class Translation:
    """A chat template for Ollama, or the reason why there is none."""

    go: str | None
    why_not: str = ""


def translate(template: str | None, render: Render, bos: str | None) -> Translation:
    """Translate a chat template. ``bos`` is the text that llama.cpp adds in front by itself, or None."""
    if template is None:
        return Translation(None, "the tokenizer has no chat template")
    if any(word in template for word in CHANGING):
        return Translation(None, "the chat template depends on the day")

    def rendered(chat: Chat) -> str:
        text = render(chat)
        return text.removeprefix(bos) if bos else text

    # Find the texts around messages, and refuse those that Go's language would read otherwise.
    try:
        affixes = _affixes(rendered)
    except (FunctionFailed, ValueError) as error:
        return Translation(None, f"the chat template is no text around messages ({error})")
    parts = [
        affixes.default,
        affixes.answer,
        *(text for pair in affixes.around.values() for text in pair),
    ]
    if any("{{" in part or '"""' in part or "\r" in part or "\0" in part for part in parts):
        return Translation(None, 'the chat template writes "{{", three quotes or a carriage return')
    if affixes.answer.endswith('"'):
        return Translation(None, "the prompt for an answer ends with a quote")
    # Render conversations both ways.
    for probe, text in product(PROBES, TEXTS):
        chat = [(role, f"{content} {text}" if text == "plain" else text) for role, content in probe]
        try:
            wanted = rendered(chat)
        except FunctionFailed as error:
            return Translation(None, f"the chat template refuses a conversation ({error})")
        if affixes.render(chat) != wanted:
            return Translation(None, f"the chat template changes a message such as {text!r}")
    return Translation(affixes.go)


def _affixes(render: Render) -> Affixes:
    """Find the texts around messages. Raises ValueError where the rendered text does not contain the contents."""

    def cut(text: str, *contents: str) -> list[str]:
        parts = []
        for content in contents:
            before, found, text = text.partition(content)
            if not found or content in text:
                raise ValueError(f"a message is written {'twice' if found else 'otherwise'}")
            parts.append(before)
        return [*parts, text]

    first, to_answer, to_user, end = cut(
        render([("user", "Q1Q"), ("assistant", "A1A"), ("user", "Q2Q")]), "Q1Q", "A1A", "Q2Q"
    )
    before_system, to_question, _ = cut(render([("system", "S1S"), ("user", "Q1Q")]), "S1S", "Q1Q")
    user = _common_end(first, to_user, to_question)
    if not user:
        raise ValueError("nothing marks the user's turn")
    try:  # between two messages are the end of the first and the beginning of the second
        _, between, _ = cut(render([("user", "Q1Q"), ("user", "Q2Q")]), "Q1Q", "Q2Q")
        after_user = between.removesuffix(user)
    except FunctionFailed:  # turns have to alternate
        after_user = _common_start(to_answer, end)
    return Affixes(
        around={
            "system": (before_system, to_question.removesuffix(user)),
            "user": (user, after_user),
            "assistant": (to_answer.removeprefix(after_user), to_user.removesuffix(user)),
        },
        default=first.removesuffix(user),
        answer=end.removeprefix(after_user),
    )


def _common_start(one: str, other: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[:size] if size is not None else min(one, other, key=len)


def _common_end(*texts: str) -> str:
    shared = texts[0]
    for text in texts[1:]:
        shared = _common_start(shared[::-1], text[::-1])[::-1]
    return shared


def modelfile(name: str, translation: Translation, stops: Sequence[str], system: str | None) -> str:
    """The text of a Modelfile next to the GGUF file ``name``. Raises ModelError for a text that Ollama cannot read."""
    for place, text in (("FROM", name), *(("PARAMETER stop", stop) for stop in stops)):
        if '"' in text or not text.isprintable():
            raise ModelError(
                f"{text!r} has a quote, a line break or a control character, which {place} cannot have; expected none; "
                "choose another out, or write the Modelfile by hand"
            )
    lines = [f"FROM ./{name}"]
    if translation.go is None:
        lines.insert(0, f"# no TEMPLATE: {' '.join(translation.why_not.split())}")
    else:
        lines.append(f'TEMPLATE """{translation.go}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    if system is not None:
        if '"""' in system or system.endswith('"') or "\r" in system or "\0" in system:
            raise ModelError(
                "the system prompt has three quotes, one at its end, or a carriage return, which SYSTEM cannot have; "
                "expected none; set system to a text without"
            )
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"
