"""Find rows that hold a question of an evaluation: training on them would make its result worthless.

A row is removed if it has a run of ``ngram`` words in common with a question, anywhere in its prompt or its answers.
White space separates words in the normalized text (``rows.normalized``), as in s1 (arXiv 2501.19393) and open-r1,
which take 8 words; GPT-3 (arXiv 2005.14165) takes 13. A question of fewer words removes the rows whose whole prompt it
is.

Only the questions are held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from taut_tools.curate.rows import RowSet, Verdict, content, normalized, shingles
from taut_tools.curate.settings import Part


class Questions:
    """The questions of evaluations, by their n-grams."""

    def __init__(self, rows: RowSet, ngram: int) -> None:
        self.rows, self.ngram = rows, ngram
        self.places: dict[str, str] = {}
        """Place of the first question with an n-gram, or that is this shorter text."""
        self.num_short = 0
        """Number of questions with fewer than ``ngram`` words."""
        for place, _, row in rows.rows():
            text = normalized(content(row).prompt)
            self.num_short += text.count(" ") + 1 < ngram
            for gram in shingles(text, ngram):
                self.places.setdefault(gram, place)

    def verdicts(self, rows: RowSet, on: Part) -> Iterator[Verdict]:
        """Judge each row, in order."""
        for line in rows.lines():
            each = line.content
            texts = (each.prompt,) if on == "prompt" else (each.prompt, *each.answers)
            for number, text in enumerate(map(normalized, texts)):
                # an answer that is shorter than an n-gram is no question
                grams = (
                    shingles(text, self.ngram)
                    if number == 0 or len(text.split()) >= self.ngram
                    else ()
                )
                shared = [gram for gram in grams if gram in self.places]
                if shared:
                    question = self.places[min(shared)]
                    details = {"question": question, "shared": min(shared), "ngrams": len(shared)}
                    yield Verdict(line, "contaminated", details)
                    break
            else:
                yield Verdict(line)
