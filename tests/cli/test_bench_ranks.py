"""`paceline bench allreduce`, `bench exchange` and `tune` through the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import Call, is_launchers
from paceline.bench.cluster import why_unavailable
from paceline.plan import ClusterFacts, PlanFile

TABLE = '[[sizes]]\nup_to_bytes = 8192\nalgorithm = "hierarchical"\n[[sizes]]\nalgorithm = "ring"\n'


def paceline(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip


def test_allreduce_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "sizes.toml").write_text(TABLE)
    done = paceline(
        tmp_path, "bench", "allreduce", "--ranks", "2", "--bytes", "4KiB,64KiB", "--wire", "float16",
        "--algorithms", "ring,torus2d", "--sizes", "sizes.toml", "--iterations", "3",
        "--warm-up", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ways = ["native", "ring", "torus2d", "hybrid"]
    assert [(row["bytes"], row["algorithm"]) for row in report["rows"]] == [
        (size, way) for size in (4096, 65536) for way in ways
    ]
    for row in report["rows"]:
        assert len(row["samples_s"]) == 3
        assert min(row["samples_s"]) <= row["s_p10"] <= row["s"] <= row["s_p90"]
        # Two ranks: 2(p − 1)/p is 1.
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"])
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["s"] / 1e9)
    assert [r["speed_against_native"] for r in report["rows"] if r["algorithm"] == "native"] == [
        1,
        1,
    ]
    # 64 KiB of float32 are 32 KiB on the wire, above the table's first limit.
    chosen = [row["chosen"] for row in report["rows"] if row["algorithm"] == "hybrid"]
    assert chosen == ["hierarchical", "ring"]
    assert report["cluster"]["ranks"] == 2
    assert report["versions"]["torch"]


def test_exchange_on_two_ranks(tmp_path: Path) -> None:
    done = paceline(
        tmp_path, "bench", "exchange", "--model", "resnet_tiny", "--ranks", "2",
        "--algorithm", "hierarchical", "--fusion-mib", "0.1", "--iterations", "2", "--warm-up", "1",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {row["way"]: row for row in report["rows"]}
    assert list(rows) == [
        "ddp", "ddp fp16 hook", "ours float32", "ours float16", "backward alone",
    ]  # fmt: skip
    assert rows["ddp"]["speed_against_ddp"] == 1
    assert "hierarchical" in rows["ours float16"]["about"]
    assert all(len(row["samples_s"]) == 2 for row in rows.values())
    assert report["bytes"] > 0


def test_one_file_from_tune_to_the_run(tmp_path: Path) -> None:
    """Links, times and a profiled step are measured; the same file trains, predicts and is kept."""
    flags = (
        "tune",
        "quickstart",
        "--ranks",
        "2",
        "--max-bytes",
        "4KiB",
        "--algorithms",
        "ring,tree",
        "--iterations",
        "3",
        "--accept-noise",
        "-b",
        "4",
        "--set",
        "run.global_batch_size=8",
    )
    done = paceline(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert "written to plan.toml; train with --plan plan.toml" in done.stdout
    found = PlanFile.read(tmp_path / "plan.toml")
    assert [row.size_bytes for row in found.measured] == [1024, 4096]
    assert all(set(row.medians_s) == {"native", "ring", "tree"} for row in found.measured)
    assert found.probed is not None
    assert found.probed.intra is not None
    assert (found.probed.facts, found.probed.inter) == (ClusterFacts(2, 1), None)
    assert found.probed.hidden_cost is not None
    assert 0 <= found.probed.hidden_cost < 50
    assert found.profile.model == "resnet_tiny"
    assert found.expected is not None
    assert found.expected.batch == 4
    kinds = [line.partition(":")[0] for line in found.why]
    assert {"measured", "chosen", "expected"} == set(kinds)
    again = paceline(tmp_path, *flags).stderr
    assert again.startswith("paceline: error: --output = 'plan.toml': is there already")
    predicted = paceline(tmp_path, "plan", "--cluster", "plan.toml", "-b", "4", "--json")
    assert json.loads(predicted.stdout)["step_s"] == pytest.approx(found.expected.step_s, rel=0.01)
    trained = paceline(
        tmp_path, "train", "quickstart", "--plan", "plan.toml", "--nproc-per-node", "2", "-b", "4",
        "--global-batch-size", "8", "--epochs", "1", "--set", "data.source=synthetic", "--set",
        "data.synthetic_samples=16", "--set", "data.synthetic_classes=10", "--output", "run",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    kept = PlanFile.read(tmp_path / "run" / "plan.toml")
    assert (kept.plan, kept.expected) == (found.plan, found.expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench allreduce", "--ranks: no ranks to measure between; give --ranks 8"),
        ("bench allreduce --ranks 2 --algorithms rign", "--algorithms = 'rign': unknown"),
        ("bench allreduce --ranks 2 --bytes 4q", "--bytes = '4q': is not a size"),
        ("bench allreduce --ranks 2 --bytes 0.1", "--bytes = '0.1': is not a size"),
        (f"tune --ranks 2 --min-bytes {'9' * 400}", "is not a size"),
        ("bench allreduce --ranks 2 --factor 1", "--factor = 1.0: must be above 1"),
        ("bench allreduce --ranks 2 --wire fp8", "--wire = 'fp8': unknown"),
        ("bench allreduce --ranks 2 --min-bytes 1M --max-bytes 1k", "--min-bytes = '1M': is more"),
        ("bench allreduce --ranks 2 --iterations 0", "--iterations = 0: must be at least 1"),
        ("bench allreduce --ranks 2 --sizes none.toml", "comm.sizes = 'none.toml': cannot be read"),
        ("bench allreduce --ranks 2 --device gpu", "run.device = 'gpu': unknown"),
        ("bench allreduce --ranks 2 --backend mpi", "comm.backend = 'mpi': unknown"),
        ("bench exchange --ranks 2 --model resnet51", "model.name = 'resnet51': is not a model"),
        ("bench exchange --ranks 2 --algorithm rign", "comm.algorithm = 'rign': unknown"),
        ("bench exchange --ranks 2 --plan a --sizes b", "--sizes: cannot be given with --plan"),
        ("bench exchange --ranks 2 --plan a", "comm.plan = 'a': cannot be read"),
        ("tune --ranks 2 --margin 1", "--margin = 1.0: must be 0 or more and below 1"),
        ("tune --ranks 2 --iterations 1", "--iterations = 1: must be at least 3"),
        ("tune --ranks 2 -b 4", "has no model to belong to; give --model or a recipe"),
        ("tune --ranks 2 --model resnet51", "model.name = 'resnet51': is not a model"),
        ("tune --ranks 2 -o none/x.toml", "--output = 'none/x.toml': its folder does not exist"),
    ],
)
def test_mistakes_are_one_line(call: Call, arguments: str, words: str) -> None:
    done = call(*arguments.split())
    assert done.code == 2
    assert words in done.error_line()


def test_an_emulated_cluster(tmp_path: Path) -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(f"no emulated cluster here: {reason}")
    done = paceline(
        tmp_path, "bench", "allreduce", "--hosts", "2", "--link-mbit", "100", "--bytes", "256KiB",
        "--algorithms", "ring", "--iterations", "3", "--warm-up", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["cluster"]["hosts"], report["cluster"]["ranks_per_host"]) == (2, [1, 1])
    for row in report["rows"]:
        # The link is real: nothing is faster than its rate and its bucket allow.
        assert 0 < row["link_share"] < 1.3
