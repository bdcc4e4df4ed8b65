"""Runs that lose ranks: contract 7, records without gaps, state that follows, and refusals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lost_ranks import run_members
from paceline.comm.exchange import GradientExchange
from paceline.config import Job
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.events import read_events
from paceline.train.checkpoint import Checkpoint
from paceline.train.components import Components
from paceline.train.loop import TrainingLoop
from paceline.train.resolve import refuse
from paceline.train.step import TrainStep
from ranks import run_ranks
from small_runs import run_small, small_config
from train.runs import EVERY_STEP, newest

SVRG: dict[str, Any] = {
    "optim__name": "svrg", "optim__momentum": 0.0, "data__augment": "none", "data__flip": False,
}  # fmt: skip
HALF: dict[str, Any] = {"precision__amp_dtype": "bf16", "run__average_epochs": 1.0}
OVERLAPPED: dict[str, Any] = {"comm__algorithm": "ring", "comm__fusion_mib": 0.02}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail_at(point: str, step: int) -> None:
    """Lets this process end itself at a point of a step, counted from 0."""
    begin, reduce, update = GradientExchange.begin, GradientExchange.reduce, TrainStep._update
    send, evaluate, save = GradientExchange._send, TrainingLoop._evaluate, TrainingLoop._save
    now = -1

    def begin_(self: GradientExchange, number: int = 0) -> None:
        nonlocal now
        now = number
        if (point, now) == ("computing", step):
            _die()
        begin(self, number)

    def send_(self: GradientExchange) -> None:
        send(self)
        if (point, now) == ("reducing", step):
            _die()

    def reduce_(self: GradientExchange, *values: Any) -> None:
        reduce(self, *values)
        if (point, now) == ("reduced", step):
            _die()
        if (point, now) == ("behind", step):
            # As if the other ranks had got this sum, but not this one.
            error = self.group._loss()
            assert error is not None
            raise error

    def update_(self: TrainStep, *values: Any) -> Any:
        done = update(self, *values)
        if (point, now) == ("applied", step):
            _die()
        return done

    def evaluate_(self: TrainingLoop) -> Any:
        if (point, now) == ("evaluating", step):
            _die()
        return evaluate(self)

    def save_(self: TrainingLoop, *, best: bool) -> None:
        if (point, now) == ("saving", step):
            _die()
        save(self, best=best)

    GradientExchange.begin, GradientExchange.reduce = begin_, reduce_  # type: ignore[method-assign]
    GradientExchange._send, TrainStep._update = send_, update_  # type: ignore[method-assign]
    TrainingLoop._evaluate, TrainingLoop._save = evaluate_, save_  # type: ignore[method-assign]


def _run(
    rank: int, output: str, values: dict[str, Any], faults: dict[int, tuple[str, int]]
) -> dict[str, Any]:
    if rank in faults:
        _fail_at(*faults[rank])
    return run_small(output, **values).summary


def _resumed(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return run_small(output, **values).summary


def _reference(folder: Path, ranks: list[tuple[int, int]], values: dict[str, Any]) -> str:
    """Weights after stopping at steps and resuming on fewer ranks: pairs of step and ranks from there."""
    output, resume = folder, dict[str, Any]()
    for at, size in ranks:
        if at:
            for path in (output / "checkpoints").glob("step-*.pt"):
                if Checkpoint.read(path).step > at:
                    path.unlink()
            resume = {"run__resume": "auto"}
        summary = run_ranks(size, _resumed, str(output), values | EVERY_STEP | resume)[0]
    return str(summary["weights_sha256"])


@pytest.mark.parametrize(
    ("size", "faults", "generations", "values"),
    [
        (2, {1: ("computing", 3)}, [(0, 2), (3, 1)], {}),
        (4, {2: ("computing", 3)}, [(0, 4), (3, 3)], {}),
        (4, {1: ("reducing", 2)}, [(0, 4), (2, 3)], OVERLAPPED),
        (4, {3: ("applied", 2)}, [(0, 4), (3, 3)], {}),
        (4, {3: ("reduced", 2), 1: ("behind", 2)}, [(0, 4), (3, 3)], {}),
        (4, {3: ("reduced", 2), 0: ("behind", 2)}, [(0, 4), (3, 3)], {"optim__name": "adamw"}),
        (4, {3: ("reduced", 4), 1: ("behind", 4)}, [(0, 4), (5, 3)], HALF),
        (4, {1: ("evaluating", 3)}, [(0, 4), (4, 3)], {"optim__name": "muon"}),
        (4, {1: ("computing", 2), 2: ("computing", 4)}, [(0, 4), (2, 3), (4, 2)], {}),
        (4, {1: ("computing", 2), 2: ("computing", 2)}, [(0, 4), (2, 2)], {}),
    ],
)
def test_a_lost_rank_changes_nothing_but_the_number_of_ranks(
    size: int, faults: dict[int, tuple[str, int]], generations: list[tuple[int, int]],
    values: dict[str, Any], tmp_path: Path,
) -> None:  # fmt: skip
    """Contract 7."""
    # With `auto`, other ranks measure another plan.
    values = {"run__batch_size": 4, "comm__algorithm": "native", **values}
    own = values | {"comm__min_ranks": 1}
    folder = tmp_path / "run"
    results = run_members(size, _run, tmp_path / "members", str(folder), own, faults)
    lost = {rank for rank, (point, _) in faults.items() if point != "behind"}
    assert sorted(results) == sorted(set(range(size)) - lost)
    expected = _reference(tmp_path / "reference", generations, values)
    assert results[0]["weights_sha256"] == expected
    assert results[0]["world_size"] == generations[-1][1]
    events = list(read_events(folder / "metrics.jsonl"))
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, 8))
    found = [event for event in events if event["event"] == "generation"]
    assert found[-1]["ranks"] == generations[-1][1]
    assert sorted(rank for event in found for rank in event["lost"]) == sorted(lost)
    assert results[0]["resumed_at_steps"] == []
    page = (folder / "report.html").read_text()
    assert "Lost ranks" in page
    assert "of the time useful" in page


def _error(
    rank: int, output: str, values: dict[str, Any], faults: dict[int, tuple[str, int]]
) -> tuple[str, str]:
    if rank in faults:
        _fail_at(*faults[rank])
    with pytest.raises(PacelineError) as caught:
        run_small(output, **values)
    return type(caught.value).__name__, str(caught.value)


def test_too_few_ranks_save_and_end(tmp_path: Path) -> None:
    own = {"run__batch_size": 4, "comm__min_ranks": 3}
    faults = {1: ("computing", 2), 2: ("computing", 2)}
    folder = tmp_path / "run"
    results = run_members(4, _error, tmp_path / "members", str(folder), own, faults)
    assert sorted(results) == [0, 3]
    for kind, line in results.values():
        assert kind == "RunError"
        assert "2 ranks of comm.min_ranks = 3 are left" in line
    assert Checkpoint.read(newest(folder)).step == 2


@pytest.mark.parametrize("values", [{}, {"checkpoint__interval_steps": 2}])
def test_a_save_that_a_loss_has_interrupted_is_repeated(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """The evaluation before it may have set the best accuracy of the run, and is not repeated."""
    own = values | {"run__batch_size": 4, "comm__min_ranks": 1}
    folder = tmp_path / "run"
    run_members(2, _run, tmp_path / "members", str(folder), own, {1: ("saving", 3)})
    events = list(read_events(folder / "metrics.jsonl"))
    assert [e["step"] for e in events if e["event"] == "eval"].count(4) == 1
    assert 4 in [e["step"] for e in events if e["event"] == "checkpoint"]


def test_without_min_ranks_a_lost_rank_ends_the_run(tmp_path: Path) -> None:
    own: dict[str, Any] = {"run__batch_size": 4, "comm__timeout_s": 10.0}
    results = run_members(
        3, _error, tmp_path / "members", str(tmp_path / "run"), own, {1: ("computing", 2)}
    )
    assert all(kind == "PeerError" for kind, _ in results.values())


def test_wire_residuals_are_dropped_with_a_note(tmp_path: Path) -> None:
    own = {"run__batch_size": 4, "comm__min_ranks": 1, "comm__wire": "int8"}
    folder = tmp_path / "run"
    run_members(3, _run, tmp_path / "members", str(folder), own, {1: ("computing", 2)})
    notes = [e["text"] for e in read_events(folder / "metrics.jsonl") if e["event"] == "note"]
    assert any("of all ranks are dropped" in note for note in notes)


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (1, {"comm__min_ranks": 2}),
        (2, {"comm__min_ranks": 3}),
        (2, {"comm__min_ranks": 1, "run__strategy": "synced_norms", "run__synced_norms__ranks": 2}),
        (2, {"comm__min_ranks": 1, "run__strategy": "unequal"}),
        (2, {"comm__min_ranks": 1, "run__strategy": "asynchronous"}),
        (2, {"comm__min_ranks": 1, **SVRG}),
        (2, {"comm__min_ranks": 1, "optim__name": "muon", "optim__muon__share_products": "on"}),
    ],
)
def test_runs_that_cannot_change_their_ranks_are_refused(
    ranks: int, values: dict[str, Any], tmp_path: Path
) -> None:
    config = small_config(tmp_path, run__batch_size=8, **values)
    with pytest.raises(ConfigError) as caught:
        refuse(config, Job(processes=ranks, device="cpu"), Components())
    assert caught.value.field == "comm.min_ranks"


def test_gpus_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, comm__min_ranks=1)
    with pytest.raises(ConfigError, match="GPUs"):
        refuse(config, Job(processes=2, device="cuda"), Components())
