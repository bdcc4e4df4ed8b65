"""`paceline bench` and `paceline tune`: JSON, tables, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import Call, run
from data_sets import write_shards
from paceline.plan import ClusterFacts, PlanFile
from paceline.planner.plan_parts import required_profile

TINY = ("--model", "resnet_tiny", "--device", "cpu")
INPUT = ("bench", "input", "--data-dir", "data", "--image-size", "28", "-b", "4", "--rounds", "1",
         "--device", "cpu")  # fmt: skip


def on_ranks(cwd: Path, *arguments: str) -> str:
    """Standard output of a command that starts ranks."""
    done = run(arguments, cwd, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    return done.out


def report_of(cwd: Path, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(on_ranks(cwd, *arguments, "--json")))


def test_step(call: Call) -> None:
    done = call("bench", "step", *TINY, "--image-size", "28", "--classes", "5", "-b", "4", "--steps",
                "2", "--warm-up", "1", "--set", "optim.name=sgd", "--json")  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads(done.out)
    (row,) = report["rows"]
    assert row["images_per_s"] > 0
    assert row["steps"] == 2
    assert "sgd" in row["what"]
    assert report["versions"]["torch"]
    assert report["settings"]["batch_size"] == 4


def test_input(call: Call, tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    done = call(*INPUT, "--seconds", "0.05", "--workers", "1,2", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert [row["name"] for row in report["rows"]] == ["ours × 1", "ours × 2"]
    assert all(len(row["rounds"]) == 1 for row in report["rows"])
    assert report["versions"]["torch"]
    plain = call(*INPUT, "--seconds", "0.01", "--workers", "1", "--decoder", "pillow")
    assert plain.code == 0, plain.err
    assert "ours × 1" in plain.out


def test_allreduce_on_two_ranks(tmp_path: Path) -> None:
    report = report_of(
        tmp_path, "bench", "allreduce", "--nproc-per-node", "2", "--bytes", "4KiB,64KiB",
        "--wire", "float16", "--algorithms", "ring,torus2d", "--iterations", "3",
        "--warm-up", "1",
    )  # fmt: skip
    rows = report["rows"]
    assert [(row["bytes"], row["algorithm"]) for row in rows] == [
        (size, way) for size in (4096, 65536) for way in ("native", "ring", "torus2d")
    ]
    for row in rows:
        assert len(row["samples_s"]) == 3
        assert min(row["samples_s"]) <= row["s_p10"] <= row["s"] <= row["s_p90"]
        # Two ranks: 2(p − 1)/p is 1.
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"])
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["s"] / 1e9)
        assert row["algorithm"] != "native" or row["speed_against_native"] == 1
    assert report["cluster"]["ranks"] == 2
    assert report["versions"]["torch"]


def test_one_file_from_tune_to_the_run(tmp_path: Path) -> None:
    """Links, times and a profiled step are measured, with the classes of the data; the same file trains,
    predicts and is kept."""
    write_shards(tmp_path / "data", train=16)
    flags = ("tune", "quickstart", "--data-dir", "data", "--nproc-per-node", "2", "--max-bytes", "4KiB",
             "--algorithms", "ring,tree",
             "--iterations", "3", "--accept-noise", "-b", "4", "--set",
             "run.global_batch_size=8")  # fmt: skip
    assert "plan.toml" in on_ranks(tmp_path, *flags)
    found = PlanFile.read(tmp_path / "plan.toml")
    assert [row.size_bytes for row in found.measured] == [1024, 4096]
    assert all(set(row.medians_s) == {"native", "ring", "tree"} for row in found.measured)
    assert found.probed.intra is not None
    assert (found.probed.facts, found.probed.inter) == (ClusterFacts(2, 1), None)
    assert found.probed.hidden_cost is not None
    assert required_profile(found).model == "resnet_tiny"
    assert {line.partition(":")[0] for line in found.why} == {"measured", "chosen", "expected"}
    assert "--output = 'plan.toml'" in run(flags, tmp_path).error_line()
    predicted = json.loads(
        on_ranks(tmp_path, "plan", "--cluster", "plan.toml", "-b", "4", "--json")
    )
    assert predicted["step_s"] == pytest.approx(found.expected.step_s, rel=0.01)
    on_ranks(
        tmp_path, "train", "quickstart", "--plan", "plan.toml", "--nproc-per-node", "2", "-b", "4",
        "--global-batch-size", "8", "--epochs", "1", "--data-dir", "data", "--output", "run",
    )  # fmt: skip
    kept = PlanFile.read(tmp_path / "run" / "plan.toml")
    assert (kept.plan, kept.expected) == (found.plan, found.expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("step --model resnet51", "model.name = 'resnet51'"),
        ("step --set run.nonsense=1", "run.nonsense"),
        ("step --device gpu", "--device = 'gpu'"),
        ("step --device cpu --model resnet_tiny -b 1000000000000", "out of memory with batches"),
        ("input", "--data-dir"),
        ("input --data-dir data --workers 0", "--workers = '0'"),
        ("input --data-dir data --device cpu --decoder nvjpeg", "nvjpeg"),
        ("input --data-dir none", "none"),
        ("input --data-dir none --set optim.name=sgd", "'optim.name'"),
        ("allreduce", "--nproc-per-node"),
        ("allreduce --nproc-per-node 2 --algorithms rign", "--algorithms = 'rign'"),
        ("allreduce --ranks 2 --bytes 4q", "--bytes = '4q'"),
        ("allreduce --nproc-per-node 2 --factor 1", "--factor = 1.0"),
        ("allreduce --nproc-per-node 2 --min-bytes 1M --max-bytes 1k", "--min-bytes = '1M'"),
        ("allreduce --nproc-per-node 2 --device gpu", "run.device = 'gpu'"),
    ],
)
def test_mistakes_are_one_line(call: Call, tmp_path: Path, arguments: str, words: str) -> None:
    if "data-dir data" in arguments:
        write_shards(tmp_path / "data")
    assert words in call("bench", *arguments.split()).error_line()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--margin 1", "--margin = 1.0"),
        ("--iterations 1", "--iterations = 1"),
        ("-o none/x.toml", "--output = 'none/x.toml'"),
        ("quickstart --data-dir none", "none: no such directory"),
        (f"--min-bytes {'9' * 400}", "--min-bytes"),
    ],
)
def test_mistakes_of_tune_are_one_line(call: Call, arguments: str, words: str) -> None:
    done = call("tune", "--nproc-per-node", "2", *arguments.split())
    assert words in done.error_line()
    assert done.code == (1 if "--data-dir" in arguments else 2)
