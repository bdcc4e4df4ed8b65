"""Numeric contract 1, in every number format: the averaged gradient is that of the union of batches.

Also of a short last step, with masters in fp32 and a loss scale.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import CommSettings, Group
from paceline.data import CorruptSample
from paceline.precision.settings import PrecisionSettings
from paceline.train.weights import master_weights
from paceline.tune.step import StepRow
from paceline.tune.step import build_step as build
from ranks import run_ranks
from train.steps import OPTIM, Made, alone, joined, make_step, train, weights

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Of the norm of the whole update: gradients are rounded to 11 or 8 bits.
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
# Powers of two scale without rounding, as long as nothing overflows.
SCALE = PrecisionSettings(loss_scale_init=1024.0)


def made(dtype: str, micro: int = 12, **more: object) -> Made:
    return replace(Made(micro, dtype=dtype, precision=SCALE), **more)  # type: ignore[arg-type]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Of two trainings from the same start, as a share of the way."""
    start = weights(make_step(alone()))
    return float((ours - theirs).norm() / (theirs - start).norm())


def _train(rank: int, dtype: str, micro: int, dropout: float = 0.0) -> tuple[Tensor, list[float]]:
    with joined() as group:
        return train(group, made=made(dtype, micro), dropout=dropout)


@pytest.mark.parametrize(
    ("dtype", "ranks", "micro"),
    [
        ("fp32", 2, 3),
        ("fp32", 3, 4),
        ("fp32", 3, 2),
        ("fp16", 2, 6),
        ("fp16", 3, 2),
        ("bf16", 3, 2),
    ],
)
def test_many_ranks_take_the_step_of_one_process(dtype: str, ranks: int, micro: int) -> None:
    whole, losses = train(alone(), made=made(dtype))
    results = run_ranks(ranks, _train, dtype, micro)
    for trained, their_losses in results:
        assert torch.equal(trained, results[0][0])
        assert distance(trained, whole) < TOLERANCE[dtype]
        assert their_losses == pytest.approx(losses, rel=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "micro"), [("fp32", 1), ("fp32", 4), ("fp16", 1), ("fp16", 4), ("bf16", 4)]
)
def test_accumulation_equals_one_large_batch(dtype: str, micro: int) -> None:
    whole, losses = train(alone(), made=made(dtype))
    parts, part_losses = train(alone(), made=made(dtype, micro))
    assert distance(parts, whole) < TOLERANCE[dtype]
    assert part_losses == pytest.approx(losses, rel=TOLERANCE[dtype])


def test_dropout_follows_the_micro_batch_and_not_the_rank() -> None:
    one, _ = train(alone(), 3, dropout=0.5)
    other, _ = train(alone(), 12, dropout=0.5)
    assert not torch.allclose(one, other)  # dropout is really on
    for trained, _ in run_ranks(2, _train, "fp32", 3, 0.5):
        assert distance(trained, one) < TOLERANCE["fp32"]


def _short_step(rank: int, micro: int, dtype: str) -> tuple[float, list[Tensor]]:
    with joined() as group:
        return run_short_step(group, micro, dtype)


def run_short_step(group: Group, micro: int, dtype: str) -> tuple[float, list[Tensor]]:
    """The plan's last step, 5 samples where others have 12, from the initial weights."""
    step = make_step(group, made=made(dtype, micro))
    for number in range(2):
        for _ in step.plan.micro_batches(number, group.rank):
            next(step.loader)
    outcome = step.run(2, 0.1)
    assert not outcome.skipped
    return outcome.loss, [master.detach().clone() for master in step.optimizer.masters()]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 3), (3, 4)])
def test_a_short_step_takes_the_mean_over_its_own_samples(
    ranks: int, micro: int, dtype: str
) -> None:
    """Loss and update are those of the mean over 5 samples, whatever a full step has."""
    step, tolerance = make_step(alone(), 12), TOLERANCE[dtype]
    batch = [next(step.loader) for _ in range(3)][-1]
    assert len(batch.labels) == 5
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)(
        step.model(step.normalize(batch.images, "cpu")), batch.labels
    )
    loss.backward()
    if ranks == 1:
        results = [run_short_step(alone(), micro, dtype)]
    else:
        results = run_ranks(ranks, _short_step, micro, dtype)
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    for ours, masters in results:
        assert ours == pytest.approx(loss.item(), rel=tolerance)
        for master, parameter in zip(masters, parameters, strict=True):
            moved = (master - parameter.detach()) / -0.1
            assert (moved - parameter.grad).norm() < tolerance * parameter.grad.norm()


def test_the_loss_scale_leaves_no_trace_in_the_update() -> None:
    one, _ = train(alone(), made=made("fp16"))
    other, _ = train(alone(), made=made("fp16", precision=PrecisionSettings(loss_scale_init=256.0)))
    assert distance(one, other) < 1e-4  # subnormal gradients alone may differ


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("limit", [0.05, 1e3], ids=["clipped", "not clipped"])
def test_clipping_is_of_the_gradient_of_the_mean_loss_also_in_a_short_step(
    limit: float, dtype: str
) -> None:
    """A short step has a smaller loss scale than a full one."""
    optim = replace(OPTIM, clip_norm=limit, momentum=0.0)
    step, other = make_step(alone(), made=made(dtype, optim=optim)), make_step(alone())
    mean = nn.CrossEntropyLoss(label_smoothing=0.1)
    for number in range(3):
        batch, before = next(other.loader), weights(step)
        names = dict(other.model.named_parameters())
        with torch.no_grad():
            for name, master in master_weights(step.model, step.optimizer).items():
                names[name].copy_(master)
        other.model.zero_grad()
        mean(other.model(other.normalize(batch.images, "cpu")), batch.labels).backward()
        gradient = torch.cat([p.grad.flatten() for p in names.values()])
        norm = float(gradient.norm())
        assert norm > 0.05
        assert step.run(number, 0.1).grad_norm == pytest.approx(norm, rel=TOLERANCE[dtype])
        moved = (weights(step) - before) / -0.1
        wanted = gradient * min(1.0, limit / norm)
        assert (moved - wanted).norm() < 2 * TOLERANCE[dtype] * wanted.norm()


def test_a_loss_is_that_of_its_own_step() -> None:
    """Also after other steps; with a rate of 0 the weights stay."""
    step, other = make_step(alone(), 6), make_step(alone(), 12)
    mean = nn.CrossEntropyLoss(label_smoothing=0.1)
    for number in range(3):
        batch = next(other.loader)
        wanted = mean(other.model(other.normalize(batch.images, "cpu")), batch.labels).item()
        assert step.run(number, 0.0).loss == pytest.approx(wanted, rel=1e-5)


def test_every_corrupt_image_of_a_step_is_counted() -> None:
    step = make_step(alone(), 6)
    broken = tuple(CorruptSample(number, f"{number}.png", "damaged") for number in range(3))
    batches = [replace(next(step.loader), corrupt=part) for part in (broken[:1], broken[1:])]
    step.loader = iter(batches)  # type: ignore[assignment]
    outcome = step.run(0, 0.1)
    assert (outcome.corrupt_count, outcome.corrupt_here) == (3, broken)


@pytest.mark.parametrize("dtype", HALF)
def test_weights_are_the_masters_rounded_and_masters_keep_small_steps(dtype: str) -> None:
    step = make_step(alone(), made=made(dtype), norm=True)
    begin, rounded = weights(step), step.model.conv.weight.clone()
    assert torch.equal(begin, weights(make_step(alone(), norm=True))), "not as they were drawn"
    step.run(0, 1e-6)
    assert torch.equal(step.model.conv.weight, rounded)
    assert not torch.equal(weights(step), begin)
    step.run(1, 0.1)
    masters = step.optimizer.masters()
    for name, master in zip(step.names, masters, strict=True):
        parameter = step.model.get_parameter(name)
        assert parameter.dtype == (HALF[dtype] if parameter.dim() > 1 else torch.float32)
        assert torch.equal(parameter, master.to(parameter.dtype)), name
        momentum = step.optimizer.state[parameter]["momentum_buffer"]
        assert master.dtype == momentum.dtype == torch.float32


def test_a_gradient_that_only_the_scale_makes_overflow_is_trained_later() -> None:
    """The scale falls step by step until the gradients fit; then training goes on."""
    big = PrecisionSettings(loss_scale_init=2.0**24)
    step = make_step(alone(), made=made("fp16", precision=big, epochs=8))
    skipped = [step.run(number, 0.01).skipped for number in range(16)]
    assert skipped[0]
    assert not skipped[-1]
    assert 2 <= sum(skipped) <= 14
    assert float(step.scale.value) == 2.0 ** (24 - sum(skipped))


@pytest.mark.parametrize("wire", ["auto", "float16"])
def test_a_short_step_overflows_no_sooner_than_a_full_one(wire: str) -> None:
    """A step over equal samples: what backward and the wire hold is at most what a full step has."""
    step = make_step(alone(), made=made("fp16", comm=CommSettings(wire=wire)))
    batch = next(step.loader)

    def gradients(samples: int) -> tuple[float, Tensor]:
        step.exchange.begin()
        step.micro.begin(samples, 12)
        images, labels = batch.images[:1], batch.labels[:1]
        step.micro.run(
            images.repeat(samples, 1, 1, 1), labels.repeat(samples), full_size=False, last=True
        )
        held = torch.cat([buffer.float() for buffer in step.exchange.buffers.values()])
        return float(held.abs().max()), held / step.scale.step_value

    largest, mean = gradients(12)
    for samples in range(1, 12):
        found, unscaled = gradients(samples)
        assert found <= largest, samples
        assert (unscaled - mean).norm() < 2e-3 * mean.norm(), samples
    assert gradients(12)[0] == largest
    step.exchange.close()


@pytest.mark.parametrize("nhwc", [True, False])
def test_maps_lie_as_the_switch_says(nhwc: bool) -> None:
    row = StepRow("ours", "ours", "resnet_tiny", 4, 28, 5, "cpu", 1, 1, {"run.channels_last": nhwc})
    step, description = build(row, alone())
    orders: list[bool] = []
    step.model.conv1.register_forward_hook(  # type: ignore[operator, union-attr]
        lambda module, given, out: orders.append(
            out.is_contiguous(memory_format=torch.channels_last)
        )
    )
    step.run(0, 0.1)
    assert orders == [nhwc]
    assert ("NHWC" if nhwc else "NCHW") in description
