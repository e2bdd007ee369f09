"""Pairs against each other: the same two answers with the opposite label, and how the lengths of answers go with the
labels. Rows whose answers are the same are refused, or dropped where that is asked for; here those are counted.

That the longer answer is preferred may be what is meant, so a bias is a warning, with its interval, and no failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taut.checks.data.compared import pair_report
from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.session import Session
from taut.data.label_noise import Lengths, PairReport
from taut.evals.statistics import wilson_interval

SHOWN = 4
SAME = "are the same, token for token"
"""What the reason of a row with equal answers says."""
BIASED = 0.6
"""The low end of the share of pairs of which length alone tells the label, from which on it is a warning."""


def ask(session: Session) -> Finding:
    """Do the answers of a pair differ, and no two pairs contradict each other?"""
    if session.run.objective.kind != "preference":
        return skipped("the rows are no comparisons")
    report = session.once(pair_report)
    same = [one for one in session.train.report.dropped if SAME in one.reason]
    if same and 2 * len(same) > session.train.report.num_rows:
        return failed(
            f"{len(same):,} of {session.train.report.num_rows:,} rows have the same answer twice",
            number=len(same),
            unit="rows",
            evidence=[one.place for one in same[:SHOWN]],
            remedy="name the right columns in data.columns: chosen and rejected are to differ",
        )
    wrong = report.contradictions
    unit = f"of {report.num_pairs:,} pairs"
    if report.is_many(len(wrong)):
        return failed(
            f"{len(wrong):,} of {report.num_pairs:,} pairs contradict another: the same answers, the other way round",
            number=len(wrong),
            unit=unit,
            evidence=[f"{one.place} and {one.earlier}" for one in wrong[:SHOWN]],
            remedy="keep one of each: pairs that contradict each other teach nothing, and labels like these were mixed "
            "up (were sides swapped while the data were joined?)",
        )
    notes = list(_notes(report, same))
    lengths = report.lengths
    if lengths.num_unequal and is_biased(lengths):
        side = "longer" if lengths.num_longer > lengths.num_unequal / 2 else "shorter"
        return warned(
            told(lengths),
            number=lengths.accuracy,
            unit="of labels by length",
            remedy=f"if that is not what makes an answer better, add pairs whose chosen answer is not the {side} one: "
            "length is the easiest thing to learn from these",
            notes=notes,
        )
    return passed("answers differ, and labels agree", len(wrong), unit, notes)


def _notes(report: PairReport, same: Sequence[object]) -> Iterator[str]:
    if same:
        yield f"{len(same):,} rows with the same answer twice were dropped"
    if report.contradictions:
        one = report.contradictions[0]
        yield f"{len(report.contradictions):,} contradict another: {one.place} and {one.earlier}"
    if report.repeats:
        yield f"{len(report.repeats):,} of {report.num_pairs:,} pairs repeat another"
    if report.lengths.num_unequal and not is_biased(report.lengths):
        yield told(report.lengths)


def is_biased(lengths: Lengths) -> bool:
    """Whether length alone tells clearly more than half of the labels."""
    low, high = wilson_interval(lengths.num_longer, lengths.num_unequal)
    return max(low, 1 - high) > BIASED


def told(lengths: Lengths) -> str:
    """How length goes with the label, with a 95% interval."""
    share = lengths.num_longer / lengths.num_unequal
    low, high = wilson_interval(lengths.num_longer, lengths.num_unequal)
    said = f"chosen is the longer in {share:.0%} of pairs ({low:.0%} to {high:.0%})"
    if is_biased(lengths):
        side = "longer" if share > 0.5 else "shorter"
        said += f": length alone tells {lengths.accuracy:.0%} of labels, and {side} answers may be what is learned"
    return said
