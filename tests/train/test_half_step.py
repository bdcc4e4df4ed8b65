"""The step in half precision: the contracts of `test_step.py`, masters, and the loss scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.settings import CommSettings
from paceline.precision.settings import PrecisionSettings
from paceline.train.step import StepOutcome, TrainStep
from ranks import run_ranks
from train.steps import Made, Net, alone, joined, make_step, same, snapshot, train, weights

# Of the norm of the whole update: gradients are rounded to 11 or 8 bits, here and there alike.
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Powers of two scale without rounding, as long as nothing overflows.
SCALE = PrecisionSettings(loss_scale_init=1024.0)


def made(dtype: str, micro: int = 12, **more: object) -> Made:
    return replace(Made(micro, dtype=dtype, precision=SCALE), **more)  # type: ignore[arg-type]


def start() -> Tensor:
    return weights(make_step(alone()))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Of two trainings from the same start, as a share of the way."""
    return float((ours - theirs).norm() / (theirs - start()).norm())


def _train_on_rank(rank: int, dtype: str, micro: int) -> tuple[Tensor, list[float]]:
    with joined() as group:
        return train(group, made=made(dtype, micro))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("ranks", "micro"), [(2, 6), (3, 2)])
def test_many_ranks_take_the_step_of_one_process(dtype: str, ranks: int, micro: int) -> None:
    whole, losses = train(alone(), made=made(dtype))
    results = run_ranks(ranks, _train_on_rank, dtype, micro)
    for trained, their_losses in results:
        assert torch.equal(trained, results[0][0])
        assert distance(trained, whole) < TOLERANCE[dtype]
        assert their_losses == pytest.approx(losses, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("micro", [1, 4])
def test_micro_steps_equal_one_batch(dtype: str, micro: int) -> None:
    whole, losses = train(alone(), made=made(dtype))
    parts, part_losses = train(alone(), made=made(dtype, micro))
    assert distance(parts, whole) < TOLERANCE[dtype]
    assert part_losses == pytest.approx(losses, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_follows_fp32(dtype: str) -> None:
    full, losses = train(alone())
    half, half_losses = train(alone(), made=made(dtype))
    assert 0 < distance(half, full) < 5 * TOLERANCE[dtype]
    assert half_losses == pytest.approx(losses, rel=TOLERANCE[dtype])


def test_the_loss_scale_leaves_no_trace_in_the_update() -> None:
    one, _ = train(alone(), made=made("fp16"))
    other, _ = train(alone(), made=made("fp16", precision=PrecisionSettings(loss_scale_init=256.0)))
    assert distance(one, other) < 1e-4  # subnormal gradients alone may differ


@pytest.mark.parametrize("dtype", HALF)
def test_weights_are_the_masters_rounded_and_masters_keep_small_steps(dtype: str) -> None:
    step = make_step(alone(), made=made(dtype), norm=True)
    rounded = step.model.conv.weight.clone()
    begin = weights(step)
    step.run(0, 1e-6)
    assert torch.equal(step.model.conv.weight, rounded)
    assert not torch.equal(weights(step), begin)
    step.run(1, 0.1)
    masters = step.update.optimizer.masters()
    for name, master in zip(step.update.names, masters, strict=True):
        parameter = step.model.get_parameter(name)
        assert master.dtype == torch.float32
        matrix = parameter.dim() > 1
        assert parameter.dtype == (HALF[dtype] if matrix else torch.float32)
        assert torch.equal(parameter, master.to(parameter.dtype)), name
        momentum = step.update.optimizer.state[parameter]["momentum_buffer"]
        assert momentum.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF)
def test_masters_are_the_weights_as_they_were_drawn(dtype: str) -> None:
    assert torch.equal(weights(make_step(alone(), made=made(dtype))), start())


def _overflowing(rank: int, micro: int) -> tuple[list[StepOutcome], bool, list[float], Tensor]:
    """Rank 1's own gradients leave fp16's range; its loss stays an ordinary number."""
    with joined() as group:
        step = make_step(group, made=made("fp16", micro), norm=True)
        assert isinstance(step.model, Net)
        outcomes = [step.run(0, 0.1)]
        before, scales = snapshot(step), [float(step.scale.value)]
        step.model.poison = 5000.0 if rank == 1 else 0.0
        outcomes.append(step.run(1, 0.1))
        kept = same(before, snapshot(step))
        scales.append(float(step.scale.value))
        step.model.poison = 0.0
        outcomes.append(step.run(2, 0.1))
        scales.append(float(step.scale.value))
        return outcomes, kept, scales, weights(step)


@pytest.mark.parametrize("micro", [3, 6])
def test_an_overflow_on_one_rank_makes_all_skip_and_halve(micro: int) -> None:
    results = run_ranks(2, _overflowing, micro)
    for outcomes, kept, scales, trained in results:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert all(torch.tensor(outcome.loss).isfinite() for outcome in outcomes)
        assert [outcome.loss_scale for outcome in outcomes] == [1024.0, 1024.0, 512.0]
        assert kept
        assert scales == [1024.0, 512.0, 512.0]
        assert torch.equal(trained, results[0][3])


def _bits(step: TrainStep) -> list[bool]:
    return [bool(p.grad.isfinite().all()) for p in step.model.parameters() if p.grad is not None]


def test_a_gradient_that_only_the_scale_makes_overflow_is_trained_later() -> None:
    """The scale falls step by step until the gradients fit; then training goes on."""
    big = PrecisionSettings(loss_scale_init=2.0**24)
    step = make_step(alone(), made=made("fp16", precision=big, epochs=8))
    outcomes = [step.run(number, 0.01) for number in range(16)]
    skipped = [outcome.skipped for outcome in outcomes]
    assert skipped[0]
    assert not skipped[-1]
    assert 2 <= sum(skipped) <= 14
    assert float(step.scale.value) == 2.0 ** (24 - sum(skipped))
    assert all(_bits(step))


@pytest.mark.parametrize("wire", ["auto", "float16"])
def test_a_short_step_overflows_no_sooner_than_a_full_one(wire: str) -> None:
    """A step over equal samples: what backward and the wire hold is at most what a full step has."""
    comm = CommSettings(wire=wire)
    step = make_step(alone(), made=made("fp16", comm=comm))
    batch = next(step.loader)

    def gradients(samples: int) -> tuple[float, Tensor]:
        step.exchange.begin()
        step.micro.begin(samples, 12)
        images, labels = batch.images[:1], batch.labels[:1]
        step.micro.run(
            images.repeat(samples, 1, 1, 1), labels.repeat(samples), usual=False, last=True
        )
        held = torch.cat([buffer.float() for buffer in step.exchange.gradients])
        return float(held.abs().max()), held / step.scale.step_value

    largest, mean = gradients(12)
    for samples in range(1, 12):
        found, unscaled = gradients(samples)
        assert found <= largest, samples
        assert (unscaled - mean).norm() < 2e-3 * mean.norm(), samples
    assert gradients(12)[0] == largest
    step.exchange.carrier.close()


class Idle(nn.Module):
    """`spare` is used only where `use` says so."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.spare, self.use = Net(), nn.Linear(4, 4), use
        self.never = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.body(images)
        return out + self.spare(out) if self.use else out


def _with_idle(rank: int, dtype: str, anyone: bool) -> tuple[dict[str, Tensor], ...]:
    with joined() as group:
        decay = replace(Made().optim, weight_decay=0.1, decay_bias_norm=True)
        step = make_step(group, model=Idle(anyone and rank == 1), made=made(dtype, 6, optim=decay))
        before = snapshot(step)
        outcomes = [step.run(number, 0.1) for number in range(2)]
        assert not any(outcome.skipped for outcome in outcomes)
        return before, snapshot(step)


@pytest.mark.parametrize("dtype", ["fp32", *HALF])
def test_a_parameter_that_nobody_uses_is_left_alone_decay_included(dtype: str) -> None:
    for before, after in run_ranks(2, _with_idle, dtype, False):
        for name, value in before.items():
            if "spare" in name or "never" in name:
                assert torch.equal(after[name], value), name
        assert not torch.equal(before["model body.fc.weight"], after["model body.fc.weight"])


@pytest.mark.parametrize("dtype", ["fp32", *HALF])
def test_a_parameter_that_one_rank_uses_is_trained_alike_on_all(dtype: str) -> None:
    results = run_ranks(2, _with_idle, dtype, True)
    for before, after in results:
        assert not torch.equal(before["model spare.weight"], after["model spare.weight"])
        assert torch.equal(before["model never.weight"], after["model never.weight"])
        assert torch.equal(after["masters"], results[0][1]["masters"])
