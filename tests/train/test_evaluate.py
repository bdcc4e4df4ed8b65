from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import DataError, PacelineError
from paceline.core.topology import Topology
from paceline.data.batch import Batch
from paceline.data.corrupt import CorruptSample
from paceline.data.normalize import Normalizer
from paceline.precision.policy import Policy
from paceline.train.evaluate import EvalResult, evaluate
from paceline.train.stop_signals import StopSignals
from ranks import run_ranks

NORMALIZE = Normalizer((0.0,), (1.0,), 1)
FULL = Policy("fp32", torch.float32, torch.device("cpu"))


class Reader(nn.Module):
    """Reads its answer off the image: pixel k holds the score of class k."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :8] * 20


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


def alone() -> Group:
    return Group(Topology(), CommSettings(), torch.device("cpu"))


def _part(rank: int, size: int) -> tuple[float, float, float, int]:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        found = evaluate(Reader(), batches(rank, 35, size), NORMALIZE, FULL, group, StopSignals())
        assert isinstance(found, EvalResult)
        return found.top1, found.top5, found.loss, found.samples
    finally:
        group.close()


def test_counts_are_exact_however_many_ranks_share_them() -> None:
    found = evaluate(Reader(), batches(0, 35), NORMALIZE, FULL, alone(), StopSignals())
    assert isinstance(found, EvalResult)
    assert found.samples == 35
    assert found.top1 == 100 * 12 / 35
    assert found.top5 == 100 * 24 / 35
    for size in (2, 3):
        for top1, top5, loss, samples in run_ranks(size, _part, size):
            assert (top1, top5, samples) == (found.top1, found.top5, 35)
            assert loss == pytest.approx(found.loss, rel=1e-6)


def test_the_model_trains_on_afterwards() -> None:
    model = Reader()
    evaluate(model, batches(0, 3), NORMALIZE, FULL, alone(), StopSignals())
    assert model.training


def _stopped(rank: int) -> str:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        stop = StopSignals()
        if rank == 1:
            stop.received = signal.SIGTERM
        found = evaluate(Reader(), batches(0, 9), NORMALIZE, FULL, group, stop)
        assert isinstance(found, signal.Signals)
        return found.name
    finally:
        group.close()


def test_a_signal_on_one_rank_ends_it_on_all() -> None:
    assert run_ranks(2, _stopped) == ["SIGTERM", "SIGTERM"]


def _broken(rank: int) -> str:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:

        def stream():  # type: ignore[no-untyped-def]
            yield from batches(0, 2)
            if rank == 1:
                raise DataError("the shard is gone", "bring it back")

        with pytest.raises(PacelineError) as caught:
            evaluate(Reader(), stream(), NORMALIZE, FULL, group, StopSignals())
        return str(caught.value)
    finally:
        group.close()


def test_data_that_vanishes_on_one_rank_fails_all_with_its_words() -> None:
    assert run_ranks(2, _broken) == ["rank 1: the shard is gone; bring it back"] * 2


def test_no_image_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no validation image"):
        evaluate(Reader(), [], NORMALIZE, FULL, alone(), StopSignals())


def _corrupt_everywhere(rank: int, limit: int) -> str:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        bad = CorruptSample(rank, f"image {rank}", "cut short")
        some = [Batch(b.images, b.labels, (bad,)) for b in batches(0, 1)] + batches(1, 4)
        try:
            found = evaluate(Reader(), some, NORMALIZE, FULL, group, StopSignals(), limit)
        except DataError as error:
            return str(error)
        assert isinstance(found, EvalResult)
        return f"{found.corrupt_count} corrupt"
    finally:
        group.close()


def test_the_share_of_corrupt_images_is_that_of_all_ranks_together() -> None:
    assert run_ranks(2, _corrupt_everywhere, 2) == ["2 corrupt"] * 2
    for text in run_ranks(2, _corrupt_everywhere, 1):
        assert text.startswith("2 corrupt validation images, more than")
