"""A GGUF file that somebody else wrote, damaged by chance and on purpose: read, or refused in one line, at once."""

from __future__ import annotations

import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import PreTrainedModel

from taut.errors import ModelError, TautError
from taut_tools.export.gguf import (
    Metadata,
    bits_of,
    differences,
    open_gguf,
    read_weights,
    vocabulary,
    write_gguf,
)


class Sound(NamedTuple):
    """A file, and the model that it was made of."""

    content: bytes
    model: PreTrainedModel
    wanted: Metadata


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = tiny_tokenizer("chatml")
    model = tiny_model("llama", vocab_size=len(tokenizer), intermediate_size=64)
    config: Any = model.config
    wanted = vocabulary(tokenizer, config, [tokenizer.eos_token_id], config.vocab_size)
    write_gguf(model, wanted, "q8_0", folder / "m.gguf")
    return Sound((folder / "m.gguf").read_bytes(), model, wanted)


def ask(path: Path, sound: Sound) -> None:
    """All that ``taut verify`` asks of a file."""
    file = open_gguf(path)
    differences(file, sound.model.config, sound.wanted)
    bits_of(file)
    read_weights(file, sound.model)


def refusal(path: Path, sound: Sound, *, is_traced: bool = True) -> str:
    """Why it is refused; empty: it is not. At once, and in bounded memory."""
    if is_traced:  # which takes as long again
        tracemalloc.start()
    began, reason = time.process_time(), ""
    try:
        ask(path, sound)
    except TautError as error:
        reason = str(error)
    took, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 2 and peak < 2**26, f"{took:.1f} s, {peak:,} bytes: {reason}"
    assert "\n" not in reason and len(reason) < 700
    return reason


def damaged(content: bytes, random: Random) -> bytes:
    """The file with one to eight mistakes, most of them in its keys, which come first."""
    made = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        at = random.randrange(len(made) if random.random() < 0.2 else len(made) // 8)
        match random.randrange(5):
            case 0:
                made[at] ^= 1 << random.randrange(8)
            case 1:
                made[at : at + 8] = struct.pack("<Q", random.choice((0, 1, 2**31, 2**40, 2**63)))
            case 2:
                made[at : at + 4] = struct.pack("<I", random.randrange(14))
            case 3:
                del made[at : at + random.choice((1, 4, 8, 100))]
            case 4:
                made[at:at] = random.randbytes(random.choice((1, 4, 8, 100)))
    return bytes(made)


def test_a_sound_file_is_read(sound: Sound, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound.content)
    assert refusal(path, sound) == ""
    assert not any(differences(open_gguf(path), sound.model.config, sound.wanted).values())


def test_damaged_by_chance(sound: Sound, tmp_path: Path) -> None:
    path, refused = tmp_path / "m.gguf", 0
    for seed in range(300):
        path.write_bytes(damaged(sound.content, Random(seed)))
        refused += bool(refusal(path, sound, is_traced=False))
    assert refused > 100


def test_cut_anywhere(sound: Sound, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for size in (0, 1, 4, 8, 23, 24, 25, 1000, len(sound.content) * 9 // 10):
        path.write_bytes(sound.content[:size])
        assert "cannot be read as GGUF" in refusal(path, sound)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def file_of(
    *, keys: bytes = b"", tensors: bytes = b"", counts: tuple[int, int], data: int = 64
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + keys + tensors
    return head + bytes(-len(head) % 32) + bytes(data)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARRAY = text(b"k") + struct.pack("<II", 9, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (file_of(counts=(0, 2**40)), "is there twice|unknown type|breaks off"),
        (file_of(counts=(2**63, 0)), "has 0 dimensions"),
        (file_of(counts=(0, 1), keys=ARRAY + struct.pack("<Q", 2**40)), "expected at most"),
        (file_of(counts=(0, 1), keys=ARRAY + struct.pack("<Q", 2**20)), "breaks off"),
        (
            file_of(counts=(0, 1), keys=text(b"k") + struct.pack("<IIQ", 9, 9, 1)),
            "unknown type",
        ),
        (file_of(counts=(0, 1), keys=text(b"k") + struct.pack("<I", 99)), "unknown type"),
        (file_of(counts=(0, 1), keys=text(b"\xff") + struct.pack("<Iq", 11, 1)), "utf-8"),
        (
            file_of(counts=(0, 1), keys=text(b"general.alignment") + struct.pack("<II", 4, 0)),
            "its alignment is 0",
        ),
        (file_of(counts=(1, 0), tensors=tensor(b"a", (2**62, 2**62), 0, 0)), "breaks off within"),
        (file_of(counts=(1, 0), tensors=tensor(b"a", (4,), 77, 0)), "77"),
        (file_of(counts=(1, 0), tensors=tensor(b"a", (33,), 8, 0)), "not a multiple"),
        (file_of(counts=(1, 0), tensors=tensor(b"a", (1,) * 5, 0, 0)), "5 dimensions"),
        (
            file_of(
                counts=(2, 0), tensors=tensor(b"a", (8,), 0, 0) + tensor(b"b", (8,), 0, 16)
            ),
            "overlaps another",
        ),
        (
            file_of(
                counts=(2, 0), tensors=tensor(b"a", (4,), 0, 0) + tensor(b"a", (4,), 0, 32)
            ),
            "is there twice",
        ),
        (file_of(counts=(0, 0)), "the file has 0 tensors"),
    ],
)  # fmt: skip
def test_damaged_on_purpose(content: bytes, reason: str, sound: Sound, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert re.search(reason, refusal(path, sound))


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<If", 6, float("nan")),
        struct.pack("<I", 8) + text(b"x" * 999 + b"\n"),
        struct.pack("<IIQ", 9, 8, 1) + text(b"y"),
        struct.pack("<IIQ3B", 9, 7, 3, 0, 7, 255),
    ],
)
def test_keys_of_another_type_differ(value: bytes, sound: Sound, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for key in re.findall(rb"(?:general|llama|tokenizer\.ggml)\.[a-z_.]+", sound.content):
        start = sound.content.index(text(key)) + len(text(key))
        (kind,) = struct.unpack_from("<I", sound.content, start)
        if kind not in (4, 6) or key == b"general.alignment":
            continue
        made = sound.content[:start] + value + sound.content[start + 8 :]
        # the tensors begin where they did, at a multiple of 32
        path.write_bytes(made)
        refusal(path, sound)


def test_numbers_that_are_not_finite_are_refused(sound: Sound, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound.content[:-256] + b"\xff" * 256)
    assert "not finite" in refusal(path, sound)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_not_waited_for(
    make: Callable[[Path], None], sound: Sound, tmp_path: Path
) -> None:
    make(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="expected a regular file"):
        ask(tmp_path / "m.gguf", sound)
