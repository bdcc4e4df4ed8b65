"""TOML and JSON: recipes, plans, clusters, profiles, size tables, run records; flags, environments."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fuzz.mutate import to_toml
from fuzz.target import Seed, Target
from paceline.cli.plan_page import (
    bucket_rows,
    curve_rows,
    fact_rows,
    option_rows,
    plan_page,
)
from paceline.comm.plan_choice import PlanChoice
from paceline.comm.probe_cache import ProbeCache
from paceline.comm.settings import CommSettings, HybridSettings
from paceline.config import RECIPES, load_config, parse_assignment
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.core.units import parse_bytes
from paceline.plan.fusion_plan import FusionPlan, TensorSpec
from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import (
    ClusterFacts,
    LinkFacts,
    ModelFacts,
    PlanFile,
    ProbedCluster,
)
from paceline.plan.schedules import algorithm_names
from paceline.plan.size_choice import choose_bucket_bytes
from paceline.plan.size_table import MeasuredSize, SizeRow, SizeTable
from paceline.planner.accelerators import accelerator, gpu_cluster
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.answer import Answer, Question
from paceline.planner.layers import network
from paceline.planner.memory import step_memory
from paceline.planner.plan_parts import planned_cluster, required_profile
from paceline.planner.prediction import predict
from paceline.planner.recommend import Job, Limits, limits_of
from paceline.report import RunFiles, render_run, summary_rows, verdict
from paceline.report.compare_page import render_comparison
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from paceline.report.live_run import LiveRun
from plan.made import made_cluster, made_workload
from report.made_up_runs import CONFIG, SUMMARY, finished_events

_TENSORS = tuple(TensorSpec(name, (4,), "float32") for name in ("t0", "t1", "t2", "t3"))
_FACTS = ClusterFacts(ranks=2, nodes=1)


def document_targets() -> Sequence[Target]:
    work = made_workload(half=True)
    return [
        Target("toml recipe", _recipes(), _recipe, 14, form="toml"),
        Target("toml plan", _plans(), _plan, 8, form="toml"),
        Target("toml cluster", _clusters(), _planner(None), 6, form="toml"),
        Target("toml profile", [_document("p.toml", work.to_table())], _planner(made_cluster()), 6,
               form="toml"),
        Target("toml accelerator", _accelerators(), _accelerator, 3, form="toml"),
        Target("toml sizes", _clusters(), _sizes, 8, form="toml"),
        Target("toml constants", _constants(), _use_constants, 4, form="toml"),
        Target("jsonl metrics", _metrics(), _run_file, 6, form="jsonl"),
        Target("json summary", [_json("summary.json", SUMMARY)], _run_file, 4, form="json"),
        Target("toml run config", [_document("config.toml", CONFIG)], _run_file, 3, form="toml"),
        Target("json evaluation", [_json("evaluation.json", _evaluation())], _run_file, 4, form="json"),
        Target("flags", _flags(), _flag, 8),
        Target("environment", _environments(), _environment, 6, form="json"),
    ]  # fmt: skip


def _document(name: str, tree: dict[str, Any]) -> Seed:
    return Seed(name, to_toml(tree), tree)


def _json(name: str, tree: Any) -> Seed:
    return Seed(name, json.dumps(tree).encode(), tree)


def _recipes() -> list[Seed]:
    contents = {path.name: path.read_bytes() for path in sorted(RECIPES.glob("*.toml"))}
    return [Seed(name, c, tomllib.loads(c.decode())) for name, c in contents.items()]


def _recipe(content: bytes, name: str, folder: Path) -> None:
    path = folder / f"own-{name}"
    path.write_bytes(content)
    made = load_config(str(path), {"run.seed": 3})
    assert load_config(None, made.flat()) == made
    assert tomllib.loads(made.to_toml())


def _plans() -> list[Seed]:
    work, place = made_workload(), made_cluster(1, 2)
    model = ModelFacts.of((spec.name, spec.length) for spec in _TENSORS)
    plan = best_plan(work, place, 8)
    expected = predict(work, place, plan, 8).expected()
    single = FusionPlan.single([spec.name for spec in _TENSORS])
    return [
        _document("plan.toml", {
            "model": asdict(model), "cluster": asdict(_FACTS), "expected": expected.to_table(),
            **made.to_table(),
        })
        for made in (plan, single)
    ]  # fmt: skip


def _plan(content: bytes, name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(content)
    found = PlanFile.read(path)
    _strict_json(found.expected.to_table() if found.expected else {})
    PlanChoice.read(CommSettings(plan=str(path)), _TENSORS, _FACTS)


def _clusters() -> list[Seed]:
    link = LinkFacts(1e-4, 1e-9, 0.1, 1.5)
    sizes = (1024, 65536, 2**20)
    measured = tuple(MeasuredSize(s, {"native": s * 1e-8, "ring": s * 2e-8}) for s in sizes)
    table = SizeTable((SizeRow("native", 4096), SizeRow("ring")))
    shapes = (
        ProbedCluster((2,), "gloo", "cpu", link),
        ProbedCluster((2, 2), "nccl", "cuda", link, link, 0.2),
    )
    chosen = ("native", "ring", "ring")
    found = [
        PlanFile(cluster=shape.facts, sizes=table, measured=measured, chosen=chosen, probed=shape,
                 why=("measured",)).to_tables()
        for shape in shapes
    ]  # fmt: skip
    return [*(_document("c.toml", tree) for tree in found), _document("c.toml", table.to_table())]


_TWO_RANKS = ProbedCluster((2,), "gloo", "cpu")


def _constants() -> list[Seed]:
    measured = tuple(MeasuredSize(s, {"native": 2e-3, "ring": 1e-3}) for s in (1024, 65536))
    probed = replace(_TWO_RANKS, intra=LinkFacts(1e-4, 1e-9, 0.1, 1.5))
    file = PlanFile(cluster=probed.facts, probed=probed, measured=measured)
    return [_document("constants.toml", file.to_tables())]


def _use_constants(content: bytes, name: str, folder: Path) -> None:
    """The cache of `comm.algorithm = auto`: a file that cannot be used is ignored with a line."""
    cache = ProbeCache({}, folder)
    cache.write(content)
    found, problem = cache.read(_TWO_RANKS)
    assert problem.isprintable()
    if found is None:
        raise ConfigError("constants", None, problem)
    settings = CommSettings(fusion_mib=0.0)
    PlanChoice.read(settings, _TENSORS, _FACTS, found).plan([spec.name for spec in _TENSORS])
    choose_bucket_bytes([("a", 9 << 20), ("b", 9 << 20)], SizeTable.single("ring"), found.measured)


def _planner(cluster: Any) -> Callable[[bytes, str, Path], None]:
    """Everything that `paceline plan` computes and shows; a NaN anywhere is a finding."""

    def drive(content: bytes, name: str, folder: Path) -> None:
        path = folder / name
        path.write_bytes(content)
        place = cluster or planned_cluster(PlanFile.read(path, "--cluster"))
        work = made_workload(half=True)
        if cluster is not None:
            work = required_profile(PlanFile.read(path, "--profile"))
        algorithms = place.probed.algorithms if place.probed else algorithm_names()
        question = Question(work, 16, algorithms)
        plan = best_plan(work, place, 16, algorithms)
        limits = Limits(price=2.0, minutes=5.0)
        job = Job(90.0, 1000, 400.0, limits.price)
        answer = Answer.of(question, place, plan, job=job, limits=limits)
        _strict_json(answer.to_json())
        for rows in (fact_rows, bucket_rows, curve_rows, option_rows):
            assert all(isinstance(cell, str) for row in rows(answer) for cell in row)
        _check_page(plan_page(answer))
        model = ModelFacts.of((gradient.name, gradient.elements) for gradient in work.gradients)
        made = PlanFile(plan, model, ClusterFacts(place.ranks, place.nodes), answer.now.expected())
        made.write(folder / "plan.toml")
        assert PlanFile.read(folder / "plan.toml").plan == plan

    return drive


def _accelerators() -> list[Seed]:
    text = (
        resources.files("paceline.planner")
        .joinpath("accelerators.toml")
        .read_text(encoding="utf-8")
    )
    chips = tomllib.loads(text)
    return [_document("chip.toml", {name: chips[name]}) for name in ("A100", "P100", "H200", "CPU")]


def _accelerator(content: bytes, name: str, folder: Path) -> None:
    """Every time, memory and price of a step on it."""
    path = folder / name
    path.write_bytes(content)
    chip = accelerator(str(path))
    net = network("resnet18")
    work, place = analytic_workload(net, chip), gpu_cluster(chip, 2)
    limits = limits_of(net, chip, price=2.0)
    job = Job(90.0, 1000, chip.watts, limits.price)
    plan = best_plan(work, place, 1)
    answer = Answer.of(
        Question(work, 1, algorithm_names()), place, plan, job=job, limits=limits,
        memory=step_memory(net, 1, work.in_half),
    )  # fmt: skip
    assert answer.now.step_s > 0
    _strict_json(answer.to_json())
    _check_page(plan_page(answer))


def _sizes(content: bytes, name: str, folder: Path) -> None:
    path = folder / name
    path.write_bytes(content)
    SizeTable.read(path).choose(5000)
    _strict_json(PlanFile.read(path).to_tables())
    hybrid = {"hybrid": HybridSettings(sizes=str(path))}
    PlanChoice.read(CommSettings(algorithm="hybrid", owned=hybrid), _TENSORS, _FACTS)


def _metrics() -> list[Seed]:
    corrupt = {"event": "corrupt", "step": 2, "name": "a.png", "reason": "cut", "split": "train"}
    resumed = {
        "event": "start",
        "step": 20,
        "total_steps": 40,
        "world_size": 2,
        "resumed_from": "x",
    }
    stall = {"input_stall_s": 0.01, "input_stall_causes": {"decode": 0.01}, "exposed_comm_s": 0.02}
    rows = [{**event.to_dict(), "time": 1.7e9 + i} for i, event in enumerate(finished_events(30))]
    rows = [{**row, **stall} if row["event"] == "step" else row for row in rows]
    spread = {"min": 0.1, "median": 0.2, "max": 0.3, "rank": 1, "others": 0.2}
    of_all = dict.fromkeys(("step_s", "exposed_comm_s", "input_stall_s", "core_wait_share"), spread)
    saved = {"event": "checkpoint", "step": 19, "path": "c.pt", "save_s": 1.0, "stall_s": 0.1}
    rows += [{"event": "ranks", "step": 5, "ranks": 2, **of_all}, saved]
    rows += [corrupt, {"event": "note", "text": "a note"}]
    rows += [{**resumed, "command": "paceline train", "changed": ["optim.lr"]}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return [Seed("metrics.jsonl", text, rows), Seed("metrics.rank1.jsonl", text, rows)]


def _evaluation() -> dict[str, Any]:
    mistake = {"label": 0, "predicted": 1, "confidence": 0.9, "image": "/9j/4AAQ"}
    counts = [[0, 0, 5], [0, 1, 2], [1, 1, 7]]
    return {"step": 30, "classes": ["a", "b"], "counts": counts, "mistakes": [mistake]}


_SOUND: dict[str, bytes] = {}


def _run_file(content: bytes, name: str, folder: Path) -> None:
    """`report` and `compare` of a run, one file of which is damaged; beside it a sound run."""
    if not _SOUND:
        evaluation = {
            "event": "eval",
            "step": 30,
            "epoch": 1.0,
            "top1": 50.0,
            "loss": 1.0,
            "time": 1.7e9,
        }
        _SOUND["metrics.jsonl"] = _metrics()[0].content + json.dumps(evaluation).encode() + b"\n"
        _SOUND["summary.json"] = json.dumps(SUMMARY).encode()
        _SOUND["config.toml"] = to_toml(CONFIG)
        _SOUND["plan.toml"] = _plans()[0].content
        _SOUND["evaluation.json"] = json.dumps(_evaluation()).encode()
    for run, files in (("sound", _SOUND), ("damaged", {**_SOUND, name: content})):
        shutil.rmtree(folder / run, ignore_errors=True)
        (folder / run).mkdir()
        for file, data in files.items():
            (folder / run / file).write_bytes(data)
    live = LiveRun(folder / "damaged")
    live.refresh()
    if live.files is None and not live.problem.isprintable():
        raise AssertionError(f"not printable: {live.problem!r}")
    found = RunFiles.read(folder / "damaged")
    rows = [("", verdict(found)), *summary_rows(found)]
    for text in (cell for row in rows for cell in row):
        if not text.isprintable():
            raise AssertionError(f"not printable: {text!r}")
    _check_page(render_run(found))
    runs = read_runs([folder / "sound", folder / "damaged"])
    _check_page(render_comparison(Comparison.of(runs, [], None)))


def _check_page(page: str) -> None:
    page.encode("utf-8")
    if any(not letter.isprintable() and letter not in "\n\u00a0" for letter in page):
        raise AssertionError("a control character in the page")


def _flags() -> list[Seed]:
    texts = (
        "run.seed=3",
        "optim.lr=0.1",
        "run.traced_steps=[1,2]",
        "data.dir=a b",
        "comm.wire='x'",
        "64KiB",
    )
    return [Seed(f"{i}.txt", text.encode()) for i, text in enumerate(texts)]


def _flag(content: bytes, name: str, folder: Path) -> None:
    """As the operating system hands an argument over: bytes that are no text survive in it."""
    text = content.decode("utf-8", "surrogateescape")
    if name == "5.txt":
        assert parse_bytes("--min-bytes", text) > 0
        return
    key, value = parse_assignment(text)
    load_config("quickstart", {key: value})


def _environments() -> list[Seed]:
    common = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    torchrun = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
    }
    slurm = {
        "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[003-007,9],login", "SLURM_JOB_ID": "77",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    }  # fmt: skip
    mpi = {
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }  # fmt: skip
    pmi = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    return [_json("env.json", {**common, **part}) for part in (torchrun, slurm, mpi, pmi)]


def _environment(content: bytes, name: str, folder: Path) -> None:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        return
    if isinstance(table, dict):
        found = Topology.from_env({str(k): str(v) for k, v in table.items()})
        assert 0 <= found.rank < found.world_size
        assert 1 <= found.local_world_size <= found.world_size


def _strict_json(tree: Any) -> None:
    json.dumps(tree, allow_nan=False)
