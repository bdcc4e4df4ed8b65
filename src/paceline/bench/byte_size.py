"""Sizes as people write them.

In: `4096`, `64KiB`, `16M`. Out: bytes; K, M and G count in 1024s, as in nccl-tests, KB and MB in 1000s.
"""

from __future__ import annotations

import re

from paceline.core.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(i?b)?", re.IGNORECASE)
_LARGEST = 2.0**50
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}


def parse_bytes(flag: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) < _LARGEST:
        raise _no_size(flag, text)
    base = 1000 if (found[3] or "").lower() == "b" and found[2] else 1024
    power = _POWERS[found[2].lower()]
    size = round(float(found[1]) * float(base) ** power)
    if size < 1:
        raise _no_size(flag, text)
    return size


def _no_size(flag: str, text: str) -> ConfigError:
    return ConfigError(flag, text, "is not a size", "write 4096, 64KiB or 16MiB")


def show_bytes(size: int) -> str:
    """`65536` → `64 KiB`; what is not whole in a unit stays in a smaller one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
