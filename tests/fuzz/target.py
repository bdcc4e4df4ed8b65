"""`Target`: one parser, its seed inputs, and how a mutated input is made for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.mutate import (
    duplicate_line,
    mutate_bytes,
    mutate_tree,
    to_json,
    to_json_lines,
    to_toml,
)
from paceline.core.errors import PacelineError

MIB = 1 << 20
_DUMPS: dict[str, Callable[[Any], bytes]] = {
    "toml": to_toml,
    "json": to_json,
    "jsonl": to_json_lines,
}


@dataclass(frozen=True)
class Seed:
    """A sound input: its file name, bytes and, for documents, the parsed tree."""

    name: str
    content: bytes
    tree: Any = None


@dataclass(frozen=True)
class Target:
    """`drive` gives the input to the parser's public entry; `folder` is its own and may hold more files.

    `refusals` are the documented ways to reject an input; anything else that escapes is a finding.
    `repair` recomputes the checksums of half of the inputs, so that mutations reach what lies behind.
    `share` is the number of inputs relative to the other targets. `memory_bytes` is what an input may
    take beyond what the process held before.
    """

    name: str
    seeds: Sequence[Seed]
    drive: Callable[[bytes, str, Path], None]
    share: int
    refusals: tuple[type[BaseException], ...] = (PacelineError,)
    form: str = ""
    repair: Callable[[bytes], bytes] | None = None
    memory_bytes: int = 512 * MIB

    def make(self, seed: int, number: int) -> tuple[str, bytes]:
        """Input `number`: a pure function of its arguments, so that a reproducer is two numbers."""
        rng = random.Random(f"{seed}/{self.name}/{number}")
        chosen = rng.choice(self.seeds)
        content = chosen.content
        if chosen.tree is not None and rng.random() < 0.7:
            changed = mutate_tree(rng, chosen.tree, dates=self.form == "toml")
            try:
                content = _DUMPS[self.form](changed)
            except (TypeError, ValueError, RecursionError):
                content = chosen.content  # a tree that the format cannot write
            if rng.random() < 0.7:
                return chosen.name, content
        if self.form and rng.random() < 0.15:
            content = duplicate_line(rng, content)
        content = mutate_bytes(rng, content, [seed.content for seed in self.seeds])
        if self.repair is not None and rng.random() < 0.5:
            content = self.repair(content)
        return chosen.name, content
