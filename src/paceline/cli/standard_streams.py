"""Standard output and standard error that cannot end a command.

In: the descriptors with which the process was started: a terminal, a file, a pipe, or nothing. Out:
`sys.stdout` and `sys.stderr` that drop what can no longer be written: after `| head` has read enough,
after `tee` was killed, on a full disk, on a terminal that is gone. A run goes on and keeps its exit code.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A reader that makes a non-blocking pipe wait longer than this misses the rest.
_READER_WAIT_S = 5.0
# The reader of a pipe has seen what it wanted, or the terminal is closed.
_READER_IS_GONE = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO})


class LossyOutput(io.RawIOBase):
    """Writes to a descriptor until that fails, and drops everything from then on.

    `problem` is the first error, None as long as all went well.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.problem: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    @property
    def reader_is_gone(self) -> bool:
        """Whether the problem is that nobody reads any more; a file has no reader."""
        if self.problem is None or self.problem.errno not in _READER_IS_GONE:
            return False
        return not stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def write(self, data: ReadableBuffer, /) -> int:
        """The number of bytes taken: all of them where they are dropped."""
        while self.problem is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError as error:
                _, ready, _ = select.select([], [self._descriptor], [], _READER_WAIT_S)
                if not ready:
                    self.problem = error
            except OSError as error:
                self.problem = error
        return memoryview(data).nbytes


def install() -> None:
    """Replaces `sys.stdout` and `sys.stderr`. Streams that are no plain text files stay as they are."""
    _fill_descriptors()
    sys.stdout = _lossy(sys.stdout, 1)
    sys.stderr = _lossy(sys.stderr, 2)


def lost_output() -> str | None:
    """Why standard output is incomplete although somebody still wanted it; None where it is not."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, LossyOutput):
        return None
    sys.stdout.flush()
    if raw.problem is None or raw.reader_is_gone:
        return None
    return raw.problem.strerror or str(raw.problem)


def _fill_descriptors() -> None:
    """Opens /dev/null for standard descriptors that the caller has closed (`>&-`). Otherwise the next
    file that this process opens takes their number, and what is printed ends up in it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the one that is missing.
            os.open(os.devnull, os.O_RDWR)


def _lossy(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = LossyOutput(descriptor)
    if stream is None:  # it was closed when the interpreter started
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace")
    try:
        stream.flush()
    except OSError as error:
        raw.problem = error
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
