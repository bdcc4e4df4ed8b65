from __future__ import annotations

import pytest

from paceline.comm.group_layout import GroupLayout, Place
from paceline.core.errors import CommError, ConfigError


def places(*nodes: int) -> list[Place]:
    world, made = sum(nodes), []
    for node, count in enumerate(nodes):
        made += [Place(len(made) + local, world, node, local, count) for local in range(count)]
    return made


def test_a_group_for_each_node() -> None:
    layout = GroupLayout.from_places(places(3, 2, 1))
    assert layout.groups == ((0, 1, 2), (3, 4), (5,))
    assert layout.masters == (0, 3, 5)
    assert layout.order == (0, 1, 2, 3, 4, 5)
    assert layout.row_of(4) == (3, 4)
    assert not layout.is_uniform
    # The lone rank of the last node owns every chunk there.
    assert layout.columns == ((0, 3, 5), (1, 4, 5), (2, 3, 5))


@pytest.mark.parametrize(
    ("nodes", "k", "groups"),
    [
        ((4, 4), 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ((8,), 3, ((0, 1, 2), (3, 4, 5), (6, 7))),
        ((3, 3), 2, ((0, 1), (2,), (3, 4), (5,))),
        ((1, 1, 1, 1, 1), 2, ((0, 1), (2, 3), (4,))),
        ((2, 2), 9, ((0, 1, 2, 3),)),
        ((2, 1), 1, ((0,), (1,), (2,))),
    ],
)
def test_groups_of_k(nodes: tuple[int, ...], k: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert GroupLayout.from_places(places(*nodes), k).groups == groups


def test_ranks_dealt_out_in_turn_still_stand_beside_their_neighbours() -> None:
    dealt = [Place(rank, 4, rank % 2, rank // 2, 2) for rank in range(4)]
    assert GroupLayout.from_places(dealt).groups == ((0, 2), (1, 3))


def test_contradictions_are_named() -> None:
    with pytest.raises(CommError, match="rank 0 counts 3 ranks, but there are 2"):
        GroupLayout.from_places([Place(0, 3, 0, 0, 2), Place(1, 2, 0, 1, 2)])
    with pytest.raises(CommError, match="ranks 0 and 1 are both local rank 0 of node 0"):
        GroupLayout.from_places([Place(0, 2, 0, 0, 1), Place(1, 2, 0, 0, 1)])
    with pytest.raises(CommError, match="rank 0 counts 2 ranks on node 0, but 1 are there"):
        GroupLayout.from_places([Place(0, 2, 0, 0, 2), Place(1, 2, 1, 0, 1)])
    with pytest.raises(CommError, match="not 0 to 1, once each"):
        GroupLayout.from_places([Place(1, 2, 0, 0, 2), Place(1, 2, 0, 1, 2)])
    with pytest.raises(ConfigError, match="comm.group_size = 0"):
        GroupLayout.from_places(places(2), 0)
