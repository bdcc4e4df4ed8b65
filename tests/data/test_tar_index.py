from __future__ import annotations

import gc
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.small import samples
from paceline.core.errors import DataError
from paceline.data.sources.tar_index import NameTable, ShardIndex, scan_shard, tar_members

PATH = Path("data/train-0007.tar")


def archive(*members: tuple[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def scan(content: bytes) -> ShardIndex:
    return scan_shard(PATH, io.BytesIO(content))


def images(content: bytes) -> dict[str, tuple[bytes, int]]:
    index = scan(content)
    return {
        index.names[i]: (
            content[index.offsets[i] : index.offsets[i] + index.sizes[i]],
            int(index.labels[i]),
        )
        for i in range(len(index))
    }


def test_samples_are_found_where_they_lie() -> None:
    content = archive(
        ("a.jpg", b"first"),
        ("a.cls", b"3"),
        ("a.json", b"{}"),
        ("README", b"text"),
        ("sub/dir/b.PNG", b"x" * 1000),
        ("sub/dir/b.cls", b" 12\n"),
        ("c.cls", b"0"),
        ("c.webp", b"third"),
        ("d.jpeg", b""),
        ("d.cls", b"1"),
    )
    assert images(content) == {
        "a.jpg": (b"first", 3),
        "sub/dir/b.PNG": (b"x" * 1000, 12),
        "c.webp": (b"third", 0),
        "d.jpeg": (b"", 1),
    }


def test_the_key_ends_at_the_first_dot() -> None:
    content = archive(("a.jpg", b"i"), ("a.seg.png", b"mask"), ("a.cls", b"0"))
    assert list(images(content)) == ["a.jpg"]


def test_hidden_twins_of_another_system_are_passed_over() -> None:
    content = archive(("._a.jpg", b"junk"), ("a.jpg", b"i"), ("a.cls", b"0"))
    assert list(images(content)) == ["a.jpg"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"i")], r"sample 'a' has an image but no label"),
        ([("a.cls", b"1")], r"sample 'a' has a label but no image"),
        ([("a.jpg", b"i"), ("a.png", b"i"), ("a.cls", b"1")], r"sample 'a' occurs twice"),
        ([("a.jpg", b"i"), ("a.cls", b"1"), ("a.cls", b"1")], r"sample 'a' occurs twice"),
        ([("a.jpg", b"i"), ("a.cls", b"")], r"label of sample 'a' is ''"),
        ([("a.jpg", b"i"), ("a.cls", b"cat")], r"label of sample 'a' is 'cat'"),
        ([("a.jpg", b"i"), ("a.cls", b"-1")], r"label of sample 'a' is '-1'"),
        ([("a.jpg", b"i"), ("a.cls", b"1.0")], r"label of sample 'a' is '1.0'"),
        ([("a.jpg", b"i"), ("a.cls", b"9" * 30)], r"label of sample 'a' is '9+'"),
        ([("a.jpg", b"i"), ("a.cls", b"1" + b" " * 99)], r"label of sample 'a'"),
        ([("a.jpg", b"i"), ("a.cls", "²".encode())], r"label of sample 'a'"),
    ],
)
def test_wrong_samples_are_named(members: list[tuple[str, bytes]], message: str) -> None:
    with pytest.raises(DataError, match=r"data/train-0007\.tar: .*" + message):
        scan(archive(*members))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_are_refused(kind: bytes) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo("a.jpg")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"'a.jpg' is a link, device"):
        scan(stream.getvalue())


def test_directories_inside_are_fine() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        folder = tarfile.TarInfo("x")
        folder.type, folder.size = tarfile.DIRTYPE, 700  # some writers count its entries there
        tar.addfile(folder)
        for name in ("x/a.jpg", "x/a.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"1"))
    assert len(scan(stream.getvalue())) == 1


@pytest.fixture
def whole() -> bytes:
    return archive(*samples(4))


def test_a_cut_anywhere_is_noticed(whole: bytes) -> None:
    end = whole.rstrip(b"\0")
    last_block = -(-len(end) // 512) * 512
    for length in range(0, last_block + 512, 256):
        with pytest.raises(DataError, match=r"train-0007\.tar: (truncated|not a readable)"):
            scan(whole[:length])
    assert len(scan(whole[: last_block + 512])) == 4


def test_a_damaged_header_is_noticed(whole: bytes) -> None:
    for offset in (0, 1024, 2048, 3072):
        damaged = bytearray(whole)
        damaged[offset] ^= 0xFF
        with pytest.raises(DataError, match=r"train-0007\.tar: (damaged member|not a readable)"):
            scan(bytes(damaged))


def test_no_tar_at_all() -> None:
    with pytest.raises(DataError, match="not a readable tar shard"):
        scan(b"hello " * 1000)
    with pytest.raises(DataError, match="not a readable tar shard"):
        scan(b"")


def test_memory_does_not_grow_with_the_members() -> None:
    members = [(f"{i:05d}.{e}", b"1") for i in range(300) for e in ("jpg", "cls")]
    kept: list[int] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if len(kept) < 3 and self.tell() > 500_000:
                kept.append(sum(type(o) is tarfile.TarInfo for o in gc.get_objects()))
            return super().read(size)

    assert len(scan_shard(PATH, Watched(archive(*members)))) == 300
    assert max(kept) < 20


def test_zeros_in_the_midst(whole: bytes) -> None:
    content = bytearray(whole)
    content[4096:6144] = bytes(2048)  # a whole sample
    with pytest.raises(DataError, match=r"has data after the end marker at byte 4096"):
        scan(bytes(content))
    with pytest.raises(DataError, match="has data after the end marker"):
        scan(whole + whole)
    with pytest.raises(DataError, match="has data after the end marker"):
        scan(whole + bytes(20_000))


def test_labels_as_webdataset_decodes_them() -> None:
    texts = (b"7", b"7\n", b" 007\r\n", b"+7")
    members = [(f"{i}.{kind}", data) for i, text in enumerate(texts)
               for kind, data in (("jpg", b"i"), ("CLS", text))]  # fmt: skip
    assert scan(archive(*members)).labels.tolist() == [7] * 4


def with_checksum(header: bytes) -> bytes:
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


@pytest.mark.parametrize(
    ("at", "field"),
    [
        (124, b"000000000005"),  # no byte left for an end
        (124, b"5\0          "),
        (124, b"          5\0"),
        (124, tarfile.itn(5, 12, tarfile.GNU_FORMAT)),
        (124, b"\x80" + bytes(10) + b"\5"),  # as GNU writes sizes that octal digits cannot hold
        (156, tarfile.AREGTYPE),
        (345, b"folder\0"),
        (0, b"\xc3\xbc.jpg\0"),
    ],
)
def test_headers_are_read_as_by_tarfile(at: int, field: bytes) -> None:
    whole = archive(("a.jpg", b"12345"), ("a.cls", b"1"))
    content = with_checksum(whole[:at] + field + whole[at + len(field) : 512]) + whole[512:]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        theirs = [(member.name, member.size, member.offset_data) for member in tar]
    ours = [(m.name, m.size, m.offset_data) for m in tar_members(PATH, io.BytesIO(content))]
    assert ours == theirs


@pytest.mark.parametrize("size", [-512, -1024, -1])
def test_a_size_below_zero_does_not_go_on_for_ever(whole: bytes, size: int) -> None:
    header = whole[:124] + tarfile.itn(size, 12, tarfile.GNU_FORMAT) + whole[136:512]
    with pytest.raises(DataError, match=r"train-0007\.tar: (damaged member|not a readable)"):
        scan(with_checksum(header) + whole[512:])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12)))
def test_gives_back_what_it_got(names: list[str]) -> None:
    table = NameTable(names)
    assert len(table) == len(names)
    assert [table[i] for i in range(len(table))] == names


def test_file_names_that_are_no_text_survive() -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    assert NameTable(["a", name])[1] == name


def test_keys_with_dots_are_refused_unless_they_are_further_fields() -> None:
    dotted = [("a.v2.jpg", b"i"), ("a.v2.cls", b"1")]
    with pytest.raises(DataError, match="the key of sample 'a.v2' has a dot"):
        scan(archive(*dotted))
    assert len(scan(archive(("a.jpg", b"i"), ("a.cls", b"0"), *dotted))) == 1
