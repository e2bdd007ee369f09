"""Prompts and completions that are plain text, of a model whose tokenizer has a chat template.

They are used as they are unless data.apply_chat_template is set. A chat server renders each question with the template,
so a model that is trained on plain text never sees the prompts it will be asked; where data.train also has
conversations, it learns two forms of the same thing. Documents (the column ``text``) are plain text by intention.
"""

from __future__ import annotations

from collections import Counter

from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.session import Session
from taut.checks.template.rendered import cut, short
from taut.data.messages import Completion, RowForm
from taut.io.console import counted

KEY = "data.apply_chat_template"
CHOICE = (
    f"set {KEY}=true to render them as a user and an assistant message, as a chat server will; or {KEY}=false if plain "
    "text is what the model will be given"
)
SHOWN = 2


def ask(session: Session) -> Finding:
    """Do plain prompts and completions of a chat model go through its template, or is it set that they do not?"""
    if session.language.renderer.template.template is None:
        return skipped("the tokenizer has no chat template")
    forms = {name: data.forms for name, data in session.data}
    num_plain = sum(form["completion"] for form in forms.values())
    num_rows = sum(sum(form.values()) for form in forms.values())
    num_chats = sum(form["conversation"] for form in forms.values())
    unit = f"of {num_rows:,} rows"
    asked = session.run.data.apply_chat_template
    if asked is not None:
        how = "rendered with the template" if asked else "used as they are"
        return passed(f"{KEY} is set: plain prompts and completions are {how}", num_plain, unit)
    if not num_plain:
        return skipped("no row is a prompt and a completion as plain text")
    counts = [f"data.{name}: {_counts(form)}" for name, form in forms.items()]
    if forms["train"]["completion"] and forms["train"]["conversation"]:
        return failed(
            f"data.train has {counted(forms['train']['completion'], 'plain prompts')} with completions, used without "
            f"the chat template, and {counted(forms['train']['conversation'], 'conversations')}, rendered with it",
            number=num_plain,
            unit=unit,
            evidence=[*counts, *_examples(session)],
            remedy=CHOICE,
        )
    return warned(
        "plain prompts and completions are used without the chat template that the tokenizer has",
        number=num_plain,
        unit=unit,
        evidence=[*(counts if num_chats else ()), *_examples(session)],
        remedy=CHOICE,
    )


def _counts(form: Counter[RowForm]) -> str:
    return ", ".join(counted(number, f"{name}s") for name, number in sorted(form.items()) if number)


def _examples(session: Session) -> list[str]:
    """The first plain rows, as the model is given them."""
    plain = [row for row in session.rows if isinstance(row, Completion)]
    return [f"{short(row.place)}: {cut(row.prompt + row.completion)}" for row in plain[:SHOWN]]
