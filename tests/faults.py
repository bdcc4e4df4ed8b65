"""Fault injection: an action at a given moment of a run, such as a micro-batch or a rename.

The functions patch the program for the rest of its process, so use them in processes that end. They are
plain functions, so that `functools.partial` objects of them can be pickled.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Action = Callable[[], object]


def at_micro_batch(step: int, number: int, action: Action) -> None:
    """Acts before micro-batch `number` (over all ranks) of `step` is computed; both count from 0."""
    import paceline.train.step as module

    real = module.seed_micro_batch

    def seed(run_seed: int, this_step: int, this_number: int) -> None:
        real(run_seed, this_step, this_number)
        if (this_step, this_number) == (step, number):
            action()

    module.seed_micro_batch = seed


def constant(module: str, name: str, value: float) -> None:
    """Gives a constant of a module another value."""
    setattr(importlib.import_module(module), name, value)


def at_start(action: Action) -> None:
    """Acts before a rank chooses its device and meets the other ranks."""
    import paceline.train.run as module

    real = module.choose_device

    def choose_device(*given: Any) -> Any:
        action()
        return real(*given)

    module.choose_device = choose_device


def before_settings(action: Action) -> None:
    """Acts after the first imports of a training command, before it has read its settings."""
    import paceline.cli.train as module

    real = module.resolve

    def resolve(*given: Any, **named: Any) -> Any:
        action()
        return real(*given, **named)

    module.resolve = resolve


def at_exit(action: Action) -> None:
    """Acts when the interpreter ends, after the command."""
    atexit.register(action)


def no_thread(part: str) -> None:
    """Makes threads with `part` in their names fail to start."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if part in self.name:
            raise RuntimeError("can't start new thread")
        real(self)

    threading.Thread.start = start  # type: ignore[method-assign]


def lag() -> None:
    """Keeps one step under way while the next one is prepared, as on a GPU."""
    from paceline.train.step import TrainStep

    TrainStep.lag = property(lambda self: 1)  # type: ignore[assignment, method-assign]


def at_evaluation(nth: int, action: Action) -> None:
    """Acts when the nth evaluation of the process, counted from 1, has its first batch."""
    import paceline.train.loop as module

    real, calls = module.evaluate, [0]

    def evaluate(model: Any, batches: Any, *rest: Any, **options: Any) -> Any:
        calls[0] += 1
        given = _interrupted(batches, action) if calls[0] == nth else batches
        return real(model, given, *rest, **options)

    module.evaluate = evaluate


def _interrupted(batches: Any, action: Action) -> Any:
    for number, batch in enumerate(batches):
        if number == 0:
            action()
        yield batch


def at_rename(part: str, nth: int, action: Action, *, after: bool = False) -> None:
    """Acts before or after the nth temporary file replaces a file with `part` in its path."""
    real, calls = Path.replace, [0]

    def replace(self: Path, target: Path) -> Path:
        matched = part in str(target)
        calls[0] += matched
        due = matched and calls[0] == nth
        if due and not after:
            action()
        renamed = real(self, target)
        if due and after:
            action()
        return renamed

    Path.replace = replace  # type: ignore[assignment,method-assign]


def full_disk(part: str, nth: int) -> None:
    """Fills the disk from the nth write of a file with `part` in its path on."""
    real, calls = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls[0] += part in path.name
        if part in path.name and calls[0] >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    os.fsync = fsync


def out_of_memory(nth: int, *, training: bool = True) -> None:
    """Lets the model's nth forward pass, of training or of evaluation, run out of memory."""
    import torch

    from paceline.models.resnet import SmallResNet

    real, calls = SmallResNet.forward, [0]

    def forward(self: SmallResNet, images: torch.Tensor) -> torch.Tensor:
        calls[0] += self.training is training
        if self.training is training and calls[0] == nth:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, images)

    SmallResNet.forward = forward  # type: ignore[method-assign]


def at_message(nth: int, action: Action) -> None:
    """Acts before the nth message of the communication thread, counted from 1."""
    from paceline.comm.planned_transport import PlannedAllReduce

    real, calls = PlannedAllReduce.carry, [0]

    def carry(self: PlannedAllReduce, *given: Any) -> None:
        calls[0] += 1
        if calls[0] == nth:
            action()
        real(self, *given)

    PlannedAllReduce.carry = carry  # type: ignore[method-assign]


def freeze(name: str) -> None:
    """Freezes the parameter of this name."""
    import paceline.train.model_checks as module

    real = module.create_model

    def create_model(*given: Any, **named: Any) -> Any:
        model = real(*given, **named)
        model.get_parameter(name).requires_grad_(False)
        return model

    module.create_model = create_model


def other_plan(threshold: int) -> None:
    """Closes this rank's buckets at another size."""
    from paceline.plan.fusion_plan import FusionPlan

    real = FusionPlan.by_threshold
    FusionPlan.by_threshold = lambda sizes, _, **named: real(sizes, threshold, **named)  # type: ignore[method-assign, assignment, misc]


def other_version(package: str, version: str) -> None:
    import paceline.train.inputs as module

    real = module.versions
    module.versions = lambda: real() | {package: version}


def no_memory_for_gradients() -> None:
    """Makes the exchange allocate more memory than any machine has, which raises torch's own error."""
    import torch

    import paceline.comm.exchange as module

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, *given: Any, **named: Any) -> torch.Tensor:
            return torch.zeros(1 << 58, **named)

    module.torch = Torch()  # type: ignore[assignment]


def poison(nth: int, layer: str = "fc", passes: float = float("inf")) -> None:
    """Makes the output of `layer` NaN in `passes` training passes of the model, from the nth on."""
    import torch

    from paceline.models.resnet import SmallResNet

    real, calls = SmallResNet.forward, [0]

    def forward(self: SmallResNet, images: torch.Tensor) -> torch.Tensor:
        calls[0] += self.training
        if not nth <= calls[0] < nth + passes or not self.training:
            return real(self, images)
        hook = self.get_submodule(layer).register_forward_hook(lambda *given: given[2] * torch.nan)
        with hook:
            return real(self, images)

    SmallResNet.forward = forward  # type: ignore[method-assign]


def slow_to_hear(phase: str, seconds: float) -> None:
    """Delays this rank before it asks for the result of `phase`."""
    from paceline.comm.agreement import Agreement

    real = Agreement._await_verdict

    def wait(self: Agreement, base: str, this_phase: str, *details: Any) -> dict[str, Any]:
        if this_phase == phase:
            time.sleep(seconds)
        return real(self, base, this_phase, *details)

    Agreement._await_verdict = wait  # type: ignore[method-assign]


def patient_watchdog(more_s: float) -> None:
    """Makes a rank count as silent `more_s` later than normal.

    Tests run on hosts with more ranks than cores, where a live thread may miss some beats of a short
    time-out.
    """
    from paceline.comm import heartbeats
    from paceline.comm.watchdog import Watchdog

    heartbeats._ANSWER_S += more_s
    real = Watchdog._silent

    def silent(self: Watchdog) -> set[int]:
        now_s = self._now_s
        self._now_s = now_s - more_s
        try:
            return real(self)
        finally:
            self._now_s = now_s

    Watchdog._silent = silent  # type: ignore[method-assign]


def await_file(path: Path) -> None:
    """Waits until the test has created the file."""
    while not path.exists():
        time.sleep(0.01)


def signal_self(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def dispose(number: signal.Signals, handler: Any) -> None:
    """Sets the handler of a signal from the start of this process, whatever the tests run under."""
    signal.signal(number, handler)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def halve_and_die(folder: Path) -> None:
    """Leaves half a temporary file, as a kill in the middle of a write does."""
    (temporary,) = folder.glob(".*.tmp")
    os.truncate(temporary, temporary.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def cut_short(path: Path) -> None:
    os.truncate(path, 600)


def several(*actions: Callable[[], None]) -> None:
    """Injects more than one fault into one process."""
    for action in actions:
        action()


def unwritable_output(kind: str, *descriptors: int) -> None:
    """Makes standard output (or the given `descriptors`) unwritable."""
    if kind == "reader is gone":
        reader, writer = os.pipe()
        os.close(reader)
    elif kind == "terminal is gone":
        terminal, writer = os.openpty()
        os.close(terminal)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    for descriptor in descriptors or (1,):
        os.dup2(writer, descriptor)
    os.close(writer)


def closed_output() -> None:
    """Closes the output as `>&- 2>&-` does: no descriptors, and no streams in Python."""
    import sys

    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
