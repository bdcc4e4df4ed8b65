"""The checkpoints of one run: `step-00001200.pt`, and `best.pt`.

In: checkpoints as they are made. Out: the last k and the best stay; the newest is found again. A file
is removed only after a newer one is safely in its place. `step-00001207.salvaged.pt` is what one rank
saved alone after another was lost; it counts only where no regular checkpoint is as new.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.core.whole_file import LEFTOVERS
from paceline.train.atomic_file import link_atomically
from paceline.train.checkpoint import Checkpoint

_NAME = re.compile(r"step-(\d+)\.pt")
_SALVAGED_NAME = re.compile(r"step-(\d+)\.salvaged\.pt")


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

    def salvaged_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.salvaged.pt"

    def steps(self) -> list[int]:
        """Steps that are saved here, in rising order."""
        return self._matching(_NAME)

    def salvaged_steps(self) -> list[int]:
        """Steps of salvaged checkpoints, in rising order."""
        return self._matching(_SALVAGED_NAME)

    def _matching(self, name: re.Pattern[str]) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (name.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def candidates(self, *, salvaged: bool) -> list[Path]:
        """What a run may go on from, the newest first; of one step, a regular checkpoint before a
        salvaged one; the best one last, as its step is not in its name."""
        known = [(step, 1, self.path(step)) for step in self.steps()]
        if salvaged:
            known += [(step, 0, self.salvaged_path(step)) for step in self.salvaged_steps()]
        newest_first = [path for _, _, path in sorted(known, reverse=True)]
        return newest_first + [self.best] * self.best.is_file()

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
        try:
            self._tidy(checkpoint.step, forget=forget)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be tidied after the save of {path.name}: {error.strerror}",
                "make it writable again, then --resume auto",
            ) from error
        return path

    def _tidy(self, newest: int, *, forget: bool) -> None:
        # A run that went back to an older checkpoint has left the later ones for good: they must not be
        # taken for its newest. Kept under another name, because somebody may still want them.
        later = [self.path(step) for step in self.steps() if step > newest]
        salvaged = [(step, self.salvaged_path(step)) for step in self.salvaged_steps()]
        for file in later + [file for step, file in salvaged if step > newest]:
            set_aside(file, "abandoned")
        if forget:
            for step in self.steps()[: -self._keep]:
                self.path(step).unlink(missing_ok=True)
            for step, file in salvaged:
                if step <= newest:
                    file.unlink(missing_ok=True)
        for leftover in self.folder.glob(LEFTOVERS):
            leftover.unlink(missing_ok=True)

    def _write(self, checkpoint: Checkpoint, path: Path, *, best: bool) -> None:
        if best:
            # The best comes first: killed in between, a resumed run does the step again and finds it
            # best again. The other way round it would go on and never make up for the missing link.
            checkpoint.write(self.best)
            link_atomically(self.best, path)
        else:
            checkpoint.write(path)


def set_aside(file: Path, reason: str) -> Path:
    """Renames `file` so that it is no checkpoint any more: `step-00000006.pt.damaged`. A file that has
    that name already stays."""
    number, place = 1, file.with_name(f"{file.name}.{reason}")
    while place.exists():
        number += 1
        place = file.with_name(f"{file.name}.{reason}-{number}")
    return file.replace(place)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the best (else the newest) of a run folder."""
    if not path.is_dir():
        return path
    shelf = CheckpointShelf(path / "checkpoints", 1)
    found = shelf.best if shelf.best.is_file() else shelf.newest()
    if found is None:
        raise CheckpointError(f"no checkpoint in {shelf.folder}", "give a run folder or a .pt file")
    return found
