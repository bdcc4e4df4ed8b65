"""A step that is read only after the next was launched, as on a GPU: nothing else may differ.

Two ranks with that lag against two without: steps, evaluations, checkpoints, the end, and the text of an
error.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli_runs import Done, events, run, run_two, small, summary
from paceline.train.checkpoint import Checkpoint, content_hash

TERM, INT = signal.SIGTERM, signal.SIGINT
# 16 = 4 micro-batches of 4: ranks 0 and 1 take turns. Saves and evaluations fall between steps.
ARGUMENTS = small("--output", "run", "-b", "4", "--set", "checkpoint.interval_steps=5",
                  "--set", "checkpoint.keep=99", "--set", "checkpoint.background=false")  # fmt: skip
Faults = list[Any]


def at(step: int, micro_batch: int, number: signal.Signals) -> Any:
    return partial(faults.at_micro_batch, step, micro_batch, partial(faults.signal_self, number))


def both_ways(cwd: Path, own: Faults, arguments: list[str]) -> tuple[list[Done], list[Done]]:
    """Without the lag in `cwd/0`, with it in `cwd/1`."""
    ends = []
    for lagging in (0, 1):
        place = cwd / str(lagging)
        place.mkdir()
        ends.append(run_two(arguments, place, with_lag(own) if lagging else own))
    return ends[0], ends[1]


def with_lag(own: Faults) -> Faults:
    return [partial(faults.several, *filter(None, [faults.lag, fault])) for fault in own]


def left_behind(folder: Path) -> dict[str, Any]:
    """What a run left, without times."""
    kinds = {"step": ("step", "loss", "lr", "skipped", "loss_scale"), "eval": ("step", "top1", "loss"),
             "checkpoint": ("step", "best"), "stop": ("step", "reason")}  # fmt: skip
    found: dict[str, Any] = {}
    for kind, names in kinds.items():
        for rank in (0, 1):
            records = events(folder, kind, rank)
            found[f"{kind} of rank {rank}"] = [[record[n] for n in names] for record in records]
    for file in sorted((folder / "checkpoints").glob("*.pt")):
        saved = Checkpoint.read(file)
        momenta = saved.optimizer["state"]  # the groups' rate is that of the step launched last
        parts = (saved.model, saved.batch_norm, momenta, saved.precision, saved.sampler)
        found[file.name] = content_hash(parts)
    return found


@pytest.mark.parametrize("amp", ["fp32", "fp16"])
def test_an_undisturbed_run_is_the_same(tmp_path: Path, amp: str) -> None:
    # In fp16 the first steps overflow: a skipped step is read late, too.
    more = ["--amp-dtype", amp, "--set", "precision.loss_scale_init=4194304.0"]
    plain, lagging = both_ways(tmp_path, [None, None], [*ARGUMENTS, *more])
    assert [done.code for done in plain + lagging] == [0] * 4
    assert left_behind(tmp_path / "0/run") == left_behind(tmp_path / "1/run")
    first, second = summary(tmp_path / "0/run"), summary(tmp_path / "1/run")
    for name in ("weights_sha256", "top1", "val_loss", "best_top1", "steps", "skipped_steps"):
        assert first[name] == second[name], name
    assert (first["skipped_steps"] > 0) is (amp == "fp16")


STOPS: dict[str, tuple[Faults, int]] = {
    "in mid-step on rank 1": ([None, at(8, 1, TERM)], 8),
    "in the last micro-batch of rank 0": ([at(8, 2, INT), None], 9),
    "in a step that would be evaluated": ([None, at(6, 1, TERM)], 6),
    "in a step that would be saved": ([None, at(4, 1, TERM)], 4),
    "at the end of a step that is saved": ([at(4, 2, TERM), None], 5),
    "in the last step": ([None, at(12, 1, TERM)], 13),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run without the lag leaves that saves every step."""
    place = tmp_path_factory.mktemp("undisturbed")
    ends = run_two([*ARGUMENTS, "--set", "checkpoint.interval_steps=1"], place)
    assert [done.code for done in ends] == [0, 0]
    return left_behind(place / "run")


@pytest.mark.parametrize(("own", "step"), STOPS.values(), ids=STOPS)
def test_a_signal_stops_at_the_same_step_without_a_trace(
    tmp_path: Path, undisturbed: dict[str, Any], own: Faults, step: int
) -> None:
    """Without the lag, `test_signals.py` stops runs in such places."""
    ends = run_two(ARGUMENTS, tmp_path, with_lag(own))
    code = ends[0].code
    assert code in (128 + TERM, 128 + INT)
    assert [(done.code, done.err) for done in ends] == [(code, "")] * 2
    found = left_behind(tmp_path / "run")
    for rank in (0, 1):
        for kind, last in (("step", step), ("eval", step - 1)):
            name = f"{kind} of rank {rank}"
            assert found[name] == [record for record in undisturbed[name] if record[0] <= last]
        assert [record[0] for record in found[f"stop of rank {rank}"]] == [step]
    due = {f"step-{number:08d}.pt" for number in (5, 7, 10) if number < step}
    due |= {f"step-{step:08d}.pt"} | ({"best.pt"} if step > 7 else set())
    assert {name for name in found if name.endswith(".pt")} == due
    for name in due - {"step-00000000.pt"}:
        of = "step-00000007.pt" if name == "best.pt" else name
        assert found[name] == undisturbed[of], name


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([None, partial(faults.out_of_memory, 7)], "rank 1: out of memory at step 4"),
        ([partial(faults.full_disk, "step-", 1), None], "rank 0: no space left"),
    ],
)
def test_a_fault_on_one_rank_is_the_same_line_on_both(
    tmp_path: Path, own: Faults, words: str
) -> None:
    plain, lagging = both_ways(tmp_path, own, ARGUMENTS)
    lines = {done.error_line().replace(str(tmp_path), "") for done in plain + lagging}
    assert len(lines) == 1, lines
    assert words in lines.pop()
    assert left_behind(tmp_path / "0/run") == left_behind(tmp_path / "1/run")


def test_a_divergence_names_the_same_step_and_layer(tmp_path: Path) -> None:
    diverge = ["--lr", "1e30", "--warmup-epochs", "0"]
    plain, lagging = both_ways(tmp_path, [None, None], [*ARGUMENTS, *diverge])
    lines = {done.error_line() for done in plain + lagging}
    assert len(lines) == 1, lines
    assert "first in the gradient of fc.bias" in lines.pop()


def test_one_process_alone_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Also where every step is a boundary, and where none is."""
    found = set()
    for number, more in enumerate(
        (["checkpoint.interval_steps=1"], ["checkpoint.interval_epochs=0"])
    ):
        for fault in (None, faults.lag):
            folder = f"run{number}{fault is None}"
            arguments = small("--output", folder, "-b", "4", "--epochs", "1", "--set", *more)
            done = run(arguments, tmp_path, fault)
            assert done.code == 0, done.err
            found.add(summary(tmp_path / folder)["weights_sha256"])
    assert len(found) == 1
