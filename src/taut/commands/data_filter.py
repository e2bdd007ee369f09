"""``taut data filter IN ... out=FILE.jsonl|DIR/``: only the rows that keep every condition.

Each row is measured, then judged (curate/conditions.py):

    characters          of prompt and answers
    tokens              of its longest sample, as model renders it
    loss                mean negative logprob of its targets under model
    reward              weighted sum of the rewards that judge its answer
    pass_rate           share of the completions of its prompt that reach pass_reward, of a file of ``taut generate
                        rewards=...`` or of the scores of ``taut eval``
    language            the share of its prompt and answers in one of the languages

What takes long, loss and reward, is kept in ``out`` + ``.measured.jsonl``, a line for each row as soon as it is known.
After a kill the same command with ``resume=true`` goes on from there; with other bounds it starts from the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from taut.commands.data import WritesRows, Curated, open_for, show, write
from taut.commands.reading import print_decisions, write_errors
from taut.config import ComputeDtype, configclass, home_path, to_dict
from taut.curate.conditions import Bound, Conditions, read_pattern, read_where
from taut.curate.output import beside
from taut.curate.rows import RowSet, Verdict, chunks, content
from taut.data.messages import Completion, Conversation, Document, text_of
from taut.data.packing import ALONE, pack
from taut.data.render import render_any
from taut.data.prompts import texts_of_reference
from taut.data.schema import AnyRow, best_row
from taut.errors import ConfigError, DataError, OutputError
from taut.inference.local import LocalEngine
from taut.inference.open import ModelUse, open_engine, open_renderer
from taut.inference.reward_model import open_rater
from taut.io import files
from taut.io.terminal import Terminal
from taut.rewards import Answered, Panel, RewardSpec, open_panel
from taut.rewards.format import Language
from taut.types import Sample

CHUNK_ROWS = 256
"""Rows that are measured at a time."""
MEASURED = "measured.jsonl"
DECIMALS = 6
"""Decimals of a measured value in the file."""


@configclass
class Filter(WritesRows):
    """Keep the rows that keep every condition."""

    min_characters: int | None = None
    """Fewest characters of prompt and answers."""
    max_characters: int | None = None
    """Most characters of prompt and answers."""
    min_tokens: int | None = None
    """Fewest tokens of a row's longest sample; needs model."""
    max_tokens: int | None = None
    """Most tokens of a row's longest sample; needs model."""
    min_loss: float | None = None
    """Smallest mean loss of a row's targets under model: below it, the model knows the answer already."""
    max_loss: float | None = None
    """Largest mean loss of a row's targets under model."""
    min_reward: float | None = None
    """Smallest reward of a row's answer; needs rewards."""
    max_reward: float | None = None
    """Largest reward of a row's answer; needs rewards."""
    min_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Smallest share of the prompt's completions that pass; needs completions."""
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of the prompt's completions that pass; needs completions."""
    language: str | None = None
    """ISO 639-1 code (en, de, zh, ...) of the language that a row's prompt and answers are in."""
    min_language: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Smallest share of a row's letters in the language. A row of too few letters to tell is kept."""
    match: str | None = None
    """Regular expression (Python's) that a row's text must contain."""
    reject: str | None = None
    """Regular expression (Python's) that a row's text must not contain."""
    where: list[str] = ()  # type: ignore[assignment]
    """Conditions on columns: COLUMN, one of == != >= <= > <, and a value, as in 'score >= 0.5'; a dot leads into an
    object: 'meta.lang == en'."""
    model: str | None = None
    """Directory or hub name of the model that counts tokens and computes losses."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """Compute dtype of losses; by default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N, for losses."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 8192
    """Most tokens of one forward; a longer sample is computed alone."""
    rewards: str | list[str | RewardSpec] | None = None
    """Rewards that judge a row's answer: names of docs/rewards.md, FILE.py:function, or tables of them, with
    options."""
    reference: str | None = None
    """Column with the right answer, or a list of them, for rewards that compare with one."""
    completions: str | None = None
    """Completions with rewards: a file of taut generate rewards=..., or scores.jsonl of taut eval. A row is found by its
    id, else by its place."""
    pass_reward: float = 1.0
    """Reward from which a completion passes."""
    resume: bool = False
    """Use what an earlier run of the same command measured, and go on from there."""
