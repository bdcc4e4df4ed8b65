"""The checkpoints of one run: `step-00001200.pt`, and `best.pt`.

In: checkpoints as they are made. Out: the last k and the best stay; the newest is found again. A file
is removed only after a newer one is safely in its place.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.core.whole_file import LEFTOVERS
from paceline.train.atomic_file import link_atomically
from paceline.train.checkpoint import Checkpoint

_NAME = re.compile(r"step-(\d+)\.pt")


class CheckpointShelf:
    """The folder `RUN/checkpoints`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    @property
    def best(self) -> Path:
        return self.folder / "best.pt"

    def steps(self) -> list[int]:
        """Steps that are saved here, in rising order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def put(self, checkpoint: Checkpoint, *, best: bool, forget: bool = True) -> Path:
        """Writes, then, if `forget`, the oldest go. Half-written files of a killed process go too."""
        path = self.path(checkpoint.step)
        try:
            self._write(checkpoint, path, best=best)
        except CheckpointError as error:
            last = self.newest()
            kept = (
                f"{error.remedy}; the last good checkpoint, {last.name}, is untouched"
                if last
                else ""
            )
            raise CheckpointError(error.cause, kept or error.remedy) from error
        # A run that went back to an older checkpoint has left the later ones for good: they must not be
        # taken for its newest. Kept under another name, because somebody may still want them.
        for step in [step for step in self.steps() if step > checkpoint.step]:
            self.path(step).replace(self.path(step).with_suffix(".pt.abandoned"))
        for step in self.steps()[: -self._keep] if forget else ():
            self.path(step).unlink(missing_ok=True)
        for leftover in self.folder.glob(LEFTOVERS):
            leftover.unlink(missing_ok=True)
        return path

    def _write(self, checkpoint: Checkpoint, path: Path, *, best: bool) -> None:
        if best:
            # The best comes first: killed in between, a resumed run does the step again and finds it
            # best again. The other way round it would go on and never make up for the missing link.
            checkpoint.write(self.best)
            link_atomically(self.best, path)
        else:
            checkpoint.write(path)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the best (else the newest) of a run folder."""
    if not path.is_dir():
        return path
    shelf = CheckpointShelf(path / "checkpoints", 1)
    found = shelf.best if shelf.best.is_file() else shelf.newest()
    if found is None:
        raise CheckpointError(f"no checkpoint in {shelf.folder}", "give a run folder or a .pt file")
    return found
