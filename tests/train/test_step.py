"""Numeric contracts 1 and 5: the averaged gradient is that of the union, and NaN skips everywhere."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.gradient_exchange import Signals
from paceline.comm.group import Group
from paceline.core.errors import PacelineError
from paceline.precision.settings import PrecisionSettings
from paceline.train.step import StepOutcome
from ranks import run_ranks
from train.steps import Made, Net, alone, joined, make_step, same, snapshot, train, weights


def _train_on_rank(rank: int, micro: int, dropout: float) -> tuple[Tensor, list[float]]:
    with joined() as group:
        return train(group, micro, dropout=dropout)


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


def _short_step(rank: int, micro: int, dtype: str) -> tuple[float, list[Tensor]]:
    """The plan's last step, 5 samples where others have 12, from the initial weights."""
    with joined() as group:
        return _run_short_step(group, micro, dtype)


def _run_short_step(group: Group, micro: int, dtype: str) -> tuple[float, list[Tensor]]:
    precision = PrecisionSettings(loss_scale_init=1024.0)
    step = make_step(group, made=Made(micro, dtype=dtype, precision=precision))
    for number in range(2):
        for _ in step.plan.micro_batches(number, group.rank):
            next(step.loader)
    outcome = step.run(2, 0.1)
    assert not outcome.skipped
    return outcome.loss, [master.detach().clone() for master in step.update.optimizer.masters()]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 12), (1, 2), (2, 3), (3, 4)])
def test_a_short_step_takes_the_mean_over_its_own_samples(
    ranks: int, micro: int, dtype: str, tolerance: float
) -> None:
    """Loss and update are those of the mean over 5 samples, whatever a full step has."""
    step = make_step(alone(), 12)
    batch = [next(step.loader) for _ in range(3)][-1]
    assert len(batch.labels) == 5
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)(
        step.model(step.normalize(batch.images, "cpu")), batch.labels
    )
    loss.backward()
    if ranks == 1:
        results = [_run_short_step(alone(), micro, dtype)]
    else:
        results = run_ranks(ranks, _short_step, micro, dtype)
    parameters = [p for group in step.update.optimizer.param_groups for p in group["params"]]
    for ours, masters in results:
        assert ours == pytest.approx(loss.item(), rel=tolerance)
        for master, parameter in zip(masters, parameters, strict=True):
            moved = (master - parameter.detach()) / -0.1
            assert (moved - parameter.grad).norm() < tolerance * parameter.grad.norm()


def _poisoned(rank: int, value: float) -> tuple[list[StepOutcome], bool, Tensor]:
    with joined() as group:
        step = make_step(group, 6, norm=True)
        model = step.model
        assert isinstance(model, Net)
        first = step.run(0, 0.1)
        before = snapshot(step)
        model.poison = value if rank == 1 else 0.0
        second = step.run(1, 0.1)
        kept = same(before, snapshot(step))
        model.poison = 0.0
        third = step.run(2, 0.1)
        return [first, second, third], kept, weights(step)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(value: float) -> None:
    results = run_ranks(2, _poisoned, value)
    for outcomes, kept, trained in results:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert all(outcome.done for outcome in outcomes)
        assert kept
        assert trained.isfinite().all()
        assert torch.equal(trained, results[0][2])


def _signalled(rank: int, when: str) -> tuple[bool, str, bool]:
    with joined() as group:
        step = make_step(group, 3, norm=True)
        before = snapshot(step)
        if rank == 1 and when == "at the start":
            step.stop.received = signal.SIGTERM
        elif rank == 1 and when == "between micro-batches":
            compute = step.micro.run

            def last(*batch: Tensor, **how: Any) -> None:
                compute(*batch, **how)
                step.stop.received = signal.SIGTERM

            step.micro.run = last  # type: ignore[assignment, method-assign]
        elif rank == 1:  # after the last micro-batch of the step, before the exchange
            exchange = step.exchange.reduce

            def late(loss: Tensor, signals: Signals) -> None:
                step.stop.received = signal.SIGINT
                exchange(loss, replace(signals, interrupt=1.0))

            step.exchange.reduce = late  # type: ignore[method-assign]
        outcome = step.run(0, 0.1)
        assert outcome.stop is not None
        return outcome.done, outcome.stop.name, same(before, snapshot(step))


@pytest.mark.parametrize("when", ["at the start", "between micro-batches"])
def test_a_signal_on_one_rank_abandons_the_step_on_all_without_a_trace(when: str) -> None:
    assert run_ranks(2, _signalled, when) == [(False, "SIGTERM", True)] * 2


def test_a_signal_after_the_work_completes_the_step_first() -> None:
    assert run_ranks(2, _signalled, "late") == [(True, "SIGINT", False)] * 2


def _heard_early(rank: int) -> tuple[list[tuple[bool, str]], bool]:
    """Rank 1 is asked to stop in step 1; rank 0 hears of it while it still works on step 0."""
    with joined() as group:
        step = make_step(group, 6, norm=True)
        before, found = snapshot(step), []
        if rank == 0:
            group._stop_heard = True
        for number in range(2):
            if rank == 1 and number == 1:
                step.stop.received = signal.SIGTERM
            outcome = step.run(number, 0.1)
            found.append((outcome.done, outcome.stop.name if outcome.stop else "none"))
        return found, same(before, snapshot(step))


def test_weights_halt_with_the_first_rank_that_gives_up() -> None:
    assert run_ranks(2, _heard_early) == [([(False, "none"), (False, "SIGTERM")], True)] * 2


def _given_up(rank: int) -> tuple[list[bool], bool]:
    """Rank 1 gives up in step 1; the short step 2 has nothing for it to give up."""
    with joined() as group:
        step = make_step(group, 6, norm=True)
        assert step.plan.micro_batches(2, 1) == []
        done = [step.run(0, 0.1).done]
        before = snapshot(step)
        if rank == 1:
            step.stop.received = signal.SIGTERM
        done += [step.run(number, 0.1).done for number in (1, 2)]
        return done, same(before, snapshot(step))


def test_weights_stay_halted_for_good() -> None:
    assert run_ranks(2, _given_up) == [([True, False, False], True)] * 2


def _faulty(rank: int, kind: str) -> tuple[str, bool]:
    with joined() as group:
        step = make_step(group, 6, norm=True)
        before = snapshot(step)
        if rank == 1 and kind == "between steps":
            step.fault = PacelineError("the disk is full", "free some")
        elif rank == 1:

            def forward(images: Tensor) -> Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory")

            step.model.forward = forward  # type: ignore[method-assign]
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        return str(caught.value), same(before, snapshot(step))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("between steps", "rank 1: the disk is full; free some"),
        ("memory", "rank 1: out of memory at step 1 with a batch size of 6 a process"),
    ],
)
def test_an_error_on_one_rank_ends_the_step_on_all_with_its_words(kind: str, words: str) -> None:
    (text, kept), (other, kept_there) = run_ranks(2, _faulty, kind)
    assert text == other
    assert words in text
    assert kept
    assert kept_there


def test_a_single_value_for_batch_norm_is_told_in_words() -> None:
    step = make_step(alone(), 12)

    def forward(images: Tensor) -> Tensor:
        return nn.BatchNorm2d(1)(images[:1, :, :1, :1]).flatten(1)  # type: ignore[no-any-return]

    step.model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(
        PacelineError, match="one sample at step 1 leaves batch norm a single value"
    ):
        step.run(0, 0.1)
