from __future__ import annotations

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.plan.collective_cost import COSTS
from paceline.plan.cost_fit import FittedCosts, Place, Sample, work_of

SIZES = (4096, 65536, 2**20, 2**24)
PLACES = [Place(h, k, 1e-8 * 8 / r) for h, k, r in ((2, 2, 1), (4, 4, 2), (4, 1, 4), (1, 8, 1))]


def samples(name: str, prices: tuple[float, ...], noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    found = []
    for place in PLACES:
        for size in SIZES:
            seconds = float(work_of(name, place, size) @ np.array(prices))
            factor = 1 + noise * random.standard_normal()
            found.append(Sample(place, name, size, seconds * factor))
    return found


@pytest.mark.parametrize("name", sorted(COSTS))
def test_prices_come_back_and_predict_elsewhere(name: str) -> None:
    prices = (0.0, 2e-5, 1e-6, 1.2, 4e-10, 3e-10)
    fitted = FittedCosts.of(samples(name, prices))
    elsewhere = Place(8, 3, 3e-8)
    wanted = work_of(name, elsewhere, SIZES) @ np.array(prices)
    assert fitted.seconds(name, elsewhere, SIZES) == pytest.approx(wanted, rel=1e-6)
    assert fitted.spread < 1e-6


def test_noise_leaves_prices_sound() -> None:
    fitted = FittedCosts.of(samples("ring", (0.0, 2e-5, 0.0, 1.0, 0.0, 0.0), noise=0.1))
    assert min(fitted.prices["ring"]) >= 0
    assert 0.05 < fitted.spread < 0.15
    assert fitted.seconds("ring", PLACES[1], 2**22) == pytest.approx(
        float(work_of("ring", PLACES[1], 2**22) @ np.array((0.0, 2e-5, 0.0, 1.0, 0.0, 0.0))),
        rel=0.15,
    )


def test_nothing_to_send_costs_nothing() -> None:
    fitted = FittedCosts.of(samples("tree", (1e-4, 0, 0, 0, 0, 0)))
    assert fitted.seconds("tree", PLACES[0], [0, 1])[0] == 0


def test_samples_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="none given"):
        FittedCosts.of([])
    with pytest.raises(ConfigError, match="above 0"):
        FittedCosts.of([Sample(PLACES[0], "ring", 8, 0.0)])
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        FittedCosts.of([Sample(PLACES[0], "rnig", 8, 1.0)])
    with pytest.raises(ConfigError, match="was not measured"):
        FittedCosts.of(samples("ring", (1, 0, 0, 0, 0, 0))).seconds("tree", PLACES[0], 8)
