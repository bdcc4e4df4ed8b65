"""Numeric contracts 1 and 5: the averaged gradient is that of the union, and NaN skips everywhere."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import PacelineError
from paceline.core.topology import Topology
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import TrainLoader
from paceline.data.normalize import Normalizer
from paceline.data.settings import DataSettings
from paceline.data.source import open_source
from paceline.train.batch_norm import BatchNormState
from paceline.train.step import StepOutcome, TrainStep
from paceline.train.stop_signals import StopSignals
from ranks import run_ranks

DATA = DataSettings(
    source="synthetic", synthetic_samples=29, synthetic_classes=4, image_size=12, channels=1,
    mean=(0.5,), std=(0.25,), eval_resize=0, augment="none", workers=0,
)  # fmt: skip


class Net(nn.Module):
    """Without batch norm, which contract 1 leaves apart; with dropout where asked for."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(400, 4)
        self.poison = 0.0

    def forward(self, images: Tensor) -> Tensor:
        out = self.fc(self.drop(self.norm(self.conv(images)).relu().flatten(1)))
        return out * (1 + self.poison)  # type: ignore[no-any-return]


def make_step(group: Group, micro: int, batch: int = 12, **net: float) -> TrainStep:
    torch.manual_seed(3)
    model = Net(**net).to(group.device)  # type: ignore[arg-type]
    plan = BatchPlan(29, 1, batch, micro, group.world_size)
    loader = TrainLoader(open_source(DATA, "train"), plan, DATA, seed=5, rank=group.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainStep(
        model, optimizer, GradientExchange(model.named_parameters(), group), BatchNormState(model),
        loader, Normalizer(DATA.mean, DATA.std, 1), plan, group, StopSignals(), 0.1, 5,
    )  # fmt: skip


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(group: Group, micro: int, **net: float) -> tuple[Tensor, list[float]]:
    """All steps of one epoch of 29 samples in batches of 12: 12, 12, and a short one of 5."""
    step = make_step(group, micro, **net)
    losses = [step.run(number, 0.1).loss for number in range(step.plan.total_steps)]
    return weights(step.model), losses


def _train_on_rank(rank: int, micro: int, dropout: float) -> tuple[Tensor, list[float]]:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        return train(group, micro, dropout=dropout)
    finally:
        group.close()


def alone() -> Group:
    return Group(Topology(), CommSettings(), torch.device("cpu"))


@pytest.mark.parametrize(("ranks", "micro"), [(2, 6), (2, 3), (3, 4), (3, 2)])
def test_many_ranks_take_the_step_of_one_process_on_the_union(ranks: int, micro: int) -> None:
    whole, losses = train(alone(), 12)
    results = run_ranks(ranks, _train_on_rank, micro, 0.0)
    for trained, their_losses in results:
        assert torch.equal(trained, results[0][0])
        torch.testing.assert_close(trained, whole, rtol=1e-5, atol=1e-6)
        assert their_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 3, 4, 6])
def test_accumulation_equals_one_large_batch(micro: int) -> None:
    whole, losses = train(alone(), 12)
    parts, part_losses = train(alone(), micro)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert part_losses == pytest.approx(losses, rel=1e-5)


def test_dropout_follows_the_micro_batch_and_not_the_rank() -> None:
    one, _ = train(alone(), 3, dropout=0.5)
    other, _ = train(alone(), 12, dropout=0.5)
    assert not torch.allclose(one, other)  # dropout is really on
    for trained, _ in run_ranks(2, _train_on_rank, 3, 0.5):
        torch.testing.assert_close(trained, one, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    step = make_step(alone(), 12)
    reference = Net()
    reference.load_state_dict(step.model.state_dict())
    batch = next(make_step(alone(), 12).loader)
    images = step.normalize(batch.images, "cpu")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    criterion(reference(images), batch.labels).backward()
    step.run(0, 0.1)
    for ours, theirs in zip(step.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def _poisoned(rank: int, value: float) -> tuple[list[StepOutcome], bool, bool, Tensor]:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        step = make_step(group, 6, norm=True)
        model = step.model
        assert isinstance(model, Net)
        first = step.run(0, 0.1)
        before, statistics = weights(model), step.batch_norm.flat.clone()
        model.poison = value if rank == 1 else 0.0
        second = step.run(1, 0.1)
        same = torch.equal(weights(model), before)
        kept = torch.equal(step.batch_norm.flat, statistics)
        model.poison = 0.0
        third = step.run(2, 0.1)
        return [first, second, third], same, kept, weights(model)
    finally:
        group.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(value: float) -> None:
    results = run_ranks(2, _poisoned, value)
    for outcomes, same, kept, trained in results:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert all(outcome.done for outcome in outcomes)
        assert same
        assert kept
        assert trained.isfinite().all()
        assert torch.equal(trained, results[0][3])


def _signalled(rank: int, at_start: bool) -> tuple[bool, str, bool, bool]:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        step = make_step(group, 3, norm=True)
        before, statistics = weights(step.model), step.batch_norm.flat.clone()
        if rank == 1 and at_start:
            step.stop.received = signal.SIGTERM
        elif rank == 1:  # after the last micro-batch of the step, before the exchange
            exchange = step.exchange.reduce

            def late(signals):  # type: ignore[no-untyped-def]
                step.stop.received = signal.SIGINT
                signals.interrupt = 1.0
                return exchange(signals)

            step.exchange.reduce = late  # type: ignore[method-assign]
        outcome = step.run(0, 0.1)
        assert outcome.stop is not None
        return (
            outcome.done,
            outcome.stop.name,
            torch.equal(weights(step.model), before),
            torch.equal(step.batch_norm.flat, statistics),
        )
    finally:
        group.close()


def test_a_signal_on_one_rank_abandons_the_step_on_all_without_a_trace() -> None:
    assert run_ranks(2, _signalled, True) == [(False, "SIGTERM", True, True)] * 2


def test_a_signal_after_the_work_completes_the_step_first() -> None:
    assert run_ranks(2, _signalled, False) == [(True, "SIGINT", False, False)] * 2


def _faulty(rank: int, kind: str) -> str:
    group = Group(Topology.from_env(os.environ), CommSettings(), torch.device("cpu"))
    try:
        step = make_step(group, 6)
        if rank == 1 and kind == "between steps":
            step.fault = PacelineError("the disk is full", "free some")
        elif rank == 1:

            def forward(images: Tensor) -> Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory")

            step.model.forward = forward  # type: ignore[method-assign]
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        return str(caught.value)
    finally:
        group.close()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("between steps", "rank 1: the disk is full; free some"),
        ("memory", "rank 1: out of memory at step 0 with a batch size of 6 a process"),
    ],
)
def test_an_error_on_one_rank_ends_the_step_on_all_with_its_words(kind: str, words: str) -> None:
    texts = run_ranks(2, _faulty, kind)
    assert texts[0] == texts[1]
    assert words in texts[0]


def test_a_single_value_for_batch_norm_is_told_in_words() -> None:
    step = make_step(alone(), 12)

    def forward(images: Tensor) -> Tensor:
        return nn.BatchNorm2d(1)(images[:1, :, :1, :1]).flatten(1)  # type: ignore[no-any-return]

    step.model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(
        PacelineError, match="one sample at step 0 leaves batch norm a single value"
    ):
        step.run(0, 0.1)
