"""The step on a GPU: captured and replayed, without waiting, one step behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from full_products import full_products
from no_waiting import no_waiting
from paceline.core.events import StepEvent
from paceline.optim.settings import OptimSettings
from paceline.precision.settings import PrecisionSettings
from paceline.train.loss import Mixing
from paceline.train.run import run_training
from paceline.train.step import TrainStep
from paceline.tune.step import StepRow, build_step
from small_runs import Silent, small_config
from train.steps import Made, alone, make_step, same, snapshot, weights

pytestmark = pytest.mark.gpu

STEPS = 10
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}


@pytest.fixture(autouse=True)
def _full_products() -> Iterator[None]:
    with full_products():
        yield


def made_step(dtype: str, graphs: bool, micro: int = 12, **net: Any) -> TrainStep:
    scale = PrecisionSettings(loss_scale_init=1024.0)
    made = Made(micro, epochs=8, dtype=dtype, precision=scale, graphs=graphs)
    return make_step(alone(torch.device("cuda")), made=made, **net)


def trained(step: TrainStep) -> tuple[Tensor, list[float]]:
    losses = [step.run(number, 0.05).loss for number in range(STEPS)]
    return weights(step), losses


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("micro", [12, 4])
def test_captured_steps_equal_plain_ones(dtype: str, micro: int) -> None:
    begin = weights(made_step(dtype, False))
    plain, losses = trained(made_step(dtype, False, micro))
    captured, captured_losses = trained(made_step(dtype, True, micro))
    away = float((captured - plain).norm() / (plain - begin).norm())
    assert away < TOLERANCE[dtype]
    assert captured_losses == pytest.approx(losses, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["sgd", "lars", "muon", "adamw", "lamb", "torch.optim:RAdam"])
def test_captured_updates_clip_as_plain_ones_do(name: str, dtype: str) -> None:
    """With every optimizer; one of torch's own is not captured."""
    optim = OptimSettings(name=name, lr=0.1, weight_decay=0.01, clip_norm=0.05)
    begin, found = weights(made_step("fp32", False)), []
    for graphs in (False, True):
        scale = PrecisionSettings(loss_scale_init=1024.0)
        made = Made(epochs=8, dtype=dtype, precision=scale, graphs=graphs, optim=optim)
        step = make_step(alone(torch.device("cuda")), made=made)
        norms = [step.run(number, 0.002).grad_norm for number in range(STEPS)]
        assert min(norms) > 0.05
        assert step.strategy._captured.replays == (graphs and ":" not in name)
        found.append((weights(step), norms))
    (plain, norms), (captured, captured_norms) = found
    # Adam divides small gradients by their own size: rounding shows more than with SGD.
    away = float((captured - plain).norm() / (plain - begin).norm())
    assert away < (1e-3 if dtype == "fp32" else 0.05)
    assert captured_norms == pytest.approx(norms, rel=1e-3 if dtype == "fp32" else 0.05)


@pytest.mark.parametrize("fused", ["auto", "off"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("model", "size"),
    [("resnet18", 32), ("resnet50", 96), ("resnet_fast", 32), ("alexnet_bn", 96)],
)
def test_recomputed_norms_change_no_bit(model: str, size: int, dtype: str, fused: str) -> None:
    """In captured steps; convolutions take algorithms that repeat."""
    found = []
    for recompute in (False, True):
        switches = {
            "precision.amp_dtype": dtype, "precision.tf32": False, "precision.loss_scale_init": 1024.0,
            "run.accel.fused_norm": fused, "run.accel.compile": "off", "model.dropout": 0.0,
            "run.accel.recompute_norms": recompute,
        }  # fmt: skip
        row = StepRow("bits", "ours", model, 32, size, 10, "cuda", STEPS, 0, switches)
        with alone(torch.device("cuda", torch.cuda.current_device())) as group:
            step, words = build_step(row, group)
            assert ("norms recomputed" in words) == recompute
            losses = [step.run(number, 0.01).loss for number in range(6)]
            found.append((losses, snapshot(step)))
            step.release()
    (losses, stored), (losses_again, again) = found
    assert losses == losses_again
    assert stored.keys() == again.keys()
    assert [name for name, it in stored.items() if not same({"": it}, {"": again[name]})] == []


def test_a_short_step_behind_captured_ones_is_scaled_on_the_device() -> None:
    """The plan's last step has 4 samples of 12: a quarter of the scale, in the captured update too."""
    found = []
    for graphs in (False, True):
        step = made_step("fp16", graphs)
        last = step.plan.total_steps - 1
        for number in range(last):
            step.run(number, 1e-3)
        before = weights(step)
        outcome = step.run(last, 1e-3)
        assert not outcome.skipped
        assert float(step.scale.step_value) == float(step.scale.value) / 4
        found.append((weights(step) - before, outcome.loss))
    (plain, loss), (captured, captured_loss) = found
    assert float((captured - plain).norm() / plain.norm()) < 2 * TOLERANCE["fp16"]
    assert captured_loss == pytest.approx(loss, rel=TOLERANCE["fp16"])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_captured_steps_mix_images_as_plain_ones_do(dtype: str) -> None:
    begin, found = weights(made_step(dtype, False)), []
    for graphs, mixing in ((False, True), (True, True), (True, False)):
        step = made_step(dtype, graphs, 4)
        step.mixing = Mixing(0.2, 1.0, 12, seed=3) if mixing else None
        found.append(trained(step))
    (plain, losses), (captured, captured_losses), (unmixed, _) = found
    moved = (plain - begin).norm()
    assert float((captured - plain).norm() / moved) < TOLERANCE[dtype]
    assert captured_losses == pytest.approx(losses, rel=TOLERANCE[dtype])
    assert float((captured - unmixed).norm() / moved) > 5 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_captured_steps_average_their_weights_exactly(dtype: str) -> None:
    """One that is halted, too, in the graph: it must not count."""
    scale = PrecisionSettings(loss_scale_init=1024.0)
    made = Made(epochs=8, dtype=dtype, precision=scale, graphs=True, average=4.0)
    step = make_step(alone(torch.device("cuda")), made=made, norm=True)
    average = step.strategy.average
    expected = torch.zeros(())
    for number in range(STEPS):
        step.run(number, 0.05)
        now = torch.cat([m.detach().double().flatten() for m in step.optimizer.masters()])
        expected = now if number == 0 else expected + (now - expected) / min(number + 1, 4)
    found = torch.cat([value.flatten() for value in average.weights])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert float((now - expected).abs().max()) > 1e-4
    step.stop.received = signal.SIGTERM
    assert not step.run(STEPS, 0.05).done
    assert torch.equal(found, torch.cat([value.flatten() for value in average.weights]))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_gpu_follows_the_cpu(dtype: str) -> None:
    begin = weights(made_step("fp32", False)).cpu()
    ours, losses = trained(made_step(dtype, True))
    theirs, cpu_losses = trained(make_step(alone(), made=Made(epochs=8)))
    assert float((ours.cpu() - theirs).norm() / (theirs - begin).norm()) < 10 * TOLERANCE[dtype]
    assert losses == pytest.approx(cpu_losses, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("micro", [12, 4])
def test_a_launch_waits_for_nothing(graphs: bool, micro: int) -> None:
    step = made_step("fp16", graphs, micro, norm=True)
    for number in range(5):
        step.run(number, 0.05)
    with no_waiting():
        step.launch(5, 0.05)
        step.launch(6, 0.04)  # another rate is sent without waiting, too
    outcomes = [step.collect(), step.collect()]
    assert [(o.number, o.rate, o.done, o.skipped) for o in outcomes] == [
        (5, 0.05, True, False), (6, 0.04, True, False)
    ]  # fmt: skip
    assert step.lag == 1


@pytest.mark.parametrize("graphs", [True, False])
def test_an_overflow_skips_the_step_and_halves_the_scale(graphs: bool) -> None:
    step = made_step("fp16", graphs, norm=True)
    for number in range(5):
        assert not step.run(number, 0.05).skipped
    before = snapshot(step)
    step.scale.value.fill_(2.0**30)
    assert step.run(5, 0.05).skipped
    assert same(before, snapshot(step))
    assert float(step.scale.value) == 2.0**24  # half of it, and no more than the ceiling
    step.scale.value.fill_(1024.0)
    assert not step.run(6, 0.05).skipped
    assert not same(before, snapshot(step))


def test_dropout_differs_between_replays_and_comes_back_with_its_seed() -> None:
    def losses(graphs: bool) -> list[float]:
        step = made_step("fp32", graphs, dropout=0.5)
        batch = next(step.loader)
        found = []
        for seed in (0, 0, 0, 0, 1, 2, 1, 2):  # the first calls run plainly, then one captures
            step.exchange.begin()
            step.micro.begin(12, 12)
            torch.manual_seed(seed)
            step.micro.run(batch.images, batch.labels, full_size=True)
            found.append(float(step.micro.loss))
        return found

    *first, one, two, one_again, two_again = losses(True)
    assert (one, two) == (one_again, two_again)
    assert one != two
    assert len(set(first)) == 1, "plain calls and replays draw the same numbers"
    assert losses(False) == pytest.approx(losses(True), rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_run_on_the_fast_path_learns(tmp_path: Path, dtype: str) -> None:
    display = Silent()
    config = small_config(
        tmp_path / "a", run__device="cuda", run__epochs=24, precision__amp_dtype=dtype,
        optim__warmup_epochs=1.0, data__image_size=28,
    )  # fmt: skip
    outcome = run_training(config, lambda: display)
    assert outcome.summary["chosen"]["speed"] == (
        "NHWC, fused norms on, compile off, CUDA graphs on"
    )
    losses = [event.loss for event in display.events if isinstance(event, StepEvent)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert outcome.summary["skipped_steps"] <= 3
