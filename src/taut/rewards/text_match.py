r"""Rewards that compare texts: exact match, containment, a regular expression.

The first two compare normalized texts, by one of two rules:

    text    lower case, single spaces, no articles and no punctuation, except what carries meaning: the sign, point,
            currency, percent and ratio of a number (-5, 0.5, $5, 50%, 1/2, 12:30), operators (x=5), C++, C#, A+, B-. An
            A that is no article stays (Plan A), and so does what is last.
    squad   SQuAD's (arXiv:1606.05250): no ASCII punctuation and no articles at all, so that -5 is 5 and Plan A is Plan

A step that would leave nothing is skipped, so that the answers "A" and "+" stay answers.
"""

from __future__ import annotations

import re
import string
from typing import ClassVar, Literal, TypeAlias

from taut.config import configclass
from taut.rewards.settings import Judged, Place
from taut.rewards.verifier import RewardInput, Verifier, compile_pattern

Rule: TypeAlias = Literal["text", "squad"]

_ASCII = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"(?<!\S)(?:an|the)(?!\S)|(?<!\S)a(?=\s+\S)")
_LETTER_A = re.compile(
    r"(?<![\w'\u2019-])A(?![\w'\u2019-])(?=[^\w\s+#]|\s*$|\s+(?:is|and|or|because|since)\b)|(?<=[\w,;)] )A(?=\s+[a-z])"
)
_PRONOUN = re.compile(r"\bI(?=['\u2019]|\s+(?!(?:is|and|or|because|since)\b)[a-z])")
_OTHER_MARKS = (
    "\u00a1\u00ab\u00bb\u00bf\u060c\u061b\u061f\u0964\u2014\u2018-\u201f\u2026\u3001\u3002\u3008-\u3011"
    "\uff01\uff08\uff09\uff0c\uff0e\uff1a\uff1b\uff1f"
)
"""Punctuation of other scripts and quotation marks."""
_JOINED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|(?<=\d)\s+(?=%)|(?<=^[-+])\s+(?=[\d.])")
_MARKS = re.compile(
    r"(?P<kept>(?<![-\w.+$€£])[-+$€£.]+(?=\.?\d)|(?<=\d)%|(?<=\d)[-.,:](?=\d)|(?<=\w)[=<>^*/+|~]+(?=[\w(-])"
    r"|(?<=[^\W\d_])(?:\+\+?|#)(?!\w)|(?<!\w\w)(?<=[a-z])-(?!\w)|(?<!\w)-(?=[a-z]\b))"
    rf"|[{re.escape(string.punctuation)}{_OTHER_MARKS}]"
)
_WITHOUT_SPACES = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
"""Letters of scripts that do not separate words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""


def normalize(text: str, rule: Rule = "text") -> str:
    """Normalize a text by a rule, for comparison."""
    if rule == "text":
        text = _LETTER_A.sub("a\ue000", re.sub("[\u2212\u2013]", "-", text))
    plain = " ".join(text.lower().split())
    if rule == "squad":
        bare = plain.translate(_ASCII)
        articles = re.compile(r"\b(a|an|the)\b")
    else:
        bare, articles = plain, _ARTICLES
        for _ in range(
            4
        ):  # what is left may stand in other company; no more than that, for attacks
            bare = _MARKS.sub(lambda mark: mark["kept"] or "", _JOINED.sub("", bare)).strip()
    words = " ".join(bare.split()) or plain
    return (" ".join(articles.sub(" ", words).split()) or words).replace("\ue000", "")


@configclass
class ExactMatch(Verifier):
    """1 if the whole answer equals one of the references, both normalized; else 0."""

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    normalize: Rule = "text"
    """How texts are normalized. text: lower case, no articles, no punctuation but what carries meaning (-5, 0.5, 50%,
    C++). squad: SQuAD's rule, no punctuation at all."""

    def __call__(self, answer: RewardInput) -> float | None:
        """None if there is no reference."""
        if not answer.references:
            return None
        right = [normalize(reference, self.normalize) for reference in answer.references]
        return float(normalize(answer.text, self.normalize) in right)


@configclass
class Contains(Verifier):
    """1 if the words of one of the references occur in the answer, consecutive and in order, both normalized; else 0.

    Words are what spaces separate: "fox" is not in "foxhound". In scripts without spaces (Chinese, Japanese, Thai, Lao,
    Khmer, Burmese) a reference may begin and end anywhere.
    """

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    normalize: Rule = "text"
    """The normalization of exact_match."""

    def __call__(self, answer: RewardInput) -> float | None:
        """None if there is no reference."""
        if not answer.references:
            return None
        text = normalize(answer.text, self.normalize)
        right = [normalize(reference, self.normalize) for reference in answer.references]
        if "i" in right and self.normalize == "text":
            text = normalize(_PRONOUN.sub("", answer.text))
        # Whole words, except where a script does not separate them.
        for words in right:
            before = "" if re.match(_WITHOUT_SPACES, words) else r"(?<!\S)"
            after = "" if re.match(_WITHOUT_SPACES, words[-1:]) else r"(?!\S)"
            if re.search(before + re.escape(words) + after, text) is not None:
                return 1.0
        return 0.0


@configclass
class Regex(Verifier):
    """1 if a regular expression (Python's) is found in the answer; else 0.

    Some expressions take for ever on some texts, so they run in a process with a time limit; an answer that reaches it
    gets 0.
    """

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30
    unjudged: ClassVar[float | None] = 0.0

    pattern: str
    """The regular expression. Flags go inside: (?s) a dot matches any character, (?i) case does not matter, (?m) ^ and
    $ match at each line."""
    is_whole: bool = False
    """Match the whole answer, not a part of it."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def __call__(self, answer: RewardInput) -> float:
        match = re.fullmatch if self.is_whole else re.search
        return float(match(self.pattern, answer.text) is not None)
