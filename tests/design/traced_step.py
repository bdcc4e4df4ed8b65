"""`install(output)` writes the modules that execute during a few training steps of this process.

Tracing covers all threads, because input pipeline and communication thread run in parallel.
The profile function is installed before any of these threads starts; it records only between two steps
of the loop.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

FIRST, LAST = 3, 6  # steps; the first ones also build what later ones reuse


def install(output: Path) -> None:
    import paceline
    from paceline.train.step import TrainStep

    root = Path(paceline.__file__).parent
    prefix, found = f"{root}{os.sep}", set()
    on = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if on and event == "call" and frame.f_code.co_filename.startswith(prefix):
            found.add(frame.f_code.co_filename)

    launch, calls = TrainStep.launch, 0

    def counted(step: TrainStep, *args: Any, **kwargs: Any) -> Any:
        nonlocal on, calls
        calls += 1
        on = FIRST <= calls < LAST
        sys.setprofile(profile if on else None)  # of this thread; others have it from their start
        return launch(step, *args, **kwargs)

    def write() -> None:
        modules = sorted(Path(name).relative_to(root).as_posix() for name in found)
        output.write_text(json.dumps({"modules": modules, "steps": calls}))

    TrainStep.launch = counted  # type: ignore[method-assign]
    threading.setprofile(profile)
    atexit.register(write)
