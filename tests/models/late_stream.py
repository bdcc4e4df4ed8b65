"""A second stream for tests without a GPU: gradients on it are NaN until someone has waited for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.models.weight_stream import WeightStream


class NotedSide:
    """Computes at once, and notes what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks = 0
        # Gradients under way with their values, by mark.
        self.late: dict[int, tuple[Tensor, Tensor]] = {}

    def serves(self, x: Tensor) -> bool:
        return True

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.log.append("fork")
        yield

    def mark(self) -> int:
        self.marks += 1
        self.log.append(f"mark {self.marks}")
        return self.marks

    def wait(self, mark: int) -> None:
        self.log.append(f"wait {mark}")
        for number in [each for each in self.late if each <= mark]:
            place, values = self.late.pop(number)
            place.copy_(values)


class LateStream(WeightStream):
    def __init__(self) -> None:
        self.noted = NotedSide()
        super().__init__(self.noted)

    def launch(self, weight: Tensor, compute: Callable[[], Tensor], *uses: Tensor) -> Tensor:
        def late() -> Tensor:
            found = compute()
            # Not `found` itself: autograd would copy a gradient that someone else refers to.
            self.noted.late[self.noted.marks + 1] = (found.detach(), found.clone())
            return found.fill_(torch.nan)

        return super().launch(weight, late, *uses)
