"""What the data became as tokens: ids the model has no row for, unknown tokens, broken characters. Special tokens in
messages are ``template.markup``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from taut.checks.data.records import Flat, flat_train, rows
from taut.checks.data.texts import CONTROLS, Broken, texts
from taut.checks.finding import Finding, failed, passed, warned
from taut.checks.session import Session
from taut.checks.template.rendered import short
from taut.data import messages
from taut.data.messages import Completion, Document, Row
from taut.run.config import num_rows

UNKNOWN = 0.2
BROKEN = 0.1
"""Shares of tokens and of rows from which on the data are not what they should be."""
SOME = 0.001
"""A larger share of rows with a broken character is a warning."""
SHOWN = 4
ENTITY = re.compile("&(?:lt|gt|amp|quot|apos|nbsp|#39|#x27);")
"""What HTML writes for a character."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Tokens with which a tokenizer falls back on bytes."""


def ask(session: Session) -> Finding:
    """Are the tokens those of the text that is meant?"""
    look = session.once(flat_train)
    problem = _beyond(session) or _unknown(session, look) or _broken(session)
    if problem:
        return problem
    if warning := _few_broken(session) or _escaped(session.once(rows)):
        return warning
    size, num_used = num_rows(session.language), int(np.count_nonzero(np.bincount(look.ids_T)))
    said = f"different tokens, {num_used / size:.1%} of the vocabulary{look.looked_at}"
    return passed(said, num_used, "tokens", _notes(session, look))


def _beyond(session: Session) -> Finding | None:
    """Ids without a row."""
    size = num_rows(session.language)
    for _, data in session.data:
        if beyond := data.first_beyond(size):
            place, index = beyond
            token = session.tokenizer.convert_ids_to_tokens(index)
            return failed(
                f"token {index} of the data has no row: the model has {size:,}",
                number=index,
                unit=f"of {size:,} rows",
                evidence=[f"first in {place}", f"the tokenizer writes it {token!r}"],
                remedy="use the model's own tokenizer; tokens that somebody added to it are to be taken out and named "
                "in tokens.add, which gives the model rows for them",
            )
    return None


def _unknown(session: Session, look: Flat) -> Finding | None:
    """Text that the tokenizer has no tokens for."""
    unknown = session.tokenizer.unk_token_id
    is_unknown = look.ids_T == (-1 if unknown is None else unknown)
    num_found = int(is_unknown.sum())
    if num_found <= UNKNOWN * look.ids_T.size:
        return None
    share = num_found / look.ids_T.size
    first = look.name(int(look.sample_T[is_unknown.argmax()]))
    return failed(
        f"{share:.0%} of tokens are the unknown token {session.tokenizer.unk_token!r}",
        number=share,
        unit="of tokens",
        evidence=[f"first in {first}"],
        remedy="the tokenizer was not made for this language; train a model whose tokenizer knows it",
    )


def text_of(row: Row) -> list[str]:
    """A row's texts."""
    if isinstance(row, Document):
        return [row.text]
    if isinstance(row, Completion):
        return [row.prompt, row.completion]
    return [messages.text_of(message["content"]) for message in row.messages]


def _broken(session: Session) -> Finding | None:
    """Characters lost or doubled by a wrong encoding, in many rows of the training data."""
    looked = session.once(texts)["train"]
    num_rows = len(looked.places)
    found = [one for one in looked.broken if one.what != CONTROLS]
    if len(found) <= BROKEN * num_rows:
        return None
    kinds = " or ".join(dict.fromkeys(one.what for one in found))
    return failed(
        f"{len(found):,} of {num_rows:,} rows have {kinds}{looked.looked_at}",
        number=len(found),
        unit=f"of {num_rows:,} rows",
        evidence=_examples(found),
        remedy="the file was written after reading it in another encoding; write it again from its source, as UTF-8",
    )


def _few_broken(session: Session) -> Finding | None:
    """The same in some rows of either split."""
    looked = session.once(texts).values()
    found = [broken for one in looked for broken in one.broken]
    num_rows = sum(len(one.places) for one in looked)
    if len(found) <= SOME * num_rows:
        return None
    kinds = " or ".join(dict.fromkeys(one.what for one in found))
    return warned(
        f"{len(found):,} of {num_rows:,} rows have {kinds}",
        number=len(found),
        unit=f"of {num_rows:,} rows",
        evidence=_examples(found),
        remedy="look at these rows; correct them, or leave them out: the model learns to write such characters",
    )


def _examples(found: Sequence[Broken]) -> list[str]:
    """The first row of each different excerpt: one broken document may be in many rows."""
    different = {one.excerpt: one for one in reversed(found)}
    first = [one for one in found if different[one.excerpt] is one]
    return [f"{short(one.place)}: {one.excerpt!r} ({one.what})" for one in first[:SHOWN]]


def _escaped(looked: list[Row]) -> Finding | None:
    """Texts that some program escaped, where they are more than a few."""
    text_by = {row.place: "".join(text_of(row)) for row in looked}
    ways = {
        "HTML entities, as &lt;": [it for it, text in text_by.items() if ENTITY.search(text)],
        "\\n for line breaks": [
            it for it, text in text_by.items() if "\\n" in text and "\n" not in text
        ],
    }
    for what, found in ways.items():
        if len(found) > BROKEN * len(looked):
            return warned(
                f"{len(found):,} of {len(looked):,} rows have {what}",
                number=len(found),
                unit=f"of {len(looked):,} rows",
                evidence=found[:SHOWN],
                remedy="undo what the program that wrote the file did to its texts, or leave them if the answers are "
                "to be written so",
            )
    return None


def _notes(session: Session, look: Flat) -> list[str]:
    found = [broken for one in session.once(texts).values() for broken in one.broken]
    notes = [f"{len(found):,} rows have broken characters"] if found else []
    notes += _examples(found)
    unknown = session.tokenizer.unk_token_id
    if unknown is not None and (times := int((look.ids_T == unknown).sum())):
        notes.append(f"{times:,} tokens are unknown")
    number_of = session.tokenizer.backend_tokenizer.token_to_id
    falls_back = [index for byte in BYTES if (index := number_of(byte)) is not None]
    if falls_back and (times := int(np.isin(look.ids_T, falls_back).sum())):
        notes.append(f"{times:,} tokens are single bytes")
    return notes
