"""`paceline`: the commands and what becomes of their errors.

In: the command line. Out: an exit code: 0 well, 1 the run failed, 2 the input was wrong, 128 + n
ended by signal n. A user's mistake is one line on standard error; our own bugs keep their traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import typer

from paceline.cli import (
    bench,
    compare,
    doctor,
    evaluate,
    export,
    inspect,
    pack,
    plan,
    profile,
    report,
    standard_streams,
    train,
    tune,
)
from paceline.cli.failure import Failure
from paceline.cli.launcher_watch import LauncherWatch
from paceline.core.errors import DeviceError, PacelineError
from paceline.version import __version__

app = typer.Typer(
    name="paceline",
    help="Synchronous data-parallel training of convolutional networks at very large batches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate_checkpoint)
app.command("export")(export.export_weights)
app.command("report")(report.report_run)
app.command("compare")(compare.compare_runs)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)
app.command("pack")(pack.pack_data)
app.command("inspect")(inspect.inspect_data)
app.add_typer(bench.bench, name="bench")


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
    """Entry point of the script and of `python -m paceline`."""
    # Torch's C++ side tells of a peer's end in stack frames of its own; one line of ours does.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    standard_streams.install()
    code = _run()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The work is done: Ctrl-C ends what the interpreter still does, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_checked_output(code))


def _checked_output(code: int) -> int:
    """The exit code, or 1 where a command succeeded but its output could not be written.

    A reader that leaves early (`| head`) changes nothing. Neither does any failure of the display in
    `paceline train`: what a run is for is in its folder.
    """
    problem = standard_streams.lost_output()
    if problem is None:
        return code
    if sys.argv[1:2] == ["train"]:
        sys.stderr.write(f"paceline: note: standard output is incomplete: {problem}\n")
        return code
    if code == 0:
        return _fail(
            Failure(f"standard output cannot be written: {problem}; redirect it elsewhere", 1)
        )
    return code


def _run() -> int:
    # First of all: a launcher may end while a rank still imports torch.
    watch = LauncherWatch(os.environ)
    try:
        code = app(standalone_mode=False)
        if code and watch.error is not None:  # it stopped, and saved, for that reason
            _fail(Failure.of(watch.error))
        return code if isinstance(code, int) else 0
    except DeviceError as error:
        # Destructors and exit handlers would call CUDA, fail, and say so in pages.
        code = _fail(Failure.of(error))
        sys.stdout.flush()
        os._exit(code)
    except PacelineError as error:
        # What breaks once the launcher is gone, and its store with it, is no cause of its own.
        return _fail(Failure.of(watch.error or error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # noqa: BLE001 - the last place that can show it
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error.format_message()}\n")  # type: ignore[attr-defined]
            return 2
        if hasattr(error, "format_message"):  # a mistake in the command line itself
            usage = f"{' '.join(error.format_message().split())}; see paceline --help"
            return _fail(Failure(usage, int(getattr(error, "exit_code", 2))))
        return _fail(Failure(f"{type(error).__name__}: {error}", 1, traceback.format_exc()))


def _fail(failure: Failure) -> int:
    failure.tell()
    return failure.exit_code
