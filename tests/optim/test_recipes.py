from __future__ import annotations

import pytest

from paceline.config import load_config
from paceline.optim.schedule import LrSchedule

IMAGES = 1_281_167

# batch, rate, warm-up, decay, momentum, decay over, epochs: the MLPerf submissions.
TABLE = {
    "3k": (3200, 11.0, 2, 5e-5, 0.9, 37, 35),
    "13k": (13056, 12.8, 9, 2.5e-5, 0.94, 48, 45),
    "20k": (20480, 22.0, 12, 2.5e-5, 0.9, 52, 50),
    "33k": (33280, 21.2, 16, 2.5e-5, 0.94, 58, 56),
    "57k": (57344, 23.0, 32, 2.5e-5, 0.95, 78, 77),
    "64k": (67456, 24.7, 31, 1e-4, 0.952, 90, 86),
}


@pytest.mark.parametrize("name", TABLE)
def test_resnet50_recipes_hold_the_numbers_of_the_table(name: str) -> None:
    config = load_config(f"imagenet-resnet50-{name}", {})
    optim = config.optim
    found = (
        config.run.global_batch_size,
        optim.lr,
        optim.warmup_epochs,
        optim.weight_decay,
        optim.momentum,
        optim.decay_over_epochs,
        config.run.epochs,
    )
    assert found == TABLE[name]
    assert (optim.name, optim.schedule, optim.poly_power) == ("lars", "poly", 2)
    assert (optim.trust_coefficient, optim.eps, optim.lr_in_momentum) == (0.001, 0.0, True)
    flags = (optim.nesterov, optim.clip, optim.adapt_bias_norm, optim.decay_bias_norm)
    assert flags == (False, False, False, False)
    assert config.run.smoothing == 0.1
    assert (config.model.name, config.model.num_classes) == ("resnet50", 1000)


@pytest.mark.parametrize("name", TABLE)
def test_their_rates_rise_peak_and_fall_as_computed_by_hand(name: str) -> None:
    batch, peak, warmup, _, _, over, epochs = TABLE[name]
    config = load_config(f"imagenet-resnet50-{name}", {})
    per_epoch = IMAGES / batch
    total = int(epochs * per_epoch)
    schedule = LrSchedule(config.optim, config.optim.peak_lr(batch), total, per_epoch)
    assert schedule.rate(0) == pytest.approx(peak / (warmup * per_epoch))
    assert max(schedule.rate(step) for step in range(total)) == pytest.approx(peak, rel=0.01)
    middle = round((warmup + (over - warmup) / 2) * per_epoch)
    assert schedule.rate(middle) == pytest.approx(peak / 4, rel=0.01)
    # The run ends before the rate does: what is left is ((over − epochs) / (over − warm-up))².
    left = peak * ((over - epochs) / (over - warmup)) ** 2
    assert schedule.rate(total) == pytest.approx(left, rel=0.2)
    assert schedule.rate(total - 1) > 0


def test_alexnet_at_64k() -> None:
    config = load_config("imagenet-alexnet-64k", {})
    assert (config.run.global_batch_size, config.run.epochs) == (65536, 95)
    assert (config.model.name, config.optim.name) == ("alexnet_bn", "lars")
    assert (config.optim.schedule, config.optim.poly_power) == ("poly", 2)
    assert not config.optim.decay_bias_norm
    assert not config.optim.adapt_bias_norm
    per_epoch = IMAGES / 65536
    schedule = LrSchedule(config.optim, config.optim.peak_lr(65536), int(95 * per_epoch), per_epoch)
    assert schedule.rate(int(10 * per_epoch)) == pytest.approx(24.0, rel=0.01)
    assert schedule.rate(round(52.5 * per_epoch)) == pytest.approx(6.0, rel=0.01)


# optimizer, batch, rate, η, warm-up, CutMix, hole, average: as measured (records/…_cifar10_h200).
CIFAR = {
    "": ("sgd", 256, 0.2, None, 5, 0.5, 8, 0),
    "-2500": ("muon", 2500, 0.2, 0.00256, 5, 0.5, 8, 0),
    "-10k": ("muon", 10000, 0.1, 0.00256, 5, 0.5, 8, 6),
    "-2500-lars": ("lars", 2500, 0.2, 0.01, 20, 0.0, 12, 0),
    "-10k-lars": ("lars", 10000, 0.1, 0.0075, 30, 0.5, 8, 6),
}


@pytest.mark.parametrize("name", CIFAR)
def test_cifar10_recipes_are_those_that_were_measured(name: str) -> None:
    config = load_config(f"cifar10-resnet18{name}", {})
    run, optim = config.run, config.optim
    found = (
        optim.name,
        run.global_batch_size,
        optim.lr_base,
        optim.trust_coefficient if optim.name != "sgd" else None,
        optim.warmup_epochs,
        run.cutmix,
        config.data.cutout,
        run.average_epochs,
    )
    assert found == CIFAR[name]
    assert optim.peak_lr(CIFAR[name][1]) == pytest.approx(CIFAR[name][2] * CIFAR[name][1] / 256)
    assert (optim.momentum, optim.nesterov, optim.schedule) == (0.9, True, "cosine")
    assert (run.epochs, run.smoothing, optim.weight_decay) == (90, 0.1, 5e-4)
