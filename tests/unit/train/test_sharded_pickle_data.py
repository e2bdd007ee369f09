"""Pickles read as data: what torch writes comes out as records, and nothing a hostile pickle asks for happens."""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from taut.train.sharded import Name, NotData, Record, read_pickle

SIZE = Name("torch", "Size")
P4 = b"\x80\x04"


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


METADATA = global_("torch.distributed.checkpoint.metadata", "Metadata")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_torch_writes_is_read(protocol: int) -> None:
    found = read_pickle(
        pickle.dumps({"size": torch.Size([3, 4]), "dtype": torch.float32}, protocol)
    )
    assert found["dtype"] == Name("torch", "float32")
    assert (found["size"].name, found["size"].arguments) == (SIZE, ((3, 4),))
    value = {"a": [1, -2, None, True, "x" * 300, 1.5, 2**40], "b": (), "c": [(1,), (1, 2, 3, 4)]}
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_shared_values_stay_shared() -> None:
    shared = [1]
    found = read_pickle(pickle.dumps([shared, shared]))
    assert found[0] is found[1]


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no end": P4 + b"]",
    "cut": pickle.dumps(["abc" * 100])[:-20],
    "an unknown operation": b"\xff.",
    "INST": b"(ios\nsystem\n.",
    "OBJ": b"(" + global_("os", "system") + b"o.",
    "EXT": P4 + b"\x82\x01.",
    "NEWOBJ_EX": P4 + global_("os", "system") + b")}\x92.",
    "PERSID": b"Pabc\n.",
    "LONG4": P4 + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"a.",
    "BINUNICODE8": P4 + b"\x8d" + struct.pack("<Q", 2**40) + b"a.",
    "BINUNICODE, longer than the file": P4 + b"X" + struct.pack("<I", 2**32 - 1) + b"a.",
    "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.",
    "a memo that is not there": P4 + b"h\x05.",
    "a mark that is not there": P4 + b"]K\x01e.",
    "an empty stack": P4 + b"0.",
    "REDUCE of a value": P4 + b"K\x01)R.",
    "REDUCE of a record": P4 + METADATA + b")R)R.",
    "REDUCE without a tuple": P4 + METADATA + b"]R.",
    "BUILD on a class, of its attributes": P4 + METADATA + b"N}\x8c\x06__eq__K\x01s\x86b.",
    "BUILD on a class, of its dictionary": P4 + METADATA + b"}b.",
    "BUILD twice": P4 + METADATA + b")\x81}b}b.",
    "SETITEM on a record": P4 + METADATA + b")\x81K\x01K\x02s.",
    "APPEND to a tuple": P4 + b")K\x01a.",
    "items that are not pairs": P4 + b"}(K\x01u.",
    "a list as a key": P4 + b"}]K\x01s.",
    "a key nested deeply": P4 + b"})" + b"\x85" * 100_000 + b"K\x01s.",
    "a key of 2**60 leaves": P4 + b"})" + b"2\x86" * 60 + b"K\x01s.",
    "a name that is no text": P4 + b"K\x01K\x02\x93.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_ones_are_refused_at_once_and_in_little_memory(kind: str) -> None:
    content = HOSTILE[kind]
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(NotData) as caught:
        read_pickle(content)
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300
    assert seconds < 10
    assert peak < 1_000_000 + 400 * len(content)


def test_a_large_memo_index_takes_no_memory() -> None:
    """pickle.Unpickler allocates, and clears, 16 bytes for each index below it."""
    tracemalloc.start()
    assert read_pickle(P4 + b"]r\xff\xff\xff\x7f.") == []
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_nothing_is_imported_called_or_given_attributes(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    found = read_pickle(pickle.dumps(Evil()))
    assert isinstance(found, Record)
    assert (str(found.name), found.arguments) == ("posix.mkdir", (str(tmp_path / "made"),))
    assert not list(tmp_path.iterdir())
    before = dict(vars(Metadata))
    for name in ("BUILD on a class, of its attributes", "BUILD on a class, of its dictionary"):
        with pytest.raises(NotData, match="it adds to a Name; expected a Record"):
            read_pickle(HOSTILE[name])
    assert dict(vars(Metadata)) == before


def test_what_is_called_on_huge_arguments_is_only_described() -> None:
    found = read_pickle(
        P4 + global_("torch", "Size") + b"(" + b"J\x00\xca\x9a\x3b" * 1000 + b"t\x85R."
    )
    assert (found.name, len(found.arguments[0])) == (SIZE, 1000)
    found = read_pickle(
        P4 + global_("builtins", "bytearray") + b"\x8a\x05\x00\xe4\x0b\x54\x02\x85R."
    )
    assert found.arguments == (10**10,)
