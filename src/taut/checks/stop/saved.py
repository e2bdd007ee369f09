"""The tokenizer is saved as it will be, beside the model's config, in a temporary directory, and read as a server does.

A server takes the class that config.json implies and the template that is saved, in which eos and pad may be others
than in training. The first rows' prompts are rendered with it and their ids compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.stop.served import served
from taut.data.chat_template import Ids, Text, common_length
from taut.data.messages import Completion, Conversation, Row
from taut.data.render import Renderer
from taut.errors import TautError
from taut.io.temporary import TemporaryFolder
from taut.models.load import load_tokenizer, quiet_library

ROWS = 16
CHARACTERS = 100_000
"""Of all prompts together, but for the first."""


def ask(session: Session) -> Finding:
    """Does a server that loads the saved tokenizer and template feed the model the same tokens?"""
    prompts = list(_prompts(session))
    if not prompts:
        return skipped("no row could be rendered")
    try:
        reader = _reloaded(session)
    except TautError as error:
        return failed(
            "the saved tokenizer cannot be loaded",
            evidence=[str(error)],
            remedy="load the base model's tokenizer with AutoTokenizer and save it again",
        )
    reader.template.day = session.renderer.template.day
    for number, (row, ids) in enumerate(prompts):
        try:
            found = _ids(row, reader)
        except TautError as error:
            return _failed(number, prompts, [str(error)])
        if found != ids:
            quoted, at = reader.template.quoted, common_length(found, ids)
            where = (
                f"{row.place}: after {quoted(ids[max(0, at - 4) : at])} trained on "
                f"{quoted(ids[at : at + 4])}, served {quoted(found[at : at + 4])}"
            )
            kind = f"it reads back as {type(reader.tokenizer).__name__}, eos {reader.tokenizer.eos_token}"
            return _failed(number, prompts, [where, kind])
    return passed("the same tokens", len(prompts), "prompts")


def _failed(number: int, prompts: list[tuple[Row, Ids]], evidence: list[str]) -> Finding:
    return failed(
        "the saved tokenizer and template give a server other tokens than training",
        number=number,
        unit=f"of {len(prompts)} prompts the same",
        evidence=evidence,
        remedy="a template that writes eos_token or pad_token other than at an answer's end has to name the token "
        "itself (data.template=FILE); else load the tokenizer with AutoTokenizer and save it again",
    )


def _prompts(session: Session) -> Iterator[tuple[Row, Ids]]:
    """What a server is asked: the rows' prompts, and their ids in training."""
    room = CHARACTERS
    for row in session.rows[:ROWS]:
        try:
            ids = _ids(row, session.renderer)
        except TautError:
            continue  # the template's checks, or data.rows
        yield row, ids
        room -= 4 * len(ids)
        if room < 0:
            return


def _ids(row: Row, renderer: Renderer) -> Ids:
    if isinstance(row, Conversation):
        before = row.messages[: row.learned[-1]] if row.learned else row.messages
        ids: Ids = renderer.prompt_ids(before, row.tools).tolist()
        return ids
    text = Text(row.prompt if isinstance(row, Completion) else row.text, is_rendering=False)
    return renderer.template.encode([text])[text]


def _reloaded(session: Session) -> Renderer:
    config = copy.deepcopy(session.language.config)
    with TemporaryFolder("check") as place:
        with quiet_library():
            config.save_pretrained(place)
            served(session).save_pretrained(place)
        read, album = (
            load_tokenizer(str(place), session.run.trust_remote_code),
            session.renderer.album,
        )
        if album is None:
            return Renderer(read)
        return Renderer(
            read, str(read.chat_template), album=album
        )  # run.saved looks at the album's files
