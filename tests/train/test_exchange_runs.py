"""Whole runs on the communication module: accuracy, bit-identical ranks, and what a resume keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import events, summary
from paceline.comm import exchange_probe
from paceline.config import RECIPES, load_config
from paceline.plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts, PlanFile
from paceline.plan.size_table import MeasuredSize
from paceline.train import exchange_plan
from paceline.train.checkpoint import Checkpoint
from ranks import run_ranks
from small_runs import run_on_ranks, run_small, small_config
from train.runs import EVERY_STEP

HYBRID: dict[str, Any] = {
    "comm__algorithm": "hybrid", "comm__hybrid__sizes": "64", "comm__fusion_mib": 0.02,
}  # fmt: skip
# Of smaller images, rounding changes weights and predictions more.
LARGE: dict[str, Any] = {"data__image_size": 28}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = load_file(folder / "weights.safetensors")
    return {
        name: value
        for name, value in found.items()
        if "running" not in name and "tracked" not in name
    }


def test_hybrid_trains_as_native_does_and_ranks_stay_bit_identical(tmp_path: Path) -> None:
    """A run's end compares all ranks' weights itself, and fails where they differ."""
    cases = {
        "flat": ({}, 0.0, "1 bucket of 2.28 MiB, native, after backward"),
        "hybrid": (HYBRID, 1e-5, "9 buckets of 19.3 KiB to 579 KiB, ring (6), hierarchical (3), "
                   "overlapped"),
        "after": (HYBRID | {"comm__overlap": "off"}, 1e-5, "after backward"),
        "half": (HYBRID | {"comm__wire": "float16"}, 1e-2, "float16 wire, overlapped"),
    }  # fmt: skip
    accuracy, hashes = set(), {}
    for name, (values, tolerance, words) in cases.items():
        first, second = run_on_ranks(2, tmp_path / name, LARGE | values)
        assert first["weights_sha256"] == second["weights_sha256"]
        assert first["chosen"]["exchange"].endswith(words), first["chosen"]["exchange"]
        accuracy.add(first["top1"])
        hashes[name] = first["weights_sha256"]
        flat, ours = weights(tmp_path / "flat"), weights(tmp_path / name)
        for key, value in flat.items():
            torch.testing.assert_close(ours[key], value, rtol=tolerance, atol=tolerance, msg=key)
    assert len(accuracy) == 1
    assert hashes["after"] == hashes["hybrid"], "overlap must not change a bit"
    waits = [event["exposed_comm_s"] for event in events(tmp_path / "hybrid", "step", rank=1)]
    assert len(waits) == 7
    assert all(wait > 0 for wait in waits)


def _probed(*values: Any) -> Any:
    raise AssertionError("a resumed run must not probe")


def _resume(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    recorded, exchange_plan.record_order = exchange_plan.record_order, _probed
    try:
        return run_small(output, **LARGE | values).summary
    finally:
        exchange_plan.record_order = recorded


def test_a_resumed_run_keeps_the_plan_and_never_probes(tmp_path: Path) -> None:
    whole = run_on_ranks(2, tmp_path / "a", LARGE | HYBRID | EVERY_STEP)[0]
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    plan = FusionPlan.from_table(Checkpoint.read(saved).plan)
    assert len(plan.buckets) == 9
    assert {buffer.algorithm for buffer in plan.buckets} == {"ring", "hierarchical"}
    rest = HYBRID | {"run__resume": str(saved)}
    resumed = run_ranks(2, _resume, str(tmp_path / "b"), rest)[0]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["chosen"]["exchange"].endswith("overlapped (as in the checkpoint)")
    # Other settings make another plan, of the same order.
    other = rest | {"comm__fusion_mib": 1.0}
    changed = run_ranks(2, _resume, str(tmp_path / "c"), other)[0]["chosen"]
    assert changed["exchange"].startswith("3 buckets")
    assert changed["exchange"].endswith("(order as in the checkpoint)")
    assert changed["changed on resume"].endswith("comm.fusion_mib 0.02 → 1.0")
    # So does another number of ranks; alone, with an algorithm asked for, the run goes on as well.
    alone = _resume(0, str(tmp_path / "d"), rest)
    assert "exchange" not in alone["chosen"]
    for key, value in weights(tmp_path / "d").items():
        torch.testing.assert_close(weights(tmp_path / "a")[key], value, rtol=0.1, atol=0.05)


def _crafted(probe: Any, names: Any) -> list[MeasuredSize]:
    return [MeasuredSize(size, {"native": 2e-3, "tree": 1e-3}) for size in (1024, 1 << 20)]


def _auto(rank: int, output: str, values: dict[str, Any], measure: Any) -> dict[str, Any]:
    """Trains on two nodes with `comm.algorithm = auto`, another cache folder, and given times."""
    places = {"LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2}
    place = {name: str(number) for name, number in places.items()}
    with (
        mock.patch.dict("os.environ", {"XDG_CACHE_HOME": f"{output}-cache", **place}),
        mock.patch.object(exchange_probe.AllReduceProbe, "measure", measure),
    ):
        return run_small(output, **LARGE | values).summary


def test_auto_measures_once_and_a_resumed_run_chooses_the_same(tmp_path: Path) -> None:
    values = {"comm__fusion_mib": 0.3, **EVERY_STEP}
    whole = run_ranks(4, _auto, str(tmp_path / "a"), values, _crafted)[0]
    assert "tree" in whole["chosen"]["exchange"]
    assert "kept in" in whole["chosen"]["exchange measured"]
    path = tmp_path / "a/plan.toml"
    assert PlanFile.read(path).measured == tuple(_crafted(None, None))
    rest = values | {"run__resume": str(tmp_path / "a/checkpoints/step-00000003.pt")}
    resumed = run_ranks(4, _auto, str(tmp_path / "b"), rest, _probed)[0]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert PlanFile.read(tmp_path / "b/plan.toml") == replace(
        PlanFile.read(path), path=str(tmp_path / "b/plan.toml")
    )
    # Another plan, by the constants of the checkpoint.
    other = run_ranks(4, _auto, str(tmp_path / "c"), rest | {"comm__fusion_mib": 0.2}, _probed)[0]
    assert "tree" in other["chosen"]["exchange"]
    assert other["chosen"]["exchange measured"] == "measured when the run began"
    planned = run_ranks(4, _auto, str(tmp_path / "d"), {"comm__plan": str(path)}, _probed)[0]
    assert planned["weights_sha256"] == whole["weights_sha256"]


def test_one_rank_exchanges_nothing(tmp_path: Path) -> None:
    assert "exchange" not in run_small(tmp_path / "a").summary["chosen"]


def test_a_run_leaves_its_plan_which_another_may_take(tmp_path: Path) -> None:
    made = run_on_ranks(2, tmp_path / "a", LARGE | HYBRID)[0]
    path = tmp_path / "a/plan.toml"
    assert PlanFile.read(path).cluster == ClusterFacts(ranks=2, nodes=1)
    planned = run_on_ranks(2, tmp_path / "b", LARGE | {"comm__plan": str(path)})[0]
    assert planned["weights_sha256"] == made["weights_sha256"]
    assert planned["chosen"]["exchange"] == made["chosen"]["exchange"] + f" (plan {path})"
    assert PlanFile.read(tmp_path / "b/plan.toml") == PlanFile.read(path)


@pytest.mark.parametrize(
    ("ranks", "values", "idle"),
    [
        (1, {"comm__wire": "float16"}, "comm.wire = 'float16': with one rank"),
        # Buckets with an algorithm are rounded to their wire format on one rank, too.
        (1, {"comm__algorithm": "ring", "comm__wire": "float16"},
         "comm.algorithm = 'ring': with one rank"),
        (1, {"run__strategy": "asynchronous"}, "run.strategy = 'asynchronous': with one rank"),
        (2, {"comm__algorithm": "ring", "comm__wire": "float16"}, ""),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(
    tmp_path: Path, ranks: int, values: dict[str, Any], idle: str
) -> None:
    assert exchange_plan.describe_idle(small_config(tmp_path, **values), ranks) == idle


def test_no_shipped_recipe_has_settings_without_effect() -> None:
    optim = {path.stem: load_config(path.stem, {}).optim for path in RECIPES.glob("*.toml")}
    assert len(optim) > 10
    assert not {name: found for name, own in optim.items() if (found := own.unused())}


INT8: dict[str, Any] = {"comm__wire": "int8", "comm__fusion_mib": 0.02}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that remembers nothing, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run_on_ranks(2, folder, EVERY_STEP)
    return folder


def test_a_resumed_run_is_bit_identical(tmp_path: Path, plain_run: Path) -> None:
    whole = run_on_ranks(2, tmp_path / "a", INT8 | EVERY_STEP)[0]
    plain = summary(plain_run)
    assert whole["weights_sha256"] != plain["weights_sha256"]
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    state = Checkpoint.read(saved).exchange
    assert state["kind"] == "residuals"
    assert len(state["ranks"]) == 2
    again = run_on_ranks(2, tmp_path / "b", INT8 | {"run__resume": str(saved)})
    assert {summary["weights_sha256"] for summary in again} == {whole["weights_sha256"]}
    assert "exchange state" not in again[0]["chosen"]
    for field in ("exchange_state_bytes", "exchange_state_bytes_per_parameter"):
        assert whole[field] > 0
        assert plain[field] == 0
    sent = whole["exchange_bytes_per_step"] / plain["exchange_bytes_per_step"]
    assert 0.25 < sent < 0.3, "a rank sends less than its gradients"

    # Elsewhere: one rank exchanges nothing.
    alone = run_small(tmp_path / "c", run__resume=str(saved), **INT8).summary
    assert "not used" in alone["chosen"]["exchange state"]
    assert "residuals" in alone["chosen"]["exchange state"]
    assert "residuals" not in plain["chosen"].get("exchange state", "")


def test_a_checkpoint_without_the_state_starts_it_afresh(tmp_path: Path, plain_run: Path) -> None:
    saved = str(plain_run / "checkpoints/step-00000003.pt")
    values = INT8 | {"run__resume": saved}
    found = run_on_ranks(2, tmp_path / "b", values)[0]
    assert "start afresh" in found["chosen"]["exchange state"]
    assert not Checkpoint.read(Path(saved)).exchange
