"""Chooses the fastest implementation of each fused convolution on this device.

At the start of a run, between `begin` and `adopt`, a trial pass times the implementations. Later
nothing is timed: for shapes that did not occur in the trial, such as a short last micro-batch,
convolution and norm run as separate kernels (the "separate" implementation).

`adopt` receives the choices on which all ranks have agreed and writes them to a file in
`$XDG_CACHE_HOME/paceline/products` or `~/.cache/paceline/products`, so that later runs make the
same choices without timing. There is one file for each type of GPU and version of torch, Triton
and, if used, cuDNN.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.accel import cudnn_graphs
from paceline.accel.cudnn_graphs import CudnnError
from paceline.core.files import read_regular, user_cache, whole_file
from paceline.core.untrusted import parse_table

SEPARATE = "separate"
# Prefix of the names of cuDNN's implementations.
CUDNN = "cudnn"
# Calls that are timed together, and how often that is repeated; the shortest time is used.
_CALLS, _REPEATS = 4, 3
# Cycles for which a kernel waits before the calls, so that the host launches all of them in time.
_WAIT_CYCLES = 3_000_000
_VERSION = 2
# Prefixes of the keys of whole convolutions; all other keys are choices inside one of these.
_OUTER = ("forward", "backward")
_MAX_REASONS = 3
# Number of threads that compile kernels; the compiler releases the GIL only for a part of the time.
_BUILDERS = 4


# If True, implementations compile their kernels but do not run them.
building: ContextVar[bool] = ContextVar("building", default=False)


@dataclass
class Choices:
    """The kernels chosen for the fused convolutions of one model.

    Attributes:
        mode: `off`; `auto`; `on`, which uses the separate implementation only if no other works; or
            `cudnn`, which is `auto` with the implementations of cuDNN.
        open: True during the trial, in which implementations are timed.
        chosen: The name of the chosen implementation, by the key of the convolution.
        used: The keys that this model needed in the trial.
        times: The milliseconds of each implementation that this process timed, by key and name.
        problems: The error of each implementation that failed, by "key: name".
        missing: The reason why cuDNN has no implementation, by key.
        without_cudnn: The reason why cuDNN cannot be used at all; "" if it can.
        timed: The number of keys for which this process timed implementations.
        path: The file in which choices are stored; None if there is no such file.
    """

    mode: str = "off"
    open: bool = False
    chosen: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    without_cudnn: str = ""
    timed: int = 0
    path: Path | None = None

    def own(self) -> dict[str, str]:
        """Returns the chosen implementations for the convolutions of this model only."""
        return {key: name for key, name in self.chosen.items() if key in self.used}

    def describe(self) -> str:
        """Describes how many convolutions are fused, and what failed or is missing."""
        ends = {key: name for key, name in self.own().items() if key.startswith(_OUTER)}
        missing = {key: why for key, why in self.missing.items() if key.startswith(_OUTER)}
        fused = sum(name != SEPARATE for name in ends.values())
        cudnn = sum(name.startswith(CUDNN) for name in ends.values())
        by_cudnn = f", {cudnn} by cuDNN" if self.mode == CUDNN else ""
        by_cudnn += ", whose sums have no fixed order" if cudnn else ""
        source = f"{self.timed} timed" if self.timed else "cached" if ends else "none to choose"
        failed = f", {len(self.problems)} implementations failed" if self.problems else ""
        without = f"; cuDNN cannot be used: {self.without_cudnn}" if self.without_cudnn else ""
        for reason, count in Counter(missing.values()).most_common(_MAX_REASONS):
            without += f"; cuDNN has no kernel for {count} of them: {reason}"
        # Includes convolutions without a choice, which only cuDNN supports but has no kernel for.
        kinds = len(ends.keys() | missing.keys())
        return (
            f"{fused} of {kinds} kinds of convolutions fused{by_cudnn} ({source}{failed}){without}"
        )

    def wanted_of_cudnn(self, key: str) -> str | None:
        """Returns which of cuDNN's implementations are needed for `key`.

        The result is the name of the chosen one, "" if all are to be timed, or None if none is
        used.
        """
        name = self.chosen.get(key)
        if self.mode != CUDNN or self.without_cudnn or (name is None and not self.open):
            return None
        return "" if name is None else name if name.startswith(CUDNN) else None

    @classmethod
    def begin(cls, mode: str, device: torch.device) -> Choices:
        """Starts timing, with the choices that earlier runs have stored on disk for this kind of GPU."""
        choices = cls(mode, open=mode != "off")
        if mode == CUDNN:
            try:
                cudnn_graphs.version()
            except CudnnError as error:
                choices.without_cudnn = str(error)
        if device.type == "cuda" and mode != "off":
            choices.path = _file(device, mode, choices.without_cudnn)
        if choices.path is not None:
            stored = _read(choices.path)
            choices.chosen.update((k, v) for k, v in stored.items() if isinstance(v, str))
        return choices

    def adopt(self, agreed: Mapping[str, str]) -> bool:
        """Ends timing, replaces all choices by those on which the ranks agreed, and stores them on disk.

        Choices that came from the file but were not agreed on are dropped, so that a run does not
        depend on them.

        Returns:
            True if a choice of this process differs from the agreed one.
        """
        differs = any(agreed.get(key) != name for key, name in self.own().items())
        self.open = False
        self.chosen = dict(agreed)
        if self.path is not None:
            _write(self.path, self.chosen)
        return differs

    def kind(self) -> str:
        """Returns a text with the GPU, versions and mode for which the choices are valid."""
        return self.path.name if self.path is not None else ""

    def choose(
        self, key: str, implementations: Mapping[str, Callable[[], object]], device: torch.device,
        then: Callable[[Any], object] | None = None,
    ) -> str:  # fmt: skip
        """Returns the name of the chosen implementation; during the trial, times them to choose.

        Args:
            key: Identifies the convolution, its shapes and number formats.
            implementations: The implementations by name; they must have no side effects.
            device: The device on which they run.
            then: Later work whose time depends on the implementation, such as the weight gradient.
                It receives the result of the implementation, and its time is added.
        """
        timing = self.open and device.type == "cuda" and not building.get()
        timing = timing and not torch.cuda.is_current_stream_capturing()
        if timing:
            self.used.add(key)
        chosen = self.chosen.get(key)
        if chosen in implementations:
            return str(chosen)
        names = list(implementations)
        if self.mode == "on" and names != [SEPARATE]:
            names = [name for name in names if name != SEPARATE]
        if building.get():
            return names[0]
        if not timing:
            return SEPARATE if device.type == "cuda" and SEPARATE in implementations else names[0]
        times = self._times(key, {name: implementations[name] for name in names}, then)
        if times:
            best = min(times, key=lambda name: times[name])
            self.times[key] = times
            self.timed += 1
        elif SEPARATE in implementations:
            best = SEPARATE
        else:
            return names[0]  # the convolution that contains this choice reports the error
        self.chosen[key] = best
        return best

    def _times(
        self, key: str, implementations: Mapping[str, Callable[[], object]],
        then: Callable[[Any], object] | None,
    ) -> dict[str, float]:  # fmt: skip
        """Times all implementations; returns the milliseconds, and records errors in `problems`."""
        # Only Triton's kernels are compiled; implementations of cuDNN and torch would run instead.
        own = [name for name in implementations if not name.startswith((SEPARATE, CUDNN))]
        _build([implementations[name] for name in own])
        times = {}
        for name, call in implementations.items():
            try:
                times[name] = _milliseconds(call if then is None else partial(_both, call, then))
            except Exception as error:  # compilers raise various exceptions
                if is_fatal(error):
                    raise
                lines = str(error).splitlines()
                self.problems[f"{key}: {name}"] = lines[0][:200] if lines else type(error).__name__
        return times


def _both(call: Callable[[], object], then: Callable[[Any], object]) -> object:
    return then(call())


def _build(calls: Sequence[Callable[[], object]]) -> None:
    """Compiles the kernels of all implementations with several threads.

    Errors are ignored here, because timing the implementation reports them.
    """
    import triton

    if not calls:
        return
    workers = min(len(calls), _BUILDERS)
    token = building.set(True)
    try:
        with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                with suppress(Exception):
                    call()
    finally:
        building.reset(token)


def is_fatal(error: Exception) -> bool:
    """Returns True for a lost GPU or too little memory, which are not the fault of one kernel."""
    return (
        isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError | MemoryError)
        or "out of memory" in str(error).lower()
    )


def _milliseconds(call: Callable[[], object]) -> float:
    call()  # compiles, and chooses algorithms
    call()
    best = float("inf")
    for _ in range(_REPEATS):
        begin_event, end_event = (
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )
        torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
        begin_event.record()
        for _ in range(_CALLS):
            call()
        end_event.record()
        end_event.synchronize()
        best = min(best, begin_event.elapsed_time(end_event) / _CALLS)
    return best


def _file(device: torch.device, mode: str, without_cudnn: str = "") -> Path | None:
    """Returns the file that stores the choices, or None if there is no home directory."""
    import triton

    base = user_cache()
    if base is None:
        return None
    names = [torch.cuda.get_device_name(device), torch.__version__, triton.__version__, mode]
    if mode == CUDNN:  # the names of cuDNN's kernels depend on its version
        names.append("none" if without_cudnn else str(cudnn_graphs.version()))
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join((*names, f"v{_VERSION}")))
    return base / "products" / f"{name}.json"


def _read(path: Path) -> dict[str, Any]:
    """Reads a JSON file; returns {} if that fails, because lost choices are timed again."""
    try:
        return parse_table(read_regular(path))
    except (OSError, ValueError):
        return {}


def _write(path: Path, added: Mapping[str, object]) -> None:
    """Adds entries to a JSON file and keeps its other entries. Ignores write errors."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({**_read(path), **added}, indent=1, sort_keys=True)
        with whole_file(path) as file:
            file.write(text.encode())
