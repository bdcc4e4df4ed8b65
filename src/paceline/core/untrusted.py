"""Handles untrusted text and documents: file names, TOML and JSON.

`printable` makes a name safe for a terminal and a page. `parse_toml`, `parse_json` and `parse_table`
raise only `ParseError` for invalid bytes; the libraries also raise `RecursionError` for deep nesting and
`ValueError` for integers with thousands of digits. `is_count` and `is_finite` reject values that TOML and
JSON allow but settings do not: NaN, infinities, booleans, numbers beyond 64 bits.
"""

from __future__ import annotations

import json
import math
import reprlib
import tomllib
from typing import Any, TypeGuard

# A line that lists every element of a damaged list hides the problem.
_LONGEST_VALUE = 200
# Python converts digits in quadratic time, and refuses to convert more than 4,300.
_DIGITS = "has a number of too many digits"
_NESTING = "is nested too deeply"
# Bounds of the seconds of a measurement in a file, far beyond possible values. Within them no sum,
# product or quotient of the planner overflows.
LONGEST_S = 1e6
SHORTEST_S = 1e-9
# The largest nesting depth, deeper than any document of Paceline; recursive code relies on this limit.
_DEEPEST = 32
_LARGEST_INTEGER = 2**1000  # a float holds it


class ParseError(ValueError):
    """Raised for bytes that are not a valid document; `str()` is the reason."""


def printable(text: str) -> str:
    """Replaces control characters, escape sequences, direction marks and lone surrogates by U+FFFD.

    A name from a data set must not move the cursor, colour the screen or hide its ending. Line ends are
    control characters, too: split lines first.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def one_line(text: str) -> str:
    """Returns a text as one printable line."""
    return printable(" ".join(text.split()))


def short_repr(value: object) -> str:
    """Returns the `repr` of a value; long texts and lists are cut in the middle."""
    shown = _SHORT.repr(value)
    if len(shown) <= _LONGEST_VALUE:
        return shown
    return f"{shown[: _LONGEST_VALUE // 2]}…{shown[-_LONGEST_VALUE // 4 :]}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _LONGEST_VALUE
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20
_SHORT.maxlevel = 4


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parses a TOML document. Raises ParseError if it is invalid."""
    try:
        tables: dict[str, Any] = _checked(tomllib.loads(content.decode("utf-8")))
        return tables
    except RecursionError:
        raise ParseError(_NESTING) from None
    except ValueError as error:
        raise ParseError(_reason(error)) from None


def parse_json(content: bytes) -> Any:
    """Parses a JSON document. Raises ParseError if it is invalid."""
    try:
        return _checked(json.loads(content.decode("utf-8")))
    except RecursionError:
        raise ParseError(_NESTING) from None
    except ValueError as error:
        raise ParseError(_reason(error)) from None


def parse_table(content: bytes | str) -> dict[str, Any]:
    """Parses a JSON object, such as a message of another process.

    Raises:
        ParseError: If it is invalid.
    """
    # A lone surrogate, which represents bytes that are not text, cannot be encoded.
    table = parse_json(content.encode(errors="replace") if isinstance(content, str) else content)
    if not isinstance(table, dict):
        raise ParseError("is not a table")
    return table


def _checked(tree: Any) -> Any:
    level = [tree]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for node in level:
            if type(node) is dict:
                below.extend(node.values())
            elif type(node) is list:
                below.extend(node)
            elif type(node) is int and abs(node) > _LARGEST_INTEGER:
                raise ParseError(_DIGITS)
        if not below:
            return tree
        level = below
    raise ParseError(_NESTING)


def _reason(error: ValueError) -> str:
    return _DIGITS if "integer string conversion" in str(error) else str(error)


def is_count(value: object, least: int = 0, most: int = 2**63 - 1) -> TypeGuard[int]:
    """Returns True if `value` is an integer from `least` to `most`, and not a boolean."""
    return type(value) is int and least <= value <= most


def is_finite(value: object) -> TypeGuard[float]:
    """Returns True if `value` is a finite number, and not a boolean."""
    if type(value) is int:
        return abs(value) <= _LARGEST_INTEGER
    return type(value) is float and math.isfinite(value)
