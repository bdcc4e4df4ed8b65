"""Which form of a product is fastest on this device: timed once for each shape, and kept on disk.

A form is timed on the very maps of its first call, so the first pass of a run chooses; it must not be
part of a CUDA graph. Choices are kept in `$XDG_CACHE_HOME/paceline/products` or `~/.cache`, one file
for each kind of GPU and version of torch and Triton, so that later runs choose alike without timing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.core.files import whole_file

SEPARATE = "separate"
MODES = ("auto", "on")
# Calls that are timed together, and how often; the fastest time counts.
_CALLS, _REPEATS = 4, 3
# Cycles of a kernel that waits, so that the host launches all calls before the first one starts.
_WAIT_CYCLES = 3_000_000
_VERSION = 1


@dataclass
class Choices:
    """`mode` is `auto`, which times the separate form too, or `on`, which takes it only where no
    other exists. `times` has the milliseconds of all forms that were timed by this process."""

    mode: str = "auto"
    chosen: dict[str, str] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    timed: int = 0
    path: Path | None = None

    def describe(self) -> str:
        """The number of products and of fused ones."""
        ends = [
            name for key, name in self.chosen.items() if key.startswith(("forward", "backward"))
        ]
        fused = sum(name != SEPARATE for name in ends)
        source = f"{self.timed} timed" if self.timed else "cached"
        return f"{fused} of {len(ends)} kinds of products fused ({source})"


choices = Choices()


def begin(mode: str, device: torch.device) -> None:
    """Forgets all choices and reads those of the disk for `device`."""
    assert mode in MODES, mode
    choices.mode, choices.timed = mode, 0
    choices.chosen, choices.times, choices.problems = {}, {}, {}
    choices.path = _file(device, mode) if device.type == "cuda" else None
    if choices.path is not None:
        choices.chosen.update(_read(choices.path))


def choose(key: str, forms: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """The name of the fastest of `forms`, which must have no effect but their result."""
    found = choices.chosen.get(key)
    if found in forms:
        return str(found)
    names = list(forms)
    if choices.mode == "on" and names != [SEPARATE]:
        names = [name for name in names if name != SEPARATE]
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return names[0]
    times = {}
    for name in names:
        try:
            times[name] = _milliseconds(forms[name])
        except Exception as error:  # compilers raise what they like
            if isinstance(error, torch.AcceleratorError):
                raise
            lines = str(error).splitlines()
            choices.problems[f"{key}: {name}"] = lines[0][:200] if lines else type(error).__name__
    if not times:
        return SEPARATE if SEPARATE in forms else names[0]
    best = min(times, key=lambda name: times[name])
    choices.chosen[key], choices.times[key] = best, times
    choices.timed += 1
    if choices.path is not None:
        _write(choices.path, choices.chosen)
    return best


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


def _file(device: torch.device, mode: str) -> Path | None:
    """None where there is no home."""
    import triton

    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    names = (torch.cuda.get_device_name(device), torch.__version__, triton.__version__, mode)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join((*names, f"v{_VERSION}")))
    return base / "paceline" / "products" / f"{name}.json"


def _read(path: Path) -> dict[str, str]:
    """What can be read: choices that are lost are made again."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, str)}


def _write(path: Path, chosen: Mapping[str, str]) -> None:
    """With what other processes have chosen meanwhile. A cache that cannot be written is none."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({**_read(path), **chosen}, indent=1, sort_keys=True)
        with whole_file(path) as file:
            file.write(text.encode())
