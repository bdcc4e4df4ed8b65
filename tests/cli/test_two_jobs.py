"""Two jobs at one port: the second ends with one line on each rank, and the first is not disturbed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from cli_runs import small, started, started_ranks, steps, summary
from ranks import free_port


@pytest.mark.parametrize(
    ("ids", "more"),
    [
        (("first", "second"), ()),
        (("", ""), ("--seed", "5")),  # without ids the settings tell them apart
        (("", ""), ()),  # the very same command twice
    ],
)
def test_the_second_job_ends_at_once(
    tmp_path: Path, ids: tuple[str, str], more: tuple[str, ...]
) -> None:
    port = free_port()
    arguments = small(
        "--output", "first", "--epochs", "30", "--set", "checkpoint.interval_epochs=0"
    )
    with started_ranks([arguments] * 2, tmp_path, None, port, ids[0]) as first:
        first[0].wait_until(lambda: steps(tmp_path / "first"))
        others = [[*arguments, "--output", "second", *more]] * 2
        with started_ranks(others, tmp_path, None, port, ids[1]) as second:
            lines = [rank.wait(30).error_line() for rank in second]
        assert f"127.0.0.1:{port} is in use" in lines[0]
        assert f"has met another job at 127.0.0.1:{port}" in lines[1]
        assert lines[1].count(" of 2 ranks, configuration ") == 2
        assert not (tmp_path / "second").exists()
        assert [rank.wait(110).code for rank in first] == [0, 0]
    assert summary(tmp_path / "first")["world_size"] == 2


def test_ranks_with_another_world_size_end_at_once(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = small("--output", "run")
    with ExitStack() as stack:
        ranks = []
        for rank, size in ((0, "2"), (1, "3")):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
            world = place | own | {"LOCAL_WORLD_SIZE": size}
            ranks.append(stack.enter_context(started(arguments, tmp_path, None, **world)))
        for process in ranks:
            line = process.wait(60).error_line()
            assert "the number of ranks is 2 there and 3 here" in line
