"""Mutations of bytes and of documents, each a pure function of a random generator.

In: a seed input, and other seeds to take pieces from. Out: a damaged input. Byte mutations: flipped bits,
cuts, pieces repeated, removed, swapped and spliced from another seed, interesting numbers in place of
bytes. Document mutations work on the parsed tree of a TOML or JSON document: wrong types, NaN, huge
numbers, deep nesting, removed, duplicated and renamed fields.
"""

from __future__ import annotations

import copy
import datetime
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import tomli_w

_EDGE_INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
_TEXT_PIECES = (
    b"nan", b"inf", b"-inf", b"-1", b"0", b"1e308", b"1e-320", b"9" * 30, b"9" * 5000, b"true", b"null",
    b"[" * 2000, b"{" * 2000, b"\x1b[2J", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xe2\x80\xae", b'"',
    b"\n", b"=", b"]", b"}", b",", b".", b"../../x", b"[/red]", b"%s", b"\r\n",
)  # fmt: skip
_EVIL_VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320,
    1e-9, 1e18, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), True, False, "", "x", "nan",
    "x" * 3000, "\x1b[31mred", "\u202eevil", "[/bold]", "a\nb", "../../etc/passwd", "\0", "9" * 400, [],
    {}, [[]], [1, 2], [0, 0], ["a"], {"a": 1}, {"": {}}, [None], [1] * 5000, ["x"] * 5000,
)  # fmt: skip
_DATES = (
    datetime.date(1979, 5, 27),
    datetime.time(7, 32),
    datetime.datetime(1979, 5, 27, 7, 32, tzinfo=datetime.UTC),
)
# Deeper than documents may be; far deeper ones come from pieces of text.
_DEEP = 60


def mutate_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to eight byte mutations, most often few."""
    found = bytearray(data)
    for _ in range(min(rng.randint(1, 8), rng.randint(1, 8))):
        rng.choice(_BYTE_MUTATIONS)(rng, found, others)
    return bytes(found)


def _place(rng: random.Random, data: bytearray) -> int:
    """Headers are where parsers decide: half of all mutations hit the first 64 bytes."""
    if not data:
        return 0
    return rng.randrange(min(64, len(data)) if rng.random() < 0.4 else len(data))


def _flip_bits(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    for _n in range(rng.randint(1, 4) if data else 0):
        data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _set_bytes(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    for _n in range(rng.randint(1, 4) if data else 0):
        data[_place(rng, data)] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))


def _truncate(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[rng.randint(0, len(data)) :]


def _remove(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _place(rng, data)
    del data[start : start + rng.choice((1, 2, 4, 16, 512))]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _place(rng, data)
    piece = data[start : start + rng.choice((1, 4, 16, 512))]
    data[start:start] = piece * rng.choice((1, 2, 50))


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    start, length = rng.randint(0, len(other)), rng.choice((4, 64, 1024))
    place = _place(rng, data)
    data[place : place + rng.choice((0, length))] = other[start : start + length]


def _edge_integer(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    value = rng.choice(_EDGE_INTEGERS) % 2 ** (8 * size)
    start = _place(rng, data)
    data[start : start + size] = value.to_bytes(size, order)  # type: ignore[arg-type]


def _text_piece(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _place(rng, data)
    data[start : start + rng.choice((0, 1, 4))] = rng.choice(_TEXT_PIECES)


def _swap(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    size = rng.choice((1, 8, 512))
    a, b = _place(rng, data), _place(rng, data)
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


_BYTE_MUTATIONS: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip_bits, _flip_bits, _set_bytes, _truncate, _remove, _repeat, _splice, _edge_integer,
    _text_piece, _swap,
)  # fmt: skip


def mutate_tree(rng: random.Random, tree: Any, dates: bool) -> Any:
    """One to four changes somewhere in a tree of tables, lists and values."""
    tree = copy.deepcopy(tree)
    for _ in range(min(rng.randint(1, 4), rng.randint(1, 4))):
        places = _places(tree)
        if not places:
            return tree
        holder, key = rng.choice(places)
        _change(rng, holder, key, places, dates)
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (table, key) and (list, index); of long lists the first and last entries."""
    found: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            keys: list[Any] = list(node)
        elif isinstance(node, list):
            keys = [i for i in range(len(node)) if i < 20 or i >= len(node) - 3]
        else:
            continue
        found += [(node, key) for key in keys]
        stack += [node[key] for key in keys]
        if len(found) > 2000:
            break
    return found


def _change(
    rng: random.Random, holder: Any, key: Any, places: list[tuple[Any, Any]], dates: bool
) -> None:
    if isinstance(holder, dict) and key not in holder:
        return
    if isinstance(holder, list) and key >= len(holder):
        return
    kind = rng.randrange(8)
    if kind <= 2:
        values = (*_EVIL_VALUES, *_DATES) if dates else (*_EVIL_VALUES, None)
        holder[key] = copy.deepcopy(rng.choice(values))
    elif kind == 3:
        del holder[key]
    elif kind == 4 and isinstance(holder, dict):
        holder[rng.choice(("x", str(key).upper(), f"{key}_", ""))] = holder.pop(key)
    elif kind == 5:
        value = holder[key]
        for _ in range(rng.choice((1, 1, 3, _DEEP))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        holder[key] = value
    elif kind == 6:
        other, place = rng.choice(places)
        if (isinstance(other, dict) and place in other) or (
            isinstance(other, list) and place < len(other)
        ):
            holder[key] = copy.deepcopy(other[place])
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif type(holder[key]) in (int, float) and abs(holder[key]) < 2**1000:
        holder[key] = holder[key] * rng.choice((-1, 0, 2, 1e6, 10**12, 1e-12, 1e300))


def to_toml(tree: Any) -> bytes:
    """TOML has no null: such values become texts."""
    return tomli_w.dumps(_without_null(tree)).encode("utf-8", "surrogatepass")


def _without_null(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _without_null(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_null(value) for value in tree]
    return "null" if tree is None else tree


def to_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def to_json_lines(tree: Any) -> bytes:
    rows = tree if isinstance(tree, list) else [tree]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def duplicate_line(rng: random.Random, content: bytes) -> bytes:
    """A field twice, a line moved: what a merge of two files by hand leaves."""
    lines = content.split(b"\n")
    lines.insert(rng.randint(0, len(lines)), rng.choice(lines))
    return b"\n".join(lines)
