"""One rank of a training that takes its time over its first evaluation, and says when it is in it.

Arguments: a folder for a file from each rank, then those of `paceline`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import faults
from paceline.cli.app import main


def evaluates(folder: Path) -> None:
    (folder / f"evaluates-{os.environ['RANK']}").touch()
    time.sleep(2)


if __name__ == "__main__":
    place = Path(sys.argv.pop(1))
    faults.at_evaluation(1, lambda: evaluates(place))
    main()
