"""SQuAD's normalisation (arXiv:1606.05250): lower case, no ASCII punctuation, no articles, single spaces.

A step that would leave nothing is left out, so that the answers "A" and "+" stay answers.

Imports nothing of ours. Rewards that compare words import it.
"""

from __future__ import annotations

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """``text`` as it is compared."""
    plain = " ".join(text.lower().split())
    words = " ".join(plain.translate(_PUNCTUATION).split()) or plain
    return " ".join(_ARTICLES.sub(" ", words).split()) or words
