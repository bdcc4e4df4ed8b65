"""Where a rank is, by the names of `model.POINTS`: calls a function at each point of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.comm import generations
from paceline.comm.exchange import GradientExchange
from paceline.train import recovery
from paceline.train import run as training_run
from paceline.train.micro_step import GradientSource

At = Callable[[str, int], bool]


def watch(at: At, trained: Callable[[int, int, bytes], None]) -> None:
    """Patches the program for the rest of this process.

    Args:
        at: Is called with a point and the number of the generation. If it returns True at "reduced",
            the exchange fails on this rank, because of a loss.
        trained: Is called for each micro-batch that is about to be computed, with the step, the number
            of the micro-batch in the step, and its images and labels.
    """
    generation = 0

    def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
        real = getattr(owner, name)

        def patched(*given: Any, **named: Any) -> Any:
            if before:
                at(before, generation)
            result = real(*given, **named)
            if after:
                at(after, generation)
            return result

        setattr(owner, name, patched)

    around(GradientExchange, "begin", before="computing")
    around(GradientExchange, "_send", after="reducing")
    around(training_run, "recover", before="noticed")
    around(generations.Generations, "_next", after="agreed")
    around(generations, "came", before="regrouping")
    around(training_run, "_conclude", before="finishing")
    equalize, catch_up = recovery._equalize, recovery._catch_up
    reduce, add = GradientExchange.reduce, GradientSource.add

    def reduce_(self: GradientExchange, *given: Any) -> None:
        reduce(self, *given)
        if at("reduced", generation):
            loss = self.group._loss()
            if loss is not None:
                raise loss

    def equalize_(training: Any, loop: Any) -> bool:
        nonlocal generation
        generation = training.group.generation.number
        at("regrouped", generation)
        return equalize(training, loop)

    def catch_up_(training: Any, loop: Any, source: int, *, is_behind: bool) -> None:
        if training.group.rank == source:
            at("serving", generation)
        if is_behind:
            at("catching up", generation)
        catch_up(training, loop, source, is_behind=is_behind)

    def add_(self: Any, step: Any, number: int, batch: Any, part: Any, mix: Any) -> None:
        trained(
            number, part.number, batch.images.numpy().tobytes() + batch.labels.numpy().tobytes()
        )
        add(self, step, number, batch, part, mix)

    recovery._equalize, recovery._catch_up = equalize_, catch_up_
    GradientExchange.reduce, GradientSource.add = reduce_, add_  # type: ignore[method-assign]
