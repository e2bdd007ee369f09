"""The codec of training tensors: a directory of shards, written and read through torch.distributed.checkpoint.

    state = training_state(scorer, optimizer)      name -> tensor; the live tensors, not copies
    buffers = allocate(state)                      CPU tensors of the same shapes
    stage(state, buffers)                          copies; complete when it returns
    write(buffers, directory, ranks)               each rank its shards; every file forced to the disk
    read_index(directory)                          the tensors, and where their chunks lie; validated
    read(state, directory, ranks)                  in place, resharded for any number of ranks

Only what trains is saved (frozen weights are in the base model), and only tensors: no pickled object is ever loaded.
The index that torch.distributed.checkpoint pickles, and the description that torch.save pickles with each tensor, are
read as data and must be exactly what torch writes for tensors. Anything else is refused by file and tensor, even if its
digest is right. Steps and runs are the topic of checkpoint.py.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.storage import _dtype_to_storage_type_map

from taut.errors import OutputError, TautError
from taut.io import files
from taut.train.distributed import Ranks, local


class NotData(ValueError):
    """A pickle that is damaged, or does more than describe data."""


class Name(NamedTuple):
    """A class or function that a pickle names; it is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """An object that a pickle would construct (NEWOBJ), call (REDUCE) or load by an id (BINPERSID, without a name)."""

    name: Name | None
    arguments: Any
    state: Any = None


State = dict[str, Tensor]

INDEX = ".metadata"
"""torch.distributed.checkpoint's index of a directory."""
METADATA = "torch.distributed.checkpoint.metadata"
"""The module of most classes in an index."""
TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
TENSOR_OF_DTYPE = Name("torch._utils", "_rebuild_tensor_v3")
"""Functions that torch.save names to rebuild a tensor; the second for dtypes without a storage class."""
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
STORAGE_DTYPES = {f"torch.{name}": dtype for dtype, name in _dtype_to_storage_type_map().items()}
SMALL_INDEX = 2**16
"""Bytes that an index may have in any case; a longer one must not be longer than the tensors that it lists."""
DESCRIPTION_LIMIT = 2**16
"""Largest pickle of one tensor's description, in bytes. torch.save writes about 150."""
LARGEST = 2**62
"""Limit of sizes and offsets; the sum of two fits into 64 bits."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Tensors that training changes: trained weights, buffers, optimizer state. They are not copied."""
    tensors = model.state_dict()  # under FSDP this also puts the shards in place
    everything = dict(model.named_parameters(remove_duplicate=False))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = [name for name in tensors if name not in everything]
    state: State = {f"model.{name}": tensors[name] for name in (*trained, *buffers)}
    for name, parameter in trained.items():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def num_bytes(state: State) -> int:
    """Bytes of this rank's shards."""
    return sum(local(tensor).nbytes for tensor in state.values())


def allocate(state: State) -> State:
    """CPU buffers for a copy of ``state``, written once so that later copies do not wait for page faults."""
    is_cuda = any(tensor.device.type == "cuda" for tensor in state.values())
    buffers: State = _create_cpu_state_dict(state, pin_memory=is_cuda)
    for tensor in buffers.values():
        local(tensor).zero_()
    return buffers


@torch.no_grad()
def stage(state: State, buffers: State) -> None:
    """Copy ``state`` into ``buffers``. The tensors may change once this returns."""
    _copy_state_dict(state, buffers)


def write(state: State, directory: Path, ranks: Ranks) -> None:
    """Write the shards of every rank. Raises OSError on all ranks if one fails."""
    writer = _Writer(directory, sync_files=True)
    try:
        _save_state_dict(
            state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1
        )
    except CheckpointException as error:
        raise _cause(error) from error


def read_index(directory: Path) -> Metadata:
    """Read the index of a directory: dtype, shape and chunks of every tensor, and the place of each chunk.

    Raises OSError, or OutputError where the index does not match the files.
    """
    path = directory / INDEX
    sizes = {
        file.name: file.stat().st_size
        for file in directory.iterdir()
        if file.is_file() and file.name != INDEX
    }
    content = files.read_regular(path, max(SMALL_INDEX, sum(sizes.values())))
    try:
        index = _state(read_pickle(content), METADATA, "Metadata")
        tensors = {
            name: _stored_tensor(name, stored)
            for name, stored in _typed(index.get("state_dict_metadata"), dict, "tensors").items()
        }
        places: dict[MetadataIndex, _StorageInfo] = {}
        for key, stored in _typed(index.get("storage_data"), dict, "places").items():
            state = _state(key, METADATA, "MetadataIndex")
            name = _typed(state.get("fqn"), str, "name")
            places[MetadataIndex(name, _size(state.get("offset"), name))] = _place(stored, sizes)
        listed = {MetadataIndex(name, c.offsets) for name, t in tensors.items() for c in t.chunks}
        if listed != places.keys():
            odd = min(listed ^ places.keys(), key=lambda chunk: chunk.fqn)
            what = "has no place" if odd in listed else "has a place and is not listed"
            raise NotData(f"a chunk of {odd.fqn} {what}")
    except NotData as error:
        raise OutputError(f"{path} is no index of tensors: {error}") from error
    return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())


def read(state: State, directory: Path, ranks: Ranks) -> None:
    """Fill ``state`` in place. Raises OSError, or OutputError where the directory holds other tensors, or tensors of
    other shapes or dtypes.
    """
    index = read_index(directory)
    if others := sorted(index.state_dict_metadata.keys() - state.keys()):
        raise OutputError(
            f"{directory / INDEX} has {len(others)} tensor(s) that this run does not train, {others[0]} the first"
        )
    for name, tensor in state.items():
        stored = index.state_dict_metadata.get(name)
        if stored is None:
            raise OutputError(f"{directory / INDEX} lacks the tensor {name}")
        assert isinstance(stored, TensorStorageMetadata), "read_index makes no others"
        layout = tuple(stored.size), stored.properties.dtype
        expected = tuple(tensor.size()), tensor.dtype
        if layout != expected:
            raise OutputError(
                f"{directory / INDEX} has {name} as {_described(*layout)}; expected {_described(*expected)}"
            )
    try:
        _load_state_dict(
            state,
            storage_reader=_Reader(directory, index),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )
    except CheckpointException as error:
        raise _cause(error) from error


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


class _Writer(FileSystemWriter):
    """Raises the system's error, where torch.save reports an unexpected position for a full disk."""

    def write_data(self, *args: Any, **kwargs: Any) -> Future[list[WriteResult]]:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error


class _Reader(FileSystemReader):
    """Reads tensors as data. FileSystemReader would call torch.load, which also constructs other objects and
    decompresses.
    """

    def __init__(self, directory: Path, index: Metadata) -> None:
        super().__init__(directory)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            where = self.storage_data[item.storage_index]
            stored = self.index.state_dict_metadata[item.storage_index.fqn]
            assert isinstance(stored, TensorStorageMetadata), "read_index makes no others"
            offset = item.storage_index.offset
            sizes = next(tuple(c.sizes) for c in stored.chunks if c.offsets == offset)
            path = Path(self.path) / where.relative_path
            with files.open_regular(path) as file:
                try:
                    part = _Slice(file, where.offset, where.length)
                    tensor = _tensor_in(part, stored.properties.dtype, sizes)
                except NotData as error:
                    raise OutputError(f"{path}: {item.storage_index.fqn}: {error}") from error
            tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _stored_tensor(name: Any, value: Any) -> TensorStorageMetadata:
    """A tensor of the index. Raises NotData unless its chunks cover it without overlap."""
    # dtype and shape
    _typed(name, str, "name")
    state = _state(value, METADATA, "TensorStorageMetadata")
    properties = _record(state.get("properties"), METADATA, "TensorProperties").state
    dtype = properties[0] if type(properties) is tuple and properties else None
    if type(dtype) is not Name or str(dtype) not in DTYPES:
        raise NotData(f"{name} has no dtype")
    size = _size(state.get("size"), name)

    # chunks, each inside the tensor
    chunks = []
    for item in _typed(state.get("chunks"), list, f"chunks of {name}"):
        chunk = _state(item, METADATA, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets"), name), _size(chunk.get("sizes"), name)
        is_inside = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= whole
            for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not is_inside:
            raise NotData(
                f"a chunk of {name}, {list(sizes)} at {list(offsets)}, is not in {list(size)}"
            )
        chunks.append(ChunkStorageMetadata(offsets, sizes))

    # that make up the whole
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len({chunk.offsets for chunk in chunks}) < len(chunks):
        raise NotData(f"two chunks of {name} begin at the same place")
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(size) or _overlap(filled):
        raise NotData(f"the chunks of {name} do not make up {list(size)}")
    return TensorStorageMetadata(TensorProperties(DTYPES[str(dtype)]), size, chunks)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two chunks share an element. Chunks are sorted by the first dimension, so that few pairs are compared."""
    ordered = sorted(chunks, key=lambda chunk: tuple(chunk.offsets))
    for number, left in enumerate(ordered):
        for right in ordered[number + 1 :]:
            if left.offsets and right.offsets[0] >= left.offsets[0] + left.sizes[0]:
                break
            extents = zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in extents):
                return True
    return False


def _place(value: Any, file_sizes: Mapping[str, int]) -> _StorageInfo:
    state = _state(value, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    file = _typed(state.get("relative_path"), str, "file")
    if file not in file_sizes:
        raise NotData(f"it names the file {file[:100]!r}, which is not there")
    offset, length = _count(state.get("offset"), file), _count(state.get("length"), file)
    if offset + length > file_sizes[file]:
        raise NotData(
            f"it has {length:,} bytes at {offset:,} of {file}, which has {file_sizes[file]:,}"
        )
    if state.get("transform_descriptors"):
        raise NotData(f"it has {file} transformed; expected the tensors as they are")
    return _StorageInfo(file, offset, length)


class _Slice(io.RawIOBase):
    """A part of a file as a file object."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("it points before its beginning")
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        left = max(self.length - self.position, 0)
        self.file.seek(self.start + min(self.position, self.length))
        content = self.file.read(min(left, len(buffer)))
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)


def _tensor_in(file: _Slice, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """The tensor in a file of torch.save. Raises NotData unless it has this dtype and shape."""
    # an archive with a description of the tensor, and its bytes
    try:
        archive = zipfile.ZipFile(io.BufferedReader(file))
        entries = {entry.filename: entry for entry in archive.infolist()}
        folder = next(iter(entries), "").partition("/")[0]
        description = _stored(archive, entries, f"{folder}/data.pkl")
        if len(description) > DESCRIPTION_LIMIT:
            raise NotData(f"its description has {len(description):,} bytes")
        key, start, strides = _layout_of(read_pickle(bytes(description)), dtype, sizes)
        raw = _stored(archive, entries, f"{folder}/data/{key}")
    except NotData:
        raise
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise NotData(f"it is damaged ({error})") from error

    # shape and strides stay inside the bytes
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    last = start + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if (last + 1) * dtype.itemsize > len(raw):
        raise NotData(f"its storage has {len(raw):,} bytes, fewer than its shape and strides take")
    count = len(raw) // dtype.itemsize
    return torch.frombuffer(raw, dtype=dtype, count=count).as_strided(sizes, strides, start)


def _layout_of(
    value: Any, dtype: torch.dtype, sizes: tuple[int, ...]
) -> tuple[str, int, tuple[int, ...]]:
    """The file name of a tensor's storage, the tensor's first element in it, and its strides."""
    if type(value) is not Record or value.name not in (TENSOR, TENSOR_OF_DTYPE):
        raise NotData("it is no tensor")
    names_dtype = value.name == TENSOR_OF_DTYPE
    if len(value.arguments) < 6 + names_dtype:
        raise NotData("it is a tensor with too few properties")
    storage = value.arguments[0]
    if type(storage) is not Record or storage.name is not None:
        raise NotData("it is a tensor without storage")
    if type(storage.arguments) is not tuple or len(storage.arguments) != 5:
        raise NotData("its storage is not described as torch.save describes it")
    _, storage_type, key, _, _ = storage.arguments
    named = value.arguments[6] if names_dtype else storage_type
    layout = (
        (DTYPES if names_dtype else STORAGE_DTYPES).get(str(named)) if type(named) is Name else None
    )
    start, shape = _count(value.arguments[1], "it"), _counts(value.arguments[2], "it")
    strides = _counts(value.arguments[3], "it")
    if layout is not dtype or shape != sizes:
        what = "of an unknown dtype" if layout is None else _described(shape, layout)
        raise NotData(f"it is {what}; expected {_described(sizes, dtype)}")
    if len(strides) != len(shape):
        raise NotData(f"it has {len(strides)} strides for {len(shape)} dimensions")
    return _typed(key, str, "storage"), start, strides


def _stored(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], name: str
) -> bytearray:
    """Read a file in an archive of torch.save, which does not compress."""
    entry = entries.get(name)
    if entry is None:
        raise NotData(f"it has no {name}")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise NotData(f"its {name} is compressed; expected it as torch.save writes it")
    with archive.open(entry) as file:
        return bytearray(file.read())


def _record(value: Any, module: str, name: str) -> Record:
    """``value`` as a record of this class. Raises NotData where it is anything else."""
    if type(value) is not Record or value.name != Name(module, name):
        found = value.name if type(value) is Record else value if type(value) is Name else None
        what = f"names {found}" if found else f"has a {type(value).__name__}"
        raise NotData(f"the index {what} where it should have a {name}")
    return value


def _state(value: Any, module: str, name: str) -> dict[str, Any]:
    """The attributes of a record of this class."""
    state: dict[str, Any] = _typed(_record(value, module, name).state, dict, name)
    return state


def _typed(value: Any, kind: type[Any], what: str) -> Any:
    if type(value) is not kind:
        raise NotData(f"{what[:100]}: found a {type(value).__name__}; expected a {kind.__name__}")
    return value


def _size(value: Any, name: str) -> torch.Size:
    """A torch.Size: REDUCE of the class with one tuple."""
    arguments = _record(value, "torch", "Size").arguments
    return torch.Size(_counts(arguments[0] if len(arguments) == 1 else None, name))


def _counts(value: Any, name: str) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64:
        raise NotData(f"{name[:100]}: its shape is no short tuple")
    return tuple(_count(item, name) for item in value)


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise NotData(f"{name[:100]}: found {str(value)[:40]}; expected a count")
    return value


def _cause(error: CheckpointException) -> Exception:
    """The first failure; an OSError if the file system caused it."""
    failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        if isinstance(failure, TautError):
            return failure
        if isinstance(failure, OSError):
            return OSError(failure.errno, failure.strerror or str(failure))
    return RuntimeError(str(failures[0]))


# -- pickles as data
#
# pickle.Unpickler with an allow-list does not suffice: BUILD sets attributes of the allowed classes themselves, a memo
# index makes it allocate gigabytes, and hashing a deeply nested key overflows the stack.

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE"),
)
EMPTY: dict[str, type[Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(content: bytes) -> Any:
    """Read the value that a pickle describes. Nothing that it names is imported, called or given attributes.

    Interprets the opcodes in torch's checkpoint index and in files of ``torch.save``; raises NotData for all others. A
    class or function becomes a ``Name``, an object a ``Record``. Time and memory are proportional to the length of the
    pickle.
    """
    try:
        return _interpret(content)
    except NotData:
        raise
    except (ValueError, LookupError, TypeError) as error:
        # raised by pickletools, or for an empty stack or memo
        raise NotData(f"it is damaged ({' '.join(str(error).split())[:200]})") from error


def _interpret(content: bytes) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []
    """The stacks under each open MARK."""
    memo: dict[int, Any] = {}
    argument: Any
    items: Any
    for opcode, argument, _ in pickletools.genops(content):
        operation = opcode.name
        if operation in ("PROTO", "FRAME"):
            continue
        if operation in LITERALS:
            stack.append(argument)
        elif operation in CONSTANTS:
            stack.append(CONSTANTS[operation])
        elif operation in EMPTY:
            stack.append(EMPTY[operation]())
        elif operation == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif operation in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif operation in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif operation == "MARK":
            below.append(stack)
            stack = []
        elif operation == "TUPLE":
            items = tuple(stack)
            stack = below.pop()
            stack.append(items)
        elif operation in TUPLE_SIZES:
            stack.append(tuple(_take(stack, TUPLE_SIZES[operation])))
        elif operation == "APPEND":
            (item,) = _take(stack, 1)
            _top(stack, list).append(item)
        elif operation == "APPENDS":
            items, stack = stack, below.pop()
            _top(stack, list).extend(items)
        elif operation == "SETITEM":
            items = _take(stack, 2)
            _set_items(_top(stack, dict), items)
        elif operation == "SETITEMS":
            items, stack = stack, below.pop()
            _set_items(_top(stack, dict), items)
        elif operation == "GLOBAL":
            module, _, name = argument.partition(" ")
            stack.append(Name(module, name))
        elif operation == "STACK_GLOBAL":
            module, name = _take(stack, 2)
            if not (type(module) is str and type(name) is str):
                raise NotData("it names a class by something other than text")
            stack.append(Name(module, name))
        elif operation in ("NEWOBJ", "REDUCE"):
            called, arguments = _take(stack, 2)
            if type(called) is not Name or type(arguments) is not tuple:
                raise NotData(
                    f"{operation} of a {type(called).__name__}; expected a name and a tuple"
                )
            stack.append(Record(called, arguments))
        elif operation == "BINPERSID":
            stack.append(Record(None, *_take(stack, 1)))
        elif operation == "BUILD":
            (state,) = _take(stack, 1)
            record = _top(stack, Record)
            if record.state is not None:
                raise NotData(f"it sets the state of a {record.name} twice")
            record.state = state
        elif operation == "STOP":
            (value,) = _take(stack, 1)
            return value
        else:
            raise NotData(f"it has the operation {operation}, which describes no data")
    raise NotData("it ends before its value")


def _take(stack: list[Any], count: int) -> list[Any]:
    """Remove the last ``count`` items of the stack."""
    if len(stack) < count:
        raise NotData("it takes more than there is")
    items = stack[-count:]
    del stack[-count:]
    return items


def _top(stack: list[Any], kind: type[Any]) -> Any:
    if not stack or type(stack[-1]) is not kind:
        found = type(stack[-1]).__name__ if stack else "nothing"
        raise NotData(f"it adds to a {found}; expected a {kind.__name__}")
    return stack[-1]


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    for key, value in zip(keys, values, strict=True):
        if type(key) not in (str, int, Record):  # hashing a tuple goes as deep as it is nested
            raise NotData(f"a key is a {type(key).__name__}; expected text or a record")
        target[key] = value
