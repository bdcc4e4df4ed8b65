from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.core.errors import DataError, PacelineError
from paceline.data import Batch, CorruptSample, Normalizer
from paceline.precision import Policy
from paceline.train import StopSignals
from paceline.train.evaluate import evaluate
from paceline.train.loss import OwnLoss
from ranks import run_ranks
from train.steps import alone, joined

NORMALIZE = Normalizer((0.0,), (1.0,), 1)
FULL = Policy("fp32", torch.float32, torch.device("cpu"))


class Reader(nn.Module):
    """Reads its answer off the image: pixel k holds the score of class k."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :8] * 20


def scored(model: nn.Module, given: Iterable[Batch], group: Group, **more: Any) -> Any:
    return evaluate(model, given, NORMALIZE, FULL, group, more.pop("stop", StopSignals()), **more)


def batches(start: int, stop: int, step: int = 1) -> list[Batch]:
    """Sample n has label n % 8; a third of them is answered right, a third only in the top five."""
    made = []
    for n in range(start, stop, step):
        image = torch.zeros(1, 3, 3, 1, dtype=torch.uint8)
        flat = image.view(-1)
        flat[:8] = torch.arange(8, dtype=torch.uint8)
        flat[n % 8] = {0: 200, 1: 100, 2: 0}[n % 3]
        if n % 3:
            flat[(n + 1) % 8] = 150
        if n % 3 == 2:
            for other in range(2, 8):
                flat[(n + other) % 8] = 50 + other
        made.append(Batch(image, torch.tensor([n % 8])))
    return made


def _part(rank: int, size: int) -> tuple[float, float, float, int]:
    with joined() as group:
        found = scored(Reader(), batches(rank, 35, size), group)
        return found.top1, found.top5, found.loss, found.samples


def test_counts_are_exact_on_any_number_of_ranks() -> None:
    model = Reader()
    found = scored(model, batches(0, 35), alone())
    assert model.training
    assert (found.samples, found.top1, found.top5) == (35, 100 * 12 / 35, 100 * 24 / 35)
    for size in (2, 3):
        for top1, top5, loss, samples in run_ranks(size, _part, size):
            assert (top1, top5, samples) == (found.top1, found.top5, 35)
            assert loss == pytest.approx(found.loss, rel=1e-6)


def test_a_mirror_image_counts_as_much_as_the_image() -> None:
    """The reader looks at the left half of an image: alone it sees one of the two patterns only."""

    class LeftHalf(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images[:, 0, 0, :2] * torch.tensor([1.0, 3.0])

    image = torch.tensor([4, 1, 2, 0], dtype=torch.uint8).view(1, 1, 4, 1)
    given = [Batch(image, torch.tensor([1]))]
    found = {}
    for flip in (False, True):
        found[flip] = scored(LeftHalf(), given, alone(), flip=flip)
    # Logits 4 and 3 of the image, 0 and 6 of its mirror image; bytes become shares of 255.
    assert (found[False].top1, found[True].top1) == (0.0, 100.0)
    logits = torch.tensor([[4.0 + 0.0, 3.0 + 6.0]]) / 255 / 2
    loss = nn.functional.cross_entropy(logits, torch.tensor([1]))
    assert found[True].loss == pytest.approx(loss.item(), rel=1e-5)
    # A loss of all outputs is the mean of both.
    own = OwnLoss(lambda outputs, targets: outputs[:, 0].square(), "own")
    result = scored(LeftHalf(), given, alone(), flip=True, loss_function=own)
    assert result.loss == pytest.approx((4 / 255) ** 2 / 2, rel=1e-5)


def _stopped(rank: int) -> str:
    stop = StopSignals()
    if rank == 1:
        stop.received = signal.SIGTERM
    with joined() as group:
        return str(scored(Reader(), batches(0, 9), group, stop=stop).name)


def test_a_signal_on_one_rank_ends_it_on_all() -> None:
    assert run_ranks(2, _stopped) == ["SIGTERM", "SIGTERM"]


def _broken(rank: int) -> str:
    def stream() -> Iterator[Batch]:
        yield from batches(0, 2)
        if rank == 1:
            raise DataError("the shard is gone", "bring it back")

    with joined() as group, pytest.raises(PacelineError) as caught:
        scored(Reader(), stream(), group)
    return str(caught.value)


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    assert run_ranks(2, _broken) == ["rank 1: the shard is gone; bring it back"] * 2


def _corrupt(rank: int, limit: int) -> int | str:
    bad = CorruptSample(rank, f"image {rank}", "cut short")
    some = [Batch(b.images, b.labels, (bad,)) for b in batches(0, 1)] + batches(1, 4)
    with joined() as group:
        try:
            return scored(Reader(), some, group, corrupt_limit=limit).corrupt_count
        except DataError:
            return "refused"


def test_the_limit_of_corrupt_images_is_that_of_all_ranks_together() -> None:
    assert run_ranks(2, _corrupt, 2) == [2, 2]
    assert run_ranks(2, _corrupt, 1) == ["refused"] * 2
    with pytest.raises(DataError, match="no validation image"):
        scored(Reader(), [], alone())
