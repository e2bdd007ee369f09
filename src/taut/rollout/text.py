"""Sampled ids -> text, and where a stop string ends it.

A character may take several tokens, so text is decoded from all ids so far. What follows a stop string is cut from the
text; the ids stay as they were sampled. Special tokens other than the one that ended the completion stay visible:
hiding them would hide a fault.

May import nothing of ours. Engines import it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

TAIL = 8
"""Tokens decoded beyond a stop string's own length when it is looked for at the end of a completion."""


class Texts:
    """Texts of completions of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)

    def has_stop(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the last token completed one of the stop strings."""
        if not stops:
            return False
        longest = max(len(stop.encode()) for stop in stops)  # a token is at least a byte
        tail = ids[-(longest + TAIL) :]
        now, before = self._decode(tail), self._decode(tail[:-1])
        return any(now.count(stop) > before.count(stop) for stop in stops)

    def text(self, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text of a finished completion, up to its end."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text = self._decode(ids)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
