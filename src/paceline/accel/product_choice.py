"""Which form of a product is fastest on this device: timed once for each shape, and kept on disk.

A form is timed on the very maps of its first call, between `begin` and `settle`, in the trial pass at
the start of a run. Afterwards nothing is timed: shapes that the trial did not have, such as those of a
short last micro-batch, take the separate form. `settle` gets the choices that ranks have agreed on and
keeps them in `$XDG_CACHE_HOME/paceline/products` or `~/.cache`, one file for each kind of GPU, version
of torch, Triton and, where it takes part, cuDNN, so that later runs choose alike without timing. Next to
it lies what was timed, and when (`.times.json`), for people to read.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline.accel import cudnn_graphs
from paceline.accel.cudnn_graphs import CudnnError
from paceline.core.files import read_regular, whole_file
from paceline.core.untrusted import parse_json

SEPARATE = "separate"
# How the names of cuDNN's forms begin.
CUDNN = "cudnn"
MODES = ("off", "auto", "on", CUDNN)
# Calls that are timed together, and how often; the fastest time counts.
_CALLS, _REPEATS = 4, 3
# Cycles of a kernel that waits, so that the host launches all calls before the first one starts.
_WAIT_CYCLES = 3_000_000
_VERSION = 2
# Keys of whole products; others are parts of them.
_OUTER = ("forward", "backward")
# Of cuDNN that are printed.
_MOST_REASONS = 3
# Threads that build kernels; the compiler holds Python's lock for part of the time.
_BUILDERS = 4


# Inside, a form builds its kernels, and does not run them.
building: ContextVar[bool] = ContextVar("building", default=False)


@dataclass
class Choices:
    """Of one model. `mode` is `off`, where no product is fused, `auto`, which times the separate form
    too, `on`, which takes it only where no other works, or `cudnn`, which is `auto` with the forms of
    cuDNN. `open`: products are timed. `used`: keys that were asked for. `times` has the milliseconds of
    all forms that were timed by this process, `problems` the reasons of those that failed, and `missing`
    why cuDNN has none for a key; `without_cudnn`, why it cannot be used at all."""

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
        """Those of the trial, without what the file has for other shapes."""
        return {key: name for key, name in self.chosen.items() if key in self.used}

    def describe(self) -> str:
        """The number of products and of fused ones, of forms that failed, and why cuDNN has none."""
        ends = {key: name for key, name in self.own().items() if key.startswith(_OUTER)}
        missing = {key: why for key, why in self.missing.items() if key.startswith(_OUTER)}
        fused = sum(name != SEPARATE for name in ends.values())
        cudnn = sum(name.startswith(CUDNN) for name in ends.values())
        by_cudnn = f", {cudnn} by cuDNN" if self.mode == CUDNN else ""
        by_cudnn += ", whose sums have no fixed order" if cudnn else ""
        source = f"{self.timed} timed" if self.timed else "cached" if ends else "none to choose"
        failed = f", {len(self.problems)} forms failed" if self.problems else ""
        without = f"; no form of cuDNN: {self.without_cudnn}" if self.without_cudnn else ""
        for reason, count in Counter(missing.values()).most_common(_MOST_REASONS):
            without += f"; no form of cuDNN for {count} of them: {reason}"
        # Where only cuDNN could have a fused form, and has none, there was nothing to choose.
        kinds = len(ends.keys() | missing.keys())
        return f"{fused} of {kinds} kinds of products fused{by_cudnn} ({source}{failed}){without}"

    def wanted_of_cudnn(self, key: str) -> str | None:
        """The form of cuDNN that was chosen for `key`; empty where all of them are to be timed, None
        where none is used."""
        name = self.chosen.get(key)
        if self.mode != CUDNN or self.without_cudnn or (name is None and not self.open):
            return None
        return "" if name is None else name if name.startswith(CUDNN) else None

    @classmethod
    def begin(cls, mode: str, device: torch.device) -> Choices:
        """Reads those of the disk for `device`, and lets products be timed."""
        assert mode in MODES, mode
        choices = cls(mode, open=mode != "off")
        if mode == CUDNN:
            try:
                cudnn_graphs.version()
            except CudnnError as error:
                choices.without_cudnn = str(error)
        if device.type == "cuda" and mode != "off":
            choices.path = _file(device, mode, choices.without_cudnn)
        if choices.path is not None:
            found = _read(choices.path)
            choices.chosen.update((k, v) for k, v in found.items() if isinstance(v, str))
        return choices

    def settle(self, agreed: Mapping[str, str]) -> bool:
        """From now on `agreed` holds, and no other choice: a run does not depend on what the file has for
        other shapes. Keeps it on disk. Returns whether this process had chosen otherwise."""
        differs = any(agreed.get(key) != name for key, name in self.own().items())
        self.open = False
        self.chosen = dict(agreed)
        if self.path is not None:
            _write(self.path, self.chosen)
            if self.times:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                times = {key: {"at": now, "ms": found} for key, found in self.times.items()}
                _write(_times_file(self.path), times)
        return differs

    def kind(self) -> str:
        """What GPU, versions and mode choices are for; those of another kind may not work here."""
        return self.path.name if self.path is not None else ""

    def choose(
        self, key: str, forms: Mapping[str, Callable[[], object]], device: torch.device,
        then: Callable[[Any], object] | None = None,
    ) -> str:  # fmt: skip
        """The name of the fastest of `forms`, which must have no effect but their result; with what
        `then` does with that result, where later work depends on the form."""
        timing = self.open and device.type == "cuda" and not building.get()
        timing = timing and not torch.cuda.is_current_stream_capturing()
        if timing:
            self.used.add(key)
        found = self.chosen.get(key)
        if found in forms:
            return str(found)
        names = list(forms)
        if self.mode == "on" and names != [SEPARATE]:
            names = [name for name in names if name != SEPARATE]
        if building.get():
            return names[0]
        if not timing:
            return SEPARATE if device.type == "cuda" and SEPARATE in forms else names[0]
        times = self._times(key, {name: forms[name] for name in names}, then)
        if times:
            best = min(times, key=lambda name: times[name])
            self.times[key] = times
            self.timed += 1
        elif SEPARATE in forms:
            best = SEPARATE
        else:
            return names[0]  # raises its error for the product that is made of this one
        self.chosen[key] = best
        return best

    def _times(
        self, key: str, forms: Mapping[str, Callable[[], object]],
        then: Callable[[Any], object] | None,
    ) -> dict[str, float]:  # fmt: skip
        """Milliseconds of those that work; the problems of the others are noted."""
        # Those of cuDNN and torch have nothing to build, and would run.
        _build([forms[name] for name in forms if not name.startswith((SEPARATE, CUDNN))])
        times = {}
        for name, form in forms.items():
            try:
                times[name] = _milliseconds(_followed(form, then))
            except Exception as error:  # compilers raise what they like
                if is_fatal(error):
                    raise
                lines = str(error).splitlines()
                self.problems[f"{key}: {name}"] = lines[0][:200] if lines else type(error).__name__
        return times


def _followed(
    call: Callable[[], object], then: Callable[[Any], object] | None
) -> Callable[[], object]:
    return call if then is None else lambda: then(call())


def _build(calls: Sequence[Callable[[], object]]) -> None:
    """Builds the kernels of all forms of a product by several threads; they are timed one by one.
    Errors are left to the form's own call."""
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
    """Whether it says nothing about the form: the device is lost, or memory is short now."""
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
    """None where there is no home."""
    import triton

    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    names = [torch.cuda.get_device_name(device), torch.__version__, triton.__version__, mode]
    if mode == CUDNN:  # whose numbers of kernels are those of a version
        names.append("none" if without_cudnn else str(cudnn_graphs.version()))
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join((*names, f"v{_VERSION}")))
    return base / "paceline" / "products" / f"{name}.json"


def _times_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}.times.json")


def _read(path: Path) -> dict[str, Any]:
    """What can be read: choices that are lost are made again."""
    try:
        found = parse_json(read_regular(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, added: Mapping[str, object]) -> None:
    """With what other processes have chosen meanwhile. A cache that cannot be written is none."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({**_read(path), **added}, indent=1, sort_keys=True)
        with whole_file(path) as file:
            file.write(text.encode())
