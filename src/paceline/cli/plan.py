"""`paceline plan`: how fast a job will be, before the cluster is rented, and which plan makes it so.

In: a model or a profile, a GPU, a cluster. Out: a table, JSON, a page, a plan file. Needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.plan.answer import Answer
    from paceline.plan.cluster import Cluster
    from paceline.plan.fusion_plan import FusionPlan
    from paceline.plan.prediction import Prediction
    from paceline.plan.workload import Workload


def plan(
    model: str = typer.Option("resnet50", help="Which model."),
    gpu: str = typer.Option("", help="An accelerator of the catalogue, such as H100."),
    profile: Path | None = typer.Option(
        None, help="What paceline profile wrote, instead of --gpu."
    ),
    nodes: int = typer.Option(1, help="Number of nodes."),
    gpus_per_node: int = typer.Option(8, help="Ranks of a node."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Of one GPU."),
    node_gbps: float = typer.Option(100.0, help="All links of a node together, Gb/s."),
    latency_us: float = typer.Option(10.0, help="Start of a message between nodes."),
    links: int = typer.Option(1, help="Links of a node."),
    oversubscription: float = typer.Option(1.0, help="Of the switches between nodes."),
    cluster: Path | None = typer.Option(None, help="What paceline tune wrote, instead of flags."),
    epochs: float = typer.Option(90.0, help="Epochs of the job."),
    dataset_size: int = typer.Option(1_281_167, help="Training images."),
    image_size: int = typer.Option(224, help="Edge of the images in pixels."),
    input_images_per_s: float = typer.Option(0.0, help="What a rank's input delivers; 0: enough."),
    algorithm: list[str] = typer.Option([], help="Allowed all-reduces; may be repeated. All."),
    wire: str = typer.Option("auto", help="auto, float32, float16 or bfloat16."),
    with_plan: Path | None = typer.Option(None, help="Score this plan file instead of the best."),
    plan_out: Path | None = typer.Option(None, help="Write the plan, for comm.plan."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a page with plots."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """Predict a job's speed and choose its fusion plan."""
    from paceline.plan.answer import Answer
    from paceline.plan.choose_plan import ALGORITHMS, best_plan
    from paceline.plan.plan_file import PlanFile
    from paceline.plan.prediction import predict
    from paceline.plan.scaling import Question, advise, largest_ranks, scaling_curve

    if epochs <= 0 or dataset_size < 1:
        raise ConfigError("--epochs, --dataset-size", (epochs, dataset_size), "must be above 0")
    work = _workload(model, gpu, profile, image_size, input_images_per_s)
    place = _cluster(gpu, cluster, nodes, gpus_per_node, node_gbps, latency_us, links,
                     oversubscription)  # fmt: skip
    known = place.probed.algorithms if place.probed else ALGORITHMS
    question = Question(work, batch_size, tuple(algorithm) or known, wire)
    chosen = (
        best_plan(work, place, batch_size, question.algorithms, wire)
        if with_plan is None
        else PlanFile.read(with_plan).plan
    )
    now = predict(work, place, chosen, batch_size)
    answer = Answer(
        work, place, now, tuple(scaling_curve(question, place)), largest_ranks(question, place),
        tuple(advise(question, place, now)), epochs, dataset_size,
    )  # fmt: skip
    if plan_out is not None:
        _write_plan(plan_out, chosen, work, place, now)
    if as_json:
        typer.echo(json.dumps(answer.to_json()))
    else:
        _print(answer)
    if html is not None:
        from paceline.report.plan_page import PAGE_NAME, plan_page
        from paceline.report.write import write_page

        typer.echo(f"page: {write_page(plan_page(answer), html, PAGE_NAME)}", err=as_json)
    return 0


def _workload(
    model: str, gpu: str, profile: Path | None, image_size: int, input_images_per_s: float
) -> Workload:
    from dataclasses import replace

    from paceline.plan.accelerator import accelerator, catalogue
    from paceline.plan.analytic_workload import analytic_workload
    from paceline.plan.network import network
    from paceline.plan.workload import Affine, Workload

    if (profile is None) == (not gpu):
        raise ConfigError(
            "--gpu", gpu or None, "give either --gpu or --profile",
            f"known GPUs are {', '.join(catalogue())}",
        )  # fmt: skip
    if input_images_per_s < 0:
        raise ConfigError("--input-images-per-s", input_images_per_s, "must be 0 or more")
    if profile is None:
        work = analytic_workload(network(model, image_size), accelerator(gpu))
    else:
        work = Workload.read(profile)
        if work.model != model and model != "resnet50":
            raise ConfigError(
                "--profile", str(profile), f"is of {work.model}, not of {model}",
                f"profile {model}, or leave --model out",
            )  # fmt: skip
    return replace(work, input=Affine(0.0, 1 / input_images_per_s)) if input_images_per_s else work


def _cluster(
    gpu: str, file: Path | None, nodes: int, gpus_per_node: int, node_gbps: float,
    latency_us: float, links: int, oversubscription: float,
) -> Cluster:  # fmt: skip
    from paceline.plan.accelerator import accelerator
    from paceline.plan.cluster_file import read_cluster
    from paceline.plan.gpu_cluster import gpu_cluster

    if file is not None:
        return read_cluster(file)
    return gpu_cluster(
        accelerator(gpu or "H200"), nodes, gpus_per_node, node_gbps, latency_us, links,
        oversubscription,
    )  # fmt: skip


def _write_plan(
    path: Path, chosen: FusionPlan, work: Workload, place: Cluster, now: Prediction
) -> None:
    from paceline.plan.expected import Expected
    from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile

    model = ModelFacts.of((gradient.name, gradient.elements) for gradient in work.gradients)
    PlanFile(chosen, model, ClusterFacts(place.ranks, place.nodes), Expected.of(now)).write(path)


def _print(answer: Answer) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.plan.answer_table import advice_rows, buffer_rows, curve_rows, fact_rows

    console = Console()
    facts = Table(show_header=False, box=None)
    for row in fact_rows(answer):
        facts.add_row(*row)
    console.print(facts)
    for head, rows in (
        (("buffers", "tensors", "MiB", "algorithm", "ready ms", "start ms", "end ms"),
         buffer_rows(answer)),
        (("ranks", "images/s", "efficiency", "exposed ms"), curve_rows(answer)),
        (("what would help", "images/s"), advice_rows(answer)),
    ):  # fmt: skip
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
