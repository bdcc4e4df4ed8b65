"""Messages played on shared cores and links, against what can be worked out by hand; fitted prices."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.plan.shared_player import (
    FittedCosts,
    Flow,
    FlowLink,
    Message,
    Place,
    Prices,
    Sample,
    messages,
    play_shared,
    share,
)

TRUE = Prices(4e-4, 1.2e-4, 6e-5, 1.5e-8, 4e-9)
PLACES = [Place(2, 2, 8e-8), Place(4, 1, 2e-8), Place(1, 4, 0.0)]
FREE = Prices(0.0, 0.0, 0.0, 0.0, 0.0)
BETA = 1e-6
MIB = 2**20


def played(
    name: str, nodes: int, ranks: int, size: int, prices: Prices = FREE, **place: float
) -> float:
    return seconds(name, Place(nodes, ranks, BETA, **place), size, prices)  # type: ignore[arg-type]


def seconds(name: str, place: Place, size: int, prices: Prices) -> float:
    sent = [list(messages(name, rank, place.groups, size // 4)) for rank in place.groups.order]
    return play_shared(sent, place, prices)


def test_links_alone_give_the_closed_forms() -> None:
    size = 512 * 1024
    for p in (2, 4, 8):
        wanted = 2 * (p - 1) / p * size * BETA
        for name in ("ring", "halving_doubling", "native"):
            assert played(name, p, 1, size) == pytest.approx(wanted, rel=1e-3), name
        assert played("hierarchical", p, 3, size) == pytest.approx(wanted, rel=1e-3)


def test_one_message_by_hand() -> None:
    there = [[Message(True, 1, 1000, 0)], [Message(False, 0, 1000, 0)]]
    prices = Prices(call_s=1.0, message_between_s=0.1, message_inside_s=7.0, byte_between_s=2e-7,
                    byte_inside_s=0.0)  # fmt: skip
    # Call and start on one core each, the bytes at the link's rate, the other end.
    assert play_shared(there, Place(2, 1, BETA), prices) == pytest.approx(
        1.0 + 0.1 + 4000 * BETA + 0.1
    )
    # On one core the receiver's call comes second; by then the sender waits for the core.
    assert play_shared(there, Place(2, 1, BETA, cores=1), prices) == pytest.approx(2.204)
    # A link that has rested lets a burst pass.
    burst = play_shared(there, Place(2, 1, BETA, burst_bytes=1000), FREE)
    assert burst == pytest.approx(3000 * BETA)
    # Where cores are slower than the link, either end needs half of a byte's time.
    slow = Prices(0, 0, 0, 4 * BETA, 0)
    assert play_shared(there, Place(2, 1, BETA), slow) == pytest.approx(4000 * 2 * BETA)
    assert play_shared(there, Place(2, 1, BETA, cores=1), slow) == pytest.approx(4000 * 4 * BETA)


def test_bytes_get_the_cores_that_message_ends_leave_or_a_fair_share() -> None:
    """0 → 1 sends 40 ms of a core's bytes, 2 → 3 twenty small messages, each with two ends of 1 ms."""
    one, lane = Message(True, 1, 10_000, 0), 0
    small, taken = Message(True, 3, 1, lane), Message(False, 2, 1, lane)
    scripts = [[one], [Message(False, 0, 10_000, lane)], [small] * 20, [taken] * 20]
    prices = Prices(0.0, 0.0, 1e-3, 0.0, 1e-6)
    # The first end lets the bytes go; in the 40 ms of the other ends they get 20, and then all.
    assert play_shared(scripts, Place(1, 4, 0.0, cores=1), prices) == pytest.approx(62e-3, rel=0.01)
    # Two ends are busy at the most, for 20 ms; two more cores are for the bytes alone.
    assert play_shared(scripts, Place(1, 4, 0.0, cores=4), prices) == pytest.approx(22e-3, rel=0.01)


def test_ranks_that_wait_for_ever_are_named() -> None:
    alone = [[Message(False, 1, 8, 0)], [Message(False, 0, 8, 0)], []]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for a message that is never sent"):
        play_shared(alone, Place(3, 1, BETA), FREE)


def test_rates_are_fair() -> None:
    out, into = FlowLink(10.0, 0.0), FlowLink(6.0, 0.0)
    both, alone = Flow(1, 0.0, (out, into), None), Flow(1, 0.0, (out,), None)
    beside = Flow(1, 0.0, (into,), None)
    share([both, alone, beside], [out, into], 2)
    assert [both.rate, beside.rate, alone.rate] == pytest.approx([3, 3, 7])
    # Cores that can move 4 bytes a second between them.
    busy = [Flow(1, 0.5, (out,), None), Flow(1, 0.5, (), None)]
    share(busy, [out, into], 2)
    assert [flow.rate for flow in busy] == pytest.approx([2, 2])


def samples(name: str, noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(place, name, size, seconds(name, place, size, TRUE) * off)
        for place in PLACES
        for size in (4096, 65536, 2**19)
        for off in [1 + noise * random.standard_normal()]
    ]


def test_prices_come_back_and_predict_other_places_and_sizes() -> None:
    fitted = FittedCosts.of([*samples("ring"), *samples("tree")])
    assert fitted.spread < 0.01
    elsewhere = Place(3, 2, 3e-8)
    for name in ("ring", "tree"):
        found = fitted.seconds(name, elsewhere, [16384, 2**20])
        wanted = [seconds(name, elsewhere, size, TRUE) for size in (16384, 2**20)]
        assert found == pytest.approx(wanted, rel=0.06), name


def test_samples_that_cannot_be() -> None:
    fitted = FittedCosts.of(samples("native", noise=0.1))
    assert 0.01 < fitted.spread < 0.15
    assert fitted.seconds("native", PLACES[0], [0, 8])[0] == 0
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
