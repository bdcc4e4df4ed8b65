"""`SignalContext`: signals heard by a handler of ours for as long as a context lasts.

In: signals and a handler. Out: nothing; on leaving, whoever heard them before hears them again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Self


class SignalContext:
    """To be entered in the main thread, as Python asks of whoever sets handlers."""

    def __init__(
        self,
        numbers: Iterable[signal.Signals],
        handler: Callable[[int, FrameType | None], None],
    ) -> None:
        self._numbers = tuple(numbers)
        self._handler = handler
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
