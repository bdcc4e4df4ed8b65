"""Hostile files of `torch.save` that would use all memory or time, and files that load."""

from __future__ import annotations

import collections
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.models import TensorFileError, load_pretrained, load_tensors
from paceline.train.checkpoint import Checkpoint


class Call:
    """An object whose pickle is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> Any:
        return self._made


def saved(content: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def changed(
    content: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as sound,
        zipfile.ZipFile(made, "w", compression) as archive,
    ):
        for name in sound.namelist():
            archive.writestr(name, change(name, sound.read(name)))
    return made.getvalue()


def doubled(first: Any, times: int) -> Any:
    for _ in range(times):
        first = [first, first]
    return first


def nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


def key_of_tuples() -> bytes:
    """`{((x, x), (x, x)): 1}`, 60 levels deep: hashing the key does not end."""
    levels = b"".join(b"h%c\x86q%c" % (level, level + 1) for level in range(60))
    pickled = b"\x80\x02}K\x01\x85q\x00" + levels + b"K\x01s."
    return changed(saved(1), lambda name, old: pickled if name.endswith("data.pkl") else old)


def late_lists() -> bytes:
    """Returns a pickle whose lists are filled after they were put twice into other lists."""
    made = b"".join(b"]q%c" % level for level in range(40))
    filled = b"".join(b"h%c(h%ch%ce" % (level + 1, level, level) for level in reversed(range(39)))
    pickled = b"\x80\x02(" + made + filled + b"t."
    return changed(saved(1), lambda name, old: pickled if name.endswith("data.pkl") else old)


def bomb() -> bytes:
    def grown(name: str, content: bytes) -> bytes:
        return bytes(3_000_000) if name.endswith("data/0") else content

    return changed(saved(torch.zeros(4)), grown, zipfile.ZIP_DEFLATED)


ATTACKS: dict[str, Callable[[], bytes]] = {
    "lists that share their items": lambda: saved({"model": doubled(1, 60)}),
    "lists that are filled later": late_lists,
    "a key that cannot be hashed": key_of_tuples,
    "deep nesting": lambda: saved({"model": nested(150)}),
    "an expanded tensor": lambda: saved({"model": torch.zeros(1).expand(3_000_000_000)}),
    "compressed entries": bomb,
    "a view repeated": lambda: saved([torch.zeros(1 << 18)] * 1000),
    "a text repeated": lambda: saved(["x" * 1_000_000] * 1000),
    "bytes of any length": lambda: saved(Call(bytearray, 1 << 40)),
    "a tensor of any length": lambda: saved(Call(torch.FloatTensor, 1 << 38)),
    "a call within a call": lambda: saved(
        Call(torch._tensor._rebuild_from_type_v2, bytearray, bytearray, (1 << 40,), None)
    ),
    "encodings that grow": lambda: saved(
        Call(__import__("_codecs").encode, Call(bytearray, b"a"), "hex")
    ),
    "in the old format": lambda: saved(
        {"model": torch.zeros(1).expand(3_000_000_000)}, _use_new_zipfile_serialization=False
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_file_is_refused_at_once(attack: str, tmp_path: Path) -> None:
    content = ATTACKS[attack]()
    with pytest.raises(TensorFileError):
        load_tensors(io.BytesIO(content))
    path = tmp_path / "f.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        Checkpoint.read(path)
    with pytest.raises(CheckpointError):
        load_pretrained(nn.Linear(1, 1), path)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("old_format", [False, True])
def test_what_programs_write_still_loads(old_format: bool) -> None:
    layer = nn.Linear(30, 30)
    marked = torch.ones(2)
    marked.mark = 1  # type: ignore[attr-defined]
    content = {
        "tied": [layer.weight, layer.weight],
        "state": nn.Sequential(*[layer] * 90).state_dict(),
        "view": torch.arange(10)[2:4], "transposed": torch.ones(2, 3).T, "empty": torch.empty(0),
        "sparse": torch.eye(3).to_sparse(), "csc": torch.eye(4).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)), "marked": marked,
        "bytes": b"x" * 20, "array": bytearray(b"abc"), "no bytes": bytearray(),
        "set": {1, 2}, "size": torch.Size([1, 2]), "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict([((1, 2), 3)]), "dtype": torch.float16,
        "device": torch.device("cpu"), "number": 2**70, "complex": 1j, "none": None,
        "random": ((3, tuple(range(625)), None),), "list": list(range(10_000)),
    }  # fmt: skip
    stream = io.BytesIO(saved(content, _use_new_zipfile_serialization=not old_format))
    found = load_tensors(stream)
    assert found.keys() == content.keys()
    first, second = found["tied"]
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, layer.weight)
    assert found["state"].keys() == content["state"].keys()
    tensors = {"view", "transposed", "empty", "sparse", "csc", "bsr", "marked"}
    plain = set(content) - {"tied", "state", *tensors}
    assert {name: found[name] for name in plain} == {name: content[name] for name in plain}
    assert found["view"].tolist() == [2, 3]
    for name in ("sparse", "csc", "bsr"):
        assert torch.equal(found[name].to_dense(), content[name].to_dense())


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_with_indices_outside_of_it_is_refused(layout: torch.layout) -> None:
    """Operations would read and write out of bounds."""
    outside, values = torch.tensor([1 << 30]), torch.ones(1)
    made = (
        torch.sparse_coo_tensor(outside[None], values, (3,), check_invariants=False)
        if layout == torch.sparse_coo
        else torch.sparse_csr_tensor(
            torch.tensor([0, 1]), outside, values, (1, 3), check_invariants=False
        )
    )
    with pytest.raises(RuntimeError):
        load_tensors(io.BytesIO(saved(made)))


def test_the_remedy_for_an_expanded_tensor_works() -> None:
    expanded = torch.ones(1).expand(3)
    with pytest.raises(TensorFileError, match=r"contiguous\(\)"):
        load_tensors(io.BytesIO(saved(expanded)))
    assert torch.equal(load_tensors(io.BytesIO(saved(expanded.contiguous()))), expanded)


def test_archives_that_readers_could_read_in_two_ways_are_refused() -> None:
    sound, other = saved({"a": torch.ones(3)}), saved([torch.zeros(9)])
    assert load_tensors(io.BytesIO(sound))["a"].sum() == 3
    assert load_tensors(io.BytesIO(changed(sound, lambda name, old: old)))["a"].sum() == 3
    # torch.save writes the place of the end of large archives 34 bytes before the end.
    moved = sound[:-34] + struct.pack("<Q", len(sound) - 107) + sound[-26:]
    for content in (moved, sound + other, sound[:-2] + b"\3\0abc"):
        with pytest.raises((TensorFileError, RuntimeError, zipfile.BadZipFile)):
            load_tensors(io.BytesIO(content))
