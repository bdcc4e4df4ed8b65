"""Reads untrusted files in the format of `torch.save`.

`torch.load(weights_only=True)` executes no code, but a small file can still make it use any amount of
memory or time. Examples are entries that decompress to gigabytes, nested lists that share items, tensors
that repeat one value, and calls that allocate as much as an argument demands. `load_tensors` refuses
such files.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

# Limit on the number of values: more than any real state has, and about a second of work.
_MOST_VALUES = 10_000_000
_FEW_VALUES = 100_000
_DEEPEST = 100
# Limit on the bytes of all tensors, relative to the file size. Tied weights are counted several times.
_MOST_REPEATS = 100
_SMALL_FILE = 1 << 20
# Pickles in torch's format before version 1.6: magic number, version, platform, object, storage keys.
_OLD_FORMAT_PICKLES = 5
# Last records of a zip archive. The end record comes last. In a large archive, the 64-bit end record and
# its locator precede it.
_END, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
# Number of letters in a text that the limits treat as one value.
_LETTERS = 64


class TensorFileError(ValueError):
    """Raised for files that torch can read, but that no call of `torch.save` writes.

    `str()` gives the reason.
    """


def load_tensors(file: IO[bytes]) -> Any:
    """Reads a file written by `torch.save` into host memory, with `weights_only=True`.

    The time and memory needed are at most proportional to the size of the file.

    Args:
        file: File that is open for reading.

    Returns:
        The content, as `torch.load` returns it.

    Raises:
        TensorFileError: If loading would use disproportionate time or memory, or if the content is
            unusual.
        Exception: torch raises errors of any class for damaged files.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    # The same test as in torch. Python's `is_zipfile` also accepts an archive that follows other content.
    is_zip = file.read(4) == b"PK\3\4"
    file.seek(0)
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise TensorFileError("its entries are compressed")
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise TensorFileError("its entries are larger than the file")
            _check_directory(file, archive.start_dir)
        file.seek(0)
        _check_calls(torch._C.PyTorchFileReader(file).get_record("data.pkl"))
    else:
        for _ in range(_OLD_FORMAT_PICKLES):
            _check_calls(file)
    file.seek(0)
    # Without this check, indices of a sparse tensor could be out of range, which operations do not check.
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        content = torch.load(file, map_location="cpu", weights_only=True)
    _check_values(content, size)
    return content


def _check_directory(file: IO[bytes], start: int) -> None:
    """Refuses a zip archive whose directory torch and Python could read differently.

    Accepts only the layout that torch.save writes: an end record without a comment, directly after all
    other records.

    Args:
        file: The archive.
        start: Byte offset of the directory according to Python.
    """
    at = file.seek(-_END.size, os.SEEK_END)
    signature, *_, offset, comment = _END.unpack(file.read(_END.size))
    is_plain = signature == b"PK\5\6" and not comment
    if at >= _END_64.size + _LOCATOR.size:
        file.seek(at - _LOCATOR.size)
        signature, _, end, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if signature == b"PK\6\7":  # both readers then use the 64-bit record
            at -= _LOCATOR.size + _END_64.size
            file.seek(at)
            *_, offset = _END_64.unpack(file.read(_END_64.size))
            is_plain = is_plain and end == at
    if not is_plain or offset != start:
        raise TensorFileError("its directory is not in the format of torch.save")


@dataclass(slots=True)
class _Item:
    """A value that the simulated unpickler has created from a pickle.

    Attributes:
        weight: Number of plain values in it, including nested ones.
        text: The value if it is a string, or the name if it is a function.
        items: Items, if the value is a tuple.
    """

    weight: int = 1
    text: str = ""
    items: tuple[_Item, ...] | None = None


_ENCODED = "an encoded text"


def _check_calls(pickle: bytes | IO[bytes]) -> None:
    """Refuses a pickle whose calls or nested values could use too much memory or time.

    Simulates the operations of the pickle without executing any call. Refuses calls that could
    allocate memory, and nested values that share so many items that a copy or a hash would not end.
    """
    stack: list[_Item] = []
    marks: list[int] = []
    memo: dict[Any, _Item] = {}
    fetched = 0
    for opcode, argument, _ in pickletools.genops(pickle):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            # Only these operations can make more values than the pickle has bytes.
            fetched += stack[-1].weight
            if fetched > _MOST_VALUES:
                raise TensorFileError("its values repeat one another without end")
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "GLOBAL":
            stack.append(_Item(1, f"{argument} function"))
        elif not opcode.stack_before:
            text = argument if isinstance(argument, str) else ""
            if opcode.stack_after:
                stack.append(_Item(1 + len(text) // _LETTERS, text, ()))
        else:
            kinds = opcode.stack_before
            has_mark = pickletools.markobject in kinds
            first = marks.pop() - kinds.index(pickletools.markobject) if has_mark else -len(kinds)
            items = tuple(stack[first:])
            del stack[first:]
            if opcode.stack_after:
                stack.append(_result(name, items))


def _result(name: str, items: tuple[_Item, ...]) -> _Item:
    if name.startswith("TUPLE"):
        return _Item(1 + sum(item.weight for item in items), items=items)
    if name in ("REDUCE", "NEWOBJ"):
        function, arguments = items
        return _Item(arguments.weight, _call(function.text, arguments.items))
    if name.startswith(("APPEND", "SETITEM", "BUILD")):
        items[0].weight += sum(item.weight for item in items[1:])
        return items[0]
    return _Item()


def _call(name: str, arguments: tuple[_Item, ...] | None) -> str:
    """Refuses a function call in the pickle that could allocate memory.

    Returns the `text` of the `_Item` that represents the result of the call.
    """
    module, _, function = name.removesuffix(" function").partition(" ")
    # `arguments` is None if another call made them, which never happens in files of torch.save.
    given = (_Item(),) if arguments is None else arguments
    allowed = arguments is not None
    if function == "encode":
        allowed = allowed and [item.text for item in given[1:]] in (["latin1"], ["latin-1"])
    elif function == "bytearray":
        allowed = allowed and all(item.text == _ENCODED for item in given)
    elif function == "_rebuild_from_type_v2":
        # This function calls its first argument with the items of its third argument.
        parts = [*given, _Item(), _Item(), _Item()]
        allowed = parts[0].text.startswith("torch._utils _rebuild_")
    elif module.startswith("torch") and function.endswith(("Tensor", "Storage")):
        allowed = not given
    if not allowed:
        raise TensorFileError(f"it calls {module}.{function} with unusual arguments")
    return _ENCODED if function == "encode" else ""


def _check_values(content: Any, size: int) -> None:
    """Refuses loaded content that is larger than a file of `size` bytes should contain."""
    stack = [(content, 0)]
    values = total = 0
    # Each value needs at least one byte in the file, unless the same value occurs several times.
    most = min(_MOST_VALUES, 4 * size + _FEW_VALUES)
    storages: dict[int, int] = {}
    while stack:
        value, depth = stack.pop()
        values += 1
        children: list[Any] = []
        if isinstance(value, Tensor):
            for part in _dense_parts(value):
                total += part.nbytes
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, str | bytes | bytearray):
            total += len(value)
        elif isinstance(value, Mapping):
            children = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            children = list(value)
        elif isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            raise TensorFileError("it contains a storage outside of a tensor")
        if depth > _DEEPEST:
            raise TensorFileError("its values are nested too deeply")
        if values + len(stack) + len(children) > most:
            raise TensorFileError(f"it has more than {most:,} values")
        if total > max(size, _SMALL_FILE) * _MOST_REPEATS:
            raise TensorFileError("its values repeat one another too often")
        stack += [(item, depth + 1) for item in children]
    stored = end = 0
    for start, length in sorted(storages.items()):  # in the old format, storages may overlap
        stored += max(0, start + length - max(start, end))
        end = max(end, start + length)
    if stored > size:
        raise TensorFileError("its tensors are larger than the file")


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    parts: list[Tensor] = []
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if parts:
        return [dense for part in parts for dense in _dense_parts(part)]
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
        raise TensorFileError("it contains a tensor of a special kind")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise TensorFileError(
            "a tensor is larger than its storage (expanded; save it with .contiguous())"
        )
    return [tensor]
