"""Keys of ``taut score``. They import no torch, so that ``taut score --help`` is quick."""

from __future__ import annotations

from typing import Literal

from taut.commands.settings import RowSettings
from taut.config import configclass
from taut.data.settings import Source
from taut.inference.settings import JudgeUse


@configclass
class Score(RowSettings, JudgeUse):
    """A reward model's scores of a file of answers."""

    data: str | Source
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: rows with one answer or several."""
    out: str | None = None
    """The JSONL file to write; it must not exist, unless overwrite. If not set, only the summary is printed."""
    kind: Literal["auto", "answer", "preference", "stepwise"] = "auto"
    """Content of the rows: one answer, several to one prompt, or one in steps; auto recognizes it by the first row."""
    step_separator: str = "\n"
    """Text between the steps of an answer."""
    overwrite: bool = False
    """Replace an existing file."""
    json: bool = False
    """Print only the summary, as JSON."""
