"""Runs `paceline train` on this rank and writes the modules that executed during a few training steps.

    python traced_step.py OUTPUT.json train ...

Tracing covers all threads, because the input pipeline and the communication thread run beside the step.
The profile function is installed before any of these threads starts, but after the imports, whose calls
would take most of the time; it records only between two steps of the loop.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import paceline

ROOT = Path(paceline.__file__).parent
FIRST, LAST = 3, 6  # steps; the first ones also build what later ones reuse


def main() -> None:
    output, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    prefix, found = f"{ROOT}{os.sep}", set()
    on = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if on and event == "call" and frame.f_code.co_filename.startswith(prefix):
            found.add(frame.f_code.co_filename)

    from paceline.cli.app import main as command
    from paceline.train.step import TrainStep

    launch, calls = TrainStep.launch, 0

    def counted(step: TrainStep, *args: Any, **kwargs: Any) -> Any:
        nonlocal on, calls
        calls += 1
        on = FIRST <= calls < LAST
        sys.setprofile(profile if on else None)  # of this thread; others have it from their start
        return launch(step, *args, **kwargs)

    TrainStep.launch = counted  # type: ignore[method-assign]
    threading.setprofile(profile)
    try:
        command()  # exits
    finally:
        modules = sorted(Path(name).relative_to(ROOT).as_posix() for name in found)
        output.write_text(json.dumps({"modules": modules, "steps": calls}))


if __name__ == "__main__":
    main()
