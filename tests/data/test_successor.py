from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.errors import DataError
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.order import SampleOrder
from paceline.data.successor import successor


def load_all_but(bad: set[int]) -> Callable[[int], str | CorruptSample]:
    return lambda index: CorruptSample(index, str(index), "bad") if index in bad else f"<{index}>"


def test_the_first_good_one_after_it() -> None:
    order = SampleOrder(10, 0)
    stream = order.at(0, 20)[1].tolist()
    load = load_all_but({stream[8], stream[9]})
    log = CorruptLog(10, 0.5)
    met, loaded, epoch, index = successor(order, 8, load(stream[8]), load, log)
    place = next(p for p in range(10, 20) if stream[p] not in stream[8:10])
    assert [sample.index for sample in met] == [stream[8], stream[9]]
    assert (loaded, epoch.tolist(), index.tolist()) == (f"<{stream[place]}>", [1], [stream[place]])


@pytest.mark.parametrize(("share", "count"), [(0.2, 3), (0.99, 10)])
def test_ends_where_too_many_are_bad(share: float, count: int) -> None:
    load = load_all_but(set(range(10)))
    first = load(int(SampleOrder(10, 0).at(0, 1)[1][0]))
    with pytest.raises(DataError, match=f"{count} corrupt of 10"):
        successor(SampleOrder(10, 0), 0, first, load, CorruptLog(10, share))
