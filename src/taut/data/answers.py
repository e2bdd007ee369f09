"""Rows to samples where answers are judged: ids and targets as SFT has them, values, places to read, and what is left.

Every answer is rendered as the row of SFT that it is, and ends at its last target: what a template writes after the end
of a turn is no part of it, so that the last token, where a reward is read, is the one a server stops at. Of whole texts
(documents) that are compared the prompt is what their ids have in common, and the rest is learned.

Steps are read at the token that holds the last character of each which is not white space. One token that holds the
end of a step and the beginning of the next cannot be read for the one without the other: a RenderError.

A row whose answers are compared needs two that differ, in preference and in ids. Where the length policy takes an
answer away, or cuts two to the same, the row goes as a whole and is listed; a list of more goes on with those left.

``fit_any`` and ``render_any`` take rows of SFT too, and leave them to ``render.py`` and ``length.py``; ``render_each``
goes on past rows whose pictures cannot be had. Imported by ``dataset.py`` and ``attempts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from taut.data.formats import Conversation, Document, Row
from taut.data.length import Incident, Limits, fit
from taut.data.pictures import is_same_input, within
from taut.data.preferences import Answers, AnyRow, Stepwise
from taut.data.render import Renderer
from taut.data.template import common_length
from taut.errors import DataError, PictureError, RenderError
from taut.types import Sample


def render_any(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample]]:
    """The samples of each row, answers in their order."""
    answers = [answers_of(row) for row in rows]
    rendered = iter(renderer.render_all([answer for group in answers for answer in group]))
    found = [[next(rendered) for _ in group] for group in answers]
    return [
        _finish(row, samples, renderer) if isinstance(row, Answers | Stepwise) else samples[0]
        for row, samples in zip(rows, found, strict=True)
    ]


def render_each(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample] | PictureError]:
    """The same, with the error in the place of a row that has a picture which cannot be had."""
    faults = faults_of_pictures(rows, renderer)
    good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    rendered = iter(render_any(good, renderer))
    return [next(rendered) if fault is None else fault for fault in faults]


def faults_of_pictures(rows: Sequence[AnyRow], renderer: Renderer) -> list[PictureError | None]:
    """What is wrong with the first such picture of each row."""
    renderer.look(answer for row in rows for answer in answers_of(row))
    return [_fault_of_pictures(row, renderer) for row in rows]


def _fault_of_pictures(row: AnyRow, renderer: Renderer) -> PictureError | None:
    try:
        for answer in answers_of(row):
            if isinstance(answer, Conversation):
                renderer.template.pictures.place_each(answer.messages, answer.place)
    except PictureError as error:
        return error
    return None


def fit_any(
    row: AnyRow, samples: Sequence[Sample], limits: Limits
) -> tuple[list[Sample], list[Incident]]:
    """The samples as the length policy leaves them, and what was left out or cut."""
    fitted = [fit(sample, limits, is_document=isinstance(row, Document)) for sample in samples]
    kept = [sample for found, _ in fitted for sample in found]
    incidents = [incident for _, incident in fitted if incident is not None]
    if isinstance(row, Answers) and len(samples) > 1:
        return _fit_compared(row, samples, kept, incidents, limits)
    if isinstance(row, Stepwise) and kept and not kept[0].read_values["label"].size:
        reason = f"{incidents[0].reason}, no step left"
        return [], [Incident(row.place, "dropped", reason, samples[0].num_targets)]
    return kept, incidents


def answers_of(row: AnyRow) -> tuple[Row, ...]:
    """Each as the row of SFT that it is."""
    if isinstance(row, Answers):
        return row.answers
    return (row.answer if isinstance(row, Stepwise) else row,)


def _finish(
    row: Answers | Stepwise, rendered: Sequence[Sequence[Sample]], renderer: Renderer
) -> list[Sample]:
    samples = [_only(found) for found in rendered]
    if isinstance(row, Stepwise):
        return [_with_reads(row, _ended(samples[0]), renderer)]
    if len(samples) > 1 and isinstance(row.answers[0], Document):
        samples = _after_common(row.place, samples, renderer)
    return [
        replace(_ended(sample), values={name: given[index] for name, given in row.values.items()})
        for index, sample in enumerate(samples)
    ]


def _only(found: Sequence[Sample]) -> Sample:
    if len(found) == 1:
        return found[0]
    place = found[0].id.rpartition("#")[0]
    raise RenderError(
        f"{place}: the chat template writes earlier turns in another way than they were generated, so the turns of "
        f"this answer make {len(found)} samples; expected one; set data.targets=last, or give answers of one turn"
    )


def _ended(sample: Sample) -> Sample:
    """Without what is after the last target."""
    if not sample.num_targets:
        return sample
    stop = int(sample.target_at_N[-1]) + 1
    return replace(sample, ids_T=sample.ids_T[:stop], media=within(sample.media, 0, stop))


def _after_common(place: str, samples: Sequence[Sample], renderer: Renderer) -> list[Sample]:
    """Whole texts, of which what comes after their common beginning is learned."""
    lists = [sample.ids_T.tolist() for sample in samples]
    start = min(common_length(lists[0], ids) for ids in lists[1:])
    common = renderer.tokenizer.decode(lists[0][:start], skip_special_tokens=True)
    if not str(common).strip():
        raise RenderError(
            f"{place}: the answers are texts that have no beginning in common, and there is no prompt; expected a "
            "prompt that each begins with, or one in a column of its own; name it with "
            "data.columns='{prompt = \"...\"}'"
        )
    found = []
    for sample, ids in zip(samples, lists, strict=True):
        # of equal texts the last token stays: what to do with them is not decided here
        first = max(min(start, len(ids) - 1), 1)
        renderer.require_none_inside(ids[first:-1], ids[-1], sample.id)
        at = np.arange(first, len(ids))
        found.append(replace(sample, target_at_N=at, weight_N=np.ones(at.size)))
    return found


def _with_reads(row: Stepwise, sample: Sample, renderer: Renderer) -> Sample:
    """The sample with the last token of each step, and its label."""
    text, start = renderer.answer_text(row.answer)
    if start is None:
        raise RenderError(
            f"{row.place}: the chat template does not write the steps as they are; expected their text unchanged; give "
            "another one with data.template=FILE"
        )
    spans = renderer.template.spans(text)
    holders = np.array([(first, stop) for first, stop in spans if first < stop])
    assert len(holders), f"{row.place}: the tokenizer says where its tokens lie"
    numbers = np.array([number for number, (first, stop) in enumerate(spans) if first < stop])
    at: list[int] = []
    begins = [begin for begin, _ in row.steps[1:]]
    for number, (_, end) in enumerate(row.steps):
        is_last = (holders[:, 0] < start + end) & (start + end <= holders[:, 1])
        if not is_last.any():
            raise RenderError(
                f"{row.place}: no token holds the end of completions[{number}]; expected text that the tokenizer takes "
                "whole; correct the step"
            )
        found = int(np.flatnonzero(is_last)[-1])
        token = int(numbers[found])
        if number < len(begins) and holders[found, 1] > start + begins[number]:
            raise RenderError(
                f"{row.place}: one token, {renderer.template.quoted(sample.ids_T[token : token + 1].tolist())}, holds "
                f"the end of completions[{number}] and the beginning of the next; expected a token that ends between "
                "them; set data.step_separator"
            )
        at.append(token)
    labels = np.array(row.labels, dtype=np.float64)
    return replace(sample, read_at_R=np.array(at, dtype=np.int64), read_values={"label": labels})


def _fit_compared(
    row: Answers,
    samples: Sequence[Sample],
    kept: list[Sample],
    incidents: list[Incident],
    limits: Limits,
) -> tuple[list[Sample], list[Incident]]:
    """The answers that are left, or none of them."""
    fault = _fault(row, kept)
    if fault is None:
        return kept, incidents
    if incidents:
        first = incidents[0]
        number = f"answer {first.place.rpartition('#')[2]}"
        reason = f"{fault}: {number} was {first.kind} ({first.reason})"
    elif limits.without_targets == "error":
        raise DataError(
            f"{row.place}: {fault}; expected two answers of which one is better; correct the row or remove it, or set "
            "data.without_targets=drop"
        )
    else:
        reason = fault
    lost = sum(sample.num_targets for sample in samples)
    return [], [Incident(row.place, "dropped", reason, lost)]


def _fault(row: Answers, kept: Sequence[Sample]) -> str | None:
    """Why nothing can be learned of these answers together."""
    judgement = next(iter(row.values))
    if row.is_compared and len(kept) < 2:
        return "one answer is left" if kept else "no answer is left"
    if row.is_compared and len({sample.values[judgement] for sample in kept}) < 2:
        return "no answer is better than another"
    for left, right in combinations(kept, 2):
        is_other = left.values[judgement] != right.values[judgement]
        if is_other and is_same_input(left, right):
            names = " and ".join(it.id.rpartition("#")[2] for it in (left, right))
            return f"answers {names} are the same, token for token"
    return None
