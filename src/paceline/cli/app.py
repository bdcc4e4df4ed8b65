"""Runs the command line `paceline`: finds the command, and turns errors into exit codes.

Exit codes: 0 success, 1 the command failed, 2 wrong input, 128 + n stopped by signal n. An error that a
user can cause is one line on standard error; a bug keeps its traceback.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import select
import signal
import stat
import sys
import traceback
from typing import TYPE_CHECKING, Any, TextIO

import typer
import typer.core
import typer.main

from paceline.cli.failure import RANK_VARIABLES, Failure, Unwatched
from paceline.core.errors import DeviceError, PacelineError
from paceline.core.extensions import missing_extension
from paceline.core.host import no_thread
from paceline.version import __version__

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# The longest wait for the reader of a full non-blocking pipe. After that, the output is dropped.
_READER_WAIT_S = 5.0
# The errors that mean that the reader of a pipe has ended or a terminal was closed.
_READER_IS_GONE = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO})

# Packages of the extra `train`, by their import names.
_TRAINING_PACKAGES = ("torch", "PIL", "safetensors")

# The module and function of each command. A module is imported when its command runs, and for --help.
_COMMANDS = {
    "train": "train:train", "lr-find": "lr_find:find_rate", "rehearse": "rehearse:rehearse",
    "eval": "evaluate:evaluate_checkpoint", "recipes": "listings:recipes",
    "predict": "evaluate:predict_images", "export": "evaluate:export_weights",
    "models": "listings:list_models", "report": "report:report_run", "compare": "report:compare_runs",
    "watch": "report:watch_runs", "doctor": "doctor:doctor", "tune": "tune:tune", "plan": "plan:plan",
    "profile": "tune:profile", "pack": "data:pack_data", "inspect": "data:inspect_data",
    "bench": "bench:bench",
}  # fmt: skip
_PLAIN: dict[str, Any] = {
    "pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": None,
}  # fmt: skip


class _Commands(typer.core.TyperGroup):
    """The group of all commands, which imports a command only when it is needed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(_COMMANDS)  # type: ignore[assignment]
        self._lists_commands = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        try:
            command = getattr(importlib.import_module(f"paceline.cli.{module}"), name)
        except ModuleNotFoundError as error:
            if self._lists_commands and missing_extension(error):
                return None
            raise
        group = typer.Typer(**_PLAIN)
        if isinstance(command, typer.Typer):
            group.add_typer(command, name=cmd_name)
        else:
            group.command(cmd_name)(command)
        return typer.main.get_group(group).commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands; omits commands whose extension package is not installed."""
        self._lists_commands = True
        super().format_commands(ctx, formatter)


app = typer.Typer(
    name="paceline",
    help="Synchronous data-parallel training of convolutional networks at very large batches.",
    no_args_is_help=True,
    cls=_Commands,
    **_PLAIN,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options of `paceline` itself."""


def main() -> None:
    """Runs the command line of `sys.argv` and ends the process."""
    # When a peer ends, torch's C++ code would print stack frames. We report the end in one line instead.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    make_streams_robust()
    code = run_command()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C during the interpreter's exit must not print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_check_output(code))


def run_command() -> int:
    """Runs the command line of `sys.argv` and returns its exit code."""
    try:
        # This is first, because a launcher can end while a rank still imports torch.
        watch = _watch_launcher()
        code = app(standalone_mode=False)
        if code and (loss := watch.loss()):  # the reason why the run saved and stopped
            loss.report()
        return code if isinstance(code, int) else 0
    except DeviceError as error:
        # Destructors and exit handlers would call CUDA and print pages of errors.
        code = Failure.of(error).report()
        sys.stdout.flush()
        os._exit(code)
    except PacelineError as error:
        return watch.cause(Failure.of(error)).report()
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ModuleNotFoundError as error:
        command = " ".join(sys.argv[1:2])
        if package := missing_extension(error):
            needs = f"{package}, which is not part of this installation; install Paceline with it"
        elif error.name in _TRAINING_PACKAGES:
            needs = f"{error.name}; pip install 'paceline[train]'"
        else:
            return _unexpected(error).report()
        return Failure(f"paceline {command} needs the package {needs}", 2).report()
    except Exception as error:  # noqa: BLE001 - the last chance to report an error
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error.format_message()}\n")  # type: ignore[attr-defined]
            return 2
        if hasattr(error, "format_message"):  # a mistake in the command line itself
            mistake = " ".join(error.format_message().split()).rstrip(".")
            code = int(getattr(error, "exit_code", 2))
            return Failure(f"{mistake}; see {_command()} --help", code).report()
        return _unexpected(error).report()


def _watch_launcher() -> Unwatched:
    """Watches the launcher, if one has started this process as a rank, to end the rank with it."""
    if os.environ.keys().isdisjoint(RANK_VARIABLES.values()):
        return Unwatched()
    from paceline.cli.launcher_watch import LauncherWatch

    return LauncherWatch(os.environ)


def _command() -> str:
    """Returns the command of this process without arguments, as in `paceline bench step`."""
    command: Any = typer.main.get_command(app)
    names = ["paceline"]
    for word in sys.argv[1:]:
        get_command = getattr(command, "get_command", None)
        command = get_command(None, word) if get_command is not None else None
        if command is None:
            break
        names.append(word)
    return " ".join(names)


def _unexpected(error: Exception) -> Failure:
    if known := no_thread(error):
        return Failure.of(known)
    return Failure(f"{type(error).__name__}: {error}", 1, traceback.format_exc())


def _check_output(code: int) -> int:
    """Returns the exit code `code`, or 1 if the command succeeded but its output was not written.

    A reader that ends early (`| head`) is no error. Lost output of `paceline train` and `rehearse` is no
    error either, because their results are in the run folder.
    """
    problem = lost_output()
    if problem is None:
        return code
    if sys.argv[1:2] in (["train"], ["rehearse"]):
        sys.stderr.write(f"paceline: note: standard output is incomplete: {problem}\n")
        return code
    if code == 0:
        line = f"standard output cannot be written: {problem}; redirect it elsewhere"
        return Failure(line, 1).report()
    return code


def make_streams_robust() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by streams whose failure does not end the command.

    A stream fails after `| head` has read enough, on a full disk, or if the terminal is closed. Streams
    that are not plain text files are kept.
    """
    _open_closed_descriptors()
    sys.stdout = _lossy(sys.stdout, 1)
    sys.stderr = _lossy(sys.stderr, 2)


def lost_output() -> str | None:
    """Returns why output could not be written, or None if none was lost.

    Output to a pipe whose reader has ended is not lost.
    """
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, LossyOutput):
        return None
    sys.stdout.flush()
    if raw.problem is None or raw.reader_is_gone:
        return None
    return raw.problem.strerror or str(raw.problem)


class LossyOutput(io.RawIOBase):
    """A stream that stores its first write error as `problem`, and then discards all output."""

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
        """True if `problem` means that the reader of a pipe has ended; never True for files."""
        if self.problem is None or self.problem.errno not in _READER_IS_GONE:
            return False
        return not stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes bytes or, after an error, discards them; returns the number of bytes in both cases."""
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


def _open_closed_descriptors() -> None:
    """Opens /dev/null for standard descriptors that the caller has closed (`>&-`).

    Otherwise, the next file that this process opens would get the same number and receive the output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is that of the closed descriptor.
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
