"""`paceline plan` predicts how fast a job runs on a cluster and which plan is fastest, without torch;
`paceline profile` measures a training step on this device for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.core.errors import ConfigError
from paceline.core.untrusted import one_line
from paceline.plan.plan_file import PlanFile

if TYPE_CHECKING:
    from paceline.plan.answer import Answer
    from paceline.plan.cluster import Cluster
    from paceline.plan.fusion_plan import FusionPlan
    from paceline.plan.plan_file import PlanFile
    from paceline.plan.workload import Workload


def plan(
    model: str = typer.Option("", help="Which model; resnet50, or the profile's."),
    gpu: str = typer.Option("", help="An accelerator of the catalogue, such as H100."),
    profile: Path | None = typer.Option(
        None, help="What paceline profile or tune wrote; --gpu is then for the links inside a node."
    ),
    nodes: int | None = typer.Option(None, help="Nodes; 1, or as in the cluster file."),
    gpus_per_node: int | None = typer.Option(None, help="Ranks of a node; 8."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Of one GPU."),
    node_gbps: float | None = typer.Option(None, help="All links of a node, Gb/s; 100."),
    latency_us: float | None = typer.Option(None, help="Start of a message between nodes; 10."),
    links: int | None = typer.Option(None, help="Links of a node; 1."),
    oversubscription: float | None = typer.Option(None, help="Between nodes; 1."),
    cluster: Path | None = typer.Option(None, help="What paceline tune wrote, instead of flags."),
    epochs: float = typer.Option(90.0, help="Epochs of the job."),
    dataset_size: int = typer.Option(1_281_167, help="Training images."),
    image_size: int | None = typer.Option(None, help="Edge of the images in pixels; 224."),
    input_images_per_s: float = typer.Option(0.0, help="What a rank's input delivers; 0: enough."),
    algorithm: list[str] = typer.Option([], help="Allowed all-reduces; may be repeated. All."),
    wire: list[str] = typer.Option(
        [], help="Allowed formats: auto (as held), fp32, fp16, bf16; may be repeated. auto."
    ),
    with_plan: Path | None = typer.Option(None, help="Score this plan file instead of the best."),
    plan_out: Path | None = typer.Option(None, help="Write the plan, for comm.plan."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a page with plots."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """Predict a job's speed and choose its fusion plan."""
    from paceline.plan.answer import Answer, Question, advise, largest_ranks, scaling_curve
    from paceline.plan.fusion_plan import wire_names
    from paceline.plan.optimizer import best_plan
    from paceline.plan.plan_file import PlanFile
    from paceline.plan.prediction import predict
    from paceline.plan.schedules import algorithm_names

    if not 0 < epochs < float("inf") or dataset_size < 1:
        raise ConfigError("--epochs, --dataset-size", (epochs, dataset_size), "must be above 0")
    flags = {
        "gpus_per_node": gpus_per_node, "node_gbps": node_gbps, "latency_us": latency_us,
        "links": links, "oversubscription": oversubscription,
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    if cluster is not None and given:
        name, value = next(iter(given.items()))
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(flag, value, "is in the cluster file already", "leave out one of them")
    file = PlanFile() if cluster is None else PlanFile.read(cluster, "--cluster")
    if profile is not None:
        file = replace(file, workload=PlanFile.read(profile, "--profile").profile)
    elif gpu:
        file = replace(file, workload=None)
    work = _workload(model, gpu, file.workload, image_size, input_images_per_s)
    place = _gpu_cluster(gpu, nodes, given) if cluster is None else file.planned_cluster()
    place = place if nodes is None else place.with_nodes(nodes)
    known = place.probed.algorithms if place.probed else algorithm_names()
    wires = wire_names(wire or ("auto",))
    question = Question(work, batch_size, tuple(algorithm) or known, wires)
    if with_plan is None:
        chosen = best_plan(work, place, batch_size, question.algorithms, wires)
    elif algorithm or wire:
        raise ConfigError(
            "--with-plan", str(with_plan), "decides algorithms and wire itself",
            "leave out --algorithm and --wire",
        )  # fmt: skip
    else:
        chosen = _given_plan(with_plan, work, place)
    now = predict(work, place, chosen, batch_size)
    answer = Answer(
        work, place, now, tuple(scaling_curve(question, place)), largest_ranks(question, place),
        tuple(advise(question, place, now)), epochs, dataset_size,
        file.probed is None or file.probed.device == "cuda",
    )  # fmt: skip
    if plan_out is not None:
        _write_plan(plan_out, file, chosen, answer)
    if as_json:
        typer.echo(json.dumps(answer.to_json()))
    else:
        _print(answer)
    if html is not None:
        typer.echo(f"page: {_write_page(html, answer)}", err=as_json)
    return 0


def _write_page(path: Path, answer: Answer) -> Path:
    from paceline.report.plan_page import PAGE_NAME, plan_page
    from paceline.report.run_page import write_page

    return write_page(plan_page(answer), path, PAGE_NAME)


def _given_plan(path: Path, work: Workload, place: Cluster) -> FusionPlan:
    from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile

    file = PlanFile.read(path)
    model = ModelFacts.of((gradient.name, gradient.elements) for gradient in work.gradients)
    file.check(model, ClusterFacts(place.ranks, place.nodes), str(path))
    return file.plan


def _workload(
    model: str, gpu: str, profiled: Workload | None, image_size: int | None, input_rate: float
) -> Workload:
    from paceline.plan.cluster import accelerator, catalogue
    from paceline.plan.networks import analytic_workload, network
    from paceline.plan.workload import Affine

    if profiled is None and not gpu:
        raise ConfigError(
            "--gpu", None, "give either --gpu or --profile",
            f"known GPUs are {', '.join(catalogue())}",
        )  # fmt: skip
    if input_rate < 0:
        raise ConfigError("--input-images-per-s", input_rate, "must be 0 or more")
    if profiled is None:
        work = analytic_workload(network(model or "resnet50", image_size or 224), accelerator(gpu))
    else:
        if image_size is not None:
            raise ConfigError("--image-size", image_size, "a profile has its own", "leave it out")
        if model and profiled.model != model:
            raise ConfigError(
                "--model", model, f"the profile is of {profiled.model}",
                f"profile {model}, or leave --model out",
            )  # fmt: skip
        work = profiled
    return replace(work, input=Affine(0.0, 1 / input_rate)) if input_rate else work


def _gpu_cluster(gpu: str, nodes: int | None, flags: dict[str, Any]) -> Cluster:
    from paceline.plan.cluster import accelerator, gpu_cluster

    values: dict[str, Any] = {"gpus_per_node": 8, "node_gbps": 100.0} | flags
    if not gpu and values["gpus_per_node"] > 1:
        raise ConfigError(
            "--gpu", None, "the links inside a node are not known",
            "name the GPU, or give --cluster, or --gpus-per-node 1",
        )  # fmt: skip
    return gpu_cluster(accelerator(gpu or "CPU"), 1 if nodes is None else nodes, **values)


def _write_plan(path: Path, file: PlanFile, chosen: FusionPlan, answer: Answer) -> None:
    """What the cluster's file has stays in the new one, unless it is for another number of nodes."""
    from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile

    work, place = answer.workload, answer.cluster
    cluster = ClusterFacts(place.ranks, place.nodes)
    kept = file if file.cluster == cluster else PlanFile(workload=file.workload)
    sizes = ((gradient.name, gradient.elements) for gradient in work.gradients)
    replace(
        kept, fusion=chosen, model=ModelFacts.of(sizes), cluster=cluster,
        expected=Expected.of(answer.now), start_up=answer.start_up, why=(),
    ).write(path)  # fmt: skip


def _print(answer: Answer) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.plan.answer import advice_rows, bucket_rows, curve_rows, fact_rows

    console = Console()
    facts = Table(show_header=False, box=None)
    for row in fact_rows(answer):
        facts.add_row(*(Text(one_line(cell)) for cell in row))
    console.print(facts)
    for head, rows in (
        (("buckets", "tensors", "MiB", "algorithm", "ready ms", "start ms", "end ms"),
         bucket_rows(answer)),
        (("ranks", "images/s", "efficiency", "exposed ms"), curve_rows(answer)),
        (("what would help", "images/s"), advice_rows(answer)),
    ):  # fmt: skip
        table = Table(*head)
        for row in rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        console.print(table)


def profile(
    model: str = typer.Option("resnet50", help="Which model (docs/models.md)."),
    batch_size: list[int] = typer.Option(
        [], "--batch-size", "-b", help="May be repeated: two or more give the fixed part of a step."
    ),
    image_size: int = typer.Option(224, help="Edge of the images in pixels."),
    classes: int = typer.Option(1000, help="Number of classes."),
    amp_dtype: str = typer.Option("auto", help="fp16, bf16, fp32 or auto."),
    steps: int = typer.Option(20, help="Steps to time at each batch; the median counts."),
    warm_up: int = typer.Option(5, help="Steps before."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    output: Path = typer.Option(Path("profile.toml"), help="Where to write it."),
    force: bool = typer.Option(False, "--force", help="Write over a file that is there."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """Measure a training step on this device, for the planner."""
    from paceline.bench.step import StepRow
    from paceline.cli.bench import chosen_device
    from paceline.cli.tune import check_output
    from paceline.models.settings import check_model_name

    check_model_name(model)
    place = chosen_device(device)
    batches = batch_size or ([64, 256] if place == "cuda" else [4, 16])
    for flag, count in (("--batch-size", min(batches)), ("--steps", steps), ("--warm-up", warm_up)):
        if count < 1:
            raise ConfigError(flag, count, "must be at least 1")
    check_output(output, force)
    from paceline.bench.profile import profile_workload

    switches = {"precision.amp_dtype": amp_dtype}
    row = StepRow("profile", "ours", model, max(batches), image_size, classes, place, steps, warm_up,
                  switches)  # fmt: skip
    work = profile_workload(row, batches)
    PlanFile(workload=work).write(output)
    if as_json:
        typer.echo(json.dumps(work.to_table()))
        return 0
    largest = max(batches)
    typer.echo(
        f"{model}, {work.source}: {1e3 * work.compute_s(largest):.2f} ms at batch {largest}: forward "
        f"{1e3 * work.forward.at(largest):.2f}, backward {1e3 * work.backward.at(largest):.2f}, "
        f"update {1e3 * work.update_s:.2f}; {1e3 * (work.forward.fixed_s + work.backward.fixed_s):.2f}"
        f" ms at any batch; {len(work.gradients)} gradients. Written to {output}"
    )
    return 0
