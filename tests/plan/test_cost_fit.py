from __future__ import annotations

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.plan.cost_fit import FittedCosts, Sample
from paceline.plan.rank_scripts import scripts
from paceline.plan.script_player import Place, Prices, play

TRUE = Prices(4e-4, 1.2e-4, 6e-5, 1.5e-8, 4e-9)
PLACES = [Place(2, 2, 8e-8), Place(4, 1, 2e-8), Place(1, 4, 0.0)]


def samples(name: str, noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(place, name, size, seconds(name, place, size) * (1 + noise * random.standard_normal()))
        for place in PLACES
        for size in (4096, 65536, 2**19)
    ]  # fmt: skip


def seconds(name: str, place: Place, size: int) -> float:
    return play(scripts(name, place.nodes, place.ranks_per_node, size), place, TRUE)


def test_prices_come_back_and_predict_other_places_and_sizes() -> None:
    fitted = FittedCosts.of([*samples("ring"), *samples("tree")])
    assert fitted.spread < 0.01
    elsewhere = Place(3, 2, 3e-8)
    for name in ("ring", "tree"):
        found = fitted.seconds(name, elsewhere, [16384, 2**20])
        wanted = [seconds(name, elsewhere, size) for size in (16384, 2**20)]
        assert found == pytest.approx(wanted, rel=0.06), name


def test_noise_leaves_prices_sound() -> None:
    fitted = FittedCosts.of(samples("native", noise=0.1))
    assert 0.01 < fitted.spread < 0.15
    assert fitted.seconds("native", PLACES[0], 2**18) == pytest.approx(
        seconds("native", PLACES[0], 2**18), rel=0.15
    )


def test_nothing_to_send_costs_nothing() -> None:
    fitted = FittedCosts.of(samples("native"))
    assert fitted.seconds("native", PLACES[0], [0, 8])[0] == 0
    assert float(fitted.seconds("native", Place(1, 1, 0.0), 8)) == 0


def test_samples_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="none given"):
        FittedCosts.of([])
    with pytest.raises(ConfigError, match="above 0"):
        FittedCosts.of([Sample(PLACES[0], "ring", 8, 0.0)])
    for size in (0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="size_bytes .* must be above 0"):
            FittedCosts.of([*samples("ring"), Sample(PLACES[0], "ring", size, 1.0)])
    with pytest.raises(ConfigError, match="place.ranks .* must be 2 or more"):
        FittedCosts.of([*samples("ring"), Sample(Place(1, 1, 0.0), "ring", 8, 1.0)])
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        FittedCosts.of([Sample(PLACES[0], "rnig", 8, 1.0)])
    with pytest.raises(ConfigError, match="was not measured"):
        FittedCosts.of(samples("native")).seconds("tree", PLACES[0], 8)
