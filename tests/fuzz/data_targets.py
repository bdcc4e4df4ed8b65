"""Data sets on disk: tars, idx files, CIFAR-10, label files, indexes, manifests, cache entries."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_sets import png
from fuzz.target import Seed, Target
from paceline.data import DataSettings, Source
from paceline.data.pack.inspect import shard_problems
from paceline.data.sources.array_sets import read_binary, read_labels, read_sheet
from paceline.data.sources.cache import from_entry, to_entry
from paceline.data.sources.classes import read_classes
from paceline.data.sources.index_store import UnfitIndexError, read_index, write_index
from paceline.data.sources.labels import (
    FILE_NAMES,
    is_metadata,
    metadata_labels,
    read_flat_labels,
    read_metadata,
)
from paceline.data.sources.layouts import kinds_of, open_layout
from paceline.data.sources.pack_manifest import check_packed
from paceline.data.sources.storage import ShardStamp
from paceline.data.sources.tar_index import NameTable, ShardIndex

_STAMP = ShardStamp(10_240, 1, b"\1" * 32)
_CLASSES = ["n01", "n02", "n03"]


def data_targets() -> Sequence[Target]:
    manifest = _manifest()
    classes = [
        Seed("classes.json", json.dumps(tree).encode(), tree)
        for tree in (
            ["a", "b"],
            {"a": 0, "b": 1},
            [{"cls": 0, "name": "a"}, {"cls": 1, "wnid": "b"}],
        )
    ]
    pack = [Seed("pack.json", json.dumps(manifest).encode(), manifest)]
    return [
        Target("tar shard", [Seed("train-0.tar", t) for t in _shards()], _shard, 12),
        Target("tar gz shard", _packed_shards(), _shard, 6, repair=_regzip),
        Target("idx", _idx(), _idx_files, 8, repair=_regzip_idx),
        Target("cifar10", _cifar(), _cifar10, 10),
        Target("shard index", _index(), _shard_index, 5, (UnfitIndexError,), repair=_resign_index),
        Target("cache entry", _entries(), _cache_entry, 4, repair=_resign_entry),
        Target("pack manifest", pack, _pack_manifest, 5, form="json"),
        Target("class list", classes, _class_list, 4, form="json"),
        Target("label files", _label_seeds(), _label_file, 4),
        Target("metadata", _metadata(), _metadata_file, 4),
    ]  # fmt: skip


def _tar(members: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _shards() -> list[bytes]:
    members = {
        f"{i}.{kind}": c for i in range(3) for kind, c in (("png", png(i)), ("cls", b"%d" % i))
    }
    long = {f"{'folder/' * 20}ä{i}": content for i, content in members.items()}
    return [
        _tar(members),
        _tar(long),
        _tar(long, tarfile.PAX_FORMAT),
        _tar(members, tarfile.USTAR_FORMAT),
    ]


def _packed_shards() -> list[Seed]:
    """Returns compressed and plain shards. `_regzip` compresses the plain ones after the mutation."""
    contents = [c for shard in _shards() for c in (shard, gzip.compress(shard, 1))]
    return [Seed("train-0.tar.gz", content) for content in contents]


def _read_all(source: Source) -> None:
    try:
        for i in range(len(source)):
            source.read(i)
            source.name(i)
    finally:
        source.close()


def _shard(content: bytes, name: str, folder: Path) -> None:
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "0.tar").write_bytes(content)
    assert kinds_of(folder, "train")
    (folder / name).write_bytes(content)
    settings = DataSettings(source="shards", dir=str(folder))
    problems = shard_problems(folder, [folder / name], False, lambda what, done, total: None)
    assert all(isinstance(problem, str) for problem in problems)
    _read_all(open_layout(settings, "train", keep_index=False))


def _regzip(content: bytes) -> bytes:
    """A sound gzip around damaged content; what is compressed already stays as it is."""
    return content if content.startswith(b"\x1f\x8b") else gzip.compress(content[:200_000], 1)


def _regzip_idx(content: bytes) -> bytes:
    """Plain files stay plain: the content does not say which name it gets."""
    return _regzip(content) if len(content) % 2 else content


def _idx() -> list[Seed]:
    pixels = np.arange(6 * 5 * 4, dtype=np.uint8)
    images = struct.pack(">4B3I", 0, 0, 8, 3, 6, 5, 4) + pixels.tobytes()
    labels = struct.pack(">4BI", 0, 0, 8, 1, 6) + bytes([0, 1, 2, 0, 1, 2])
    return [
        Seed("train-images-idx3-ubyte", images),
        Seed("train-labels-idx1-ubyte", labels),
        Seed("train-images-idx3-ubyte.gz", gzip.compress(images, 1)),
        Seed("train-labels-idx1-ubyte.gz", gzip.compress(labels, 1)),
        Seed("train-images-idx3-ubyte.gz", images),
    ]


def _idx_files(content: bytes, name: str, folder: Path) -> None:
    for seed in _IDX[:2]:
        (folder / seed.name).write_bytes(seed.content)
    if name.endswith(".gz"):
        (folder / name.removesuffix(".gz")).unlink()
    (folder / name).write_bytes(content)
    try:
        _read_all(open_layout(DataSettings(source="idx", dir=str(folder)), "train"))
    finally:
        (folder / name).unlink()


_IDX = _idx()


def _cifar() -> list[Seed]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
    binary = b"".join(bytes([i]) + row.tobytes() for i, row in enumerate(rows))
    sheet = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (2, 1024, 3), dtype=np.uint8)).save(sheet, "PNG")
    return [
        Seed("data_batch_1.bin", binary),
        Seed("train_labels.json", b"[0, 1, 2, 9]"),
        Seed("train.png", sheet.getvalue()),
    ]


def _cifar10(content: bytes, name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(content)
    if path.suffix == ".png":
        read_sheet(path)
    elif path.suffix == ".json":
        read_labels(path)
    else:
        read_binary(path)


def _index() -> list[Seed]:
    numbers = np.arange(4, dtype=np.int64)
    index = ShardIndex(NameTable(f"{i}.png" for i in range(4)), 512 * numbers, numbers + 9, numbers)
    path = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    path = path / "fuzz-seed.index"
    write_index(path, index, _STAMP)
    content = path.read_bytes()
    path.unlink()
    return [Seed("train-0.tar.index", content)]


def _resign_index(content: bytes) -> bytes:
    """Restores the stamp and the checksum."""
    stamp = struct.pack(
        "<16sqq32s", b"paceline.index.1", _STAMP.size, _STAMP.mtime_ns, _STAMP.probe
    )
    body = stamp + content[len(stamp) : -32]
    return body + hashlib.sha256(body).digest()


def _shard_index(content: bytes, name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(content)
    found = read_index(path, _STAMP)
    for i in range(len(found)):
        assert isinstance(found.names[i], str)
        assert 0 <= found.offsets[i] <= found.offsets[i] + found.sizes[i] <= _STAMP.size
        assert found.labels[i] >= 0


def _entries() -> list[Seed]:
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    return [Seed("7", to_entry(7, b"encoded bytes")), Seed("7p", to_entry(7, pixels))]


def _resign_entry(content: bytes) -> bytes:
    header = struct.Struct("<4sIqqIII")
    if len(content) < header.size:
        return content
    *_, height, width, bands = header.unpack_from(content)
    body = content[header.size :]
    fields = (7, len(body), height, width, bands)
    checksum = zlib.crc32(body, zlib.crc32(repr(fields).encode()))
    return header.pack(b"plc1", checksum, *fields) + body


def _cache_entry(content: bytes, name: str, folder: Path) -> None:
    found = from_entry(7, content)
    assert found is None or isinstance(found, bytes | np.ndarray)


def _manifest() -> dict[str, object]:
    shard = {"name": "train-00000.tar", "samples": 3, "bytes": 10, "sha256": "ab" * 32, "stop": 3}
    split = {
        "source": "x", "samples": 3, "shards": [shard],
        "corrupt": [{"index": 1, "name": "a.png", "reason": "cut"}], "copied": 0, "complete": True,
    }  # fmt: skip
    encoders = {"pil": "11", "jpg": "2"}
    return {
        "version": 1,
        "options": {"quality": 90},
        "encoders": encoders,
        "splits": {"train": split},
    }


def _pack_manifest(content: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    (folder / "train-00000.tar").write_bytes(b"0123456789")
    problems = shard_problems(folder, [folder / "train-00000.tar"], True, lambda *_: None)
    assert all(isinstance(problem, str) for problem in problems)
    check_packed(folder, "train")


def _class_list(content: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    found = read_classes(folder)
    assert found
    assert all(isinstance(label, str) for label in found)


def _label_seeds() -> list[Seed]:
    names = [f"v{i}.JPEG" for i in range(3)]
    texts = {
        "val.txt": "".join(f"{name} {i}\n" for i, name in enumerate(names)),
        "LOC_val_solution.csv": "ImageId,P\n"
        + "".join(f"v{i},n0{i + 1} 1 2 3 4\n" for i in range(3)),
        "synset_labels.txt": "n01\nn02\nn03\n",
        "val_annotations.txt": "".join(
            f"{name}\tn0{i + 1}\t0\t9\n" for i, name in enumerate(names)
        ),
    }
    return [Seed(name, text.encode()) for name, text in texts.items()]


def _label_file(content: bytes, name: str, folder: Path) -> None:
    assert name in FILE_NAMES
    (folder / name).write_bytes(content)
    found = read_flat_labels(folder / name, [f"v{i}.JPEG" for i in range(3)], _CLASSES)
    if not all(0 <= label < len(_CLASSES) for label in found):
        raise AssertionError(f"labels {found}")


def _metadata() -> list[Seed]:
    rows = ('a.png,"cat, big"\nx/b.png,dog\n', "a.png,0\nb.png,2\n")
    lines = '{"file_name": "a.png", "label": "cat"}\n{"file_name": "x/b.png", "label": 2}\n'
    seeds = [Seed("metadata.csv", f"file_name,label\n{text}".encode()) for text in rows]
    return [*seeds, Seed("metadata.jsonl", lines.encode())]


def _metadata_file(content: bytes, name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(content)
    assert is_metadata(path) in (True, False)
    rows = read_metadata(path)
    assert not any(Path(file).is_absolute() or ".." in Path(file).parts for file, _ in rows)
    for classes in (None, _CLASSES):
        labels, known = metadata_labels(path, [label for _, label in rows], classes)
        assert all(0 <= label < len(known) for label in labels)
