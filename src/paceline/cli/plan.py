"""`paceline plan`: predicts the speed of a job on a cluster, and plans its gradient all-reduce."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from paceline.cli.options import AsJson
from paceline.cli.plan_page import (
    PAGE_NAME,
    answer_tables,
    fact_rows,
    plan_page,
)
from paceline.cli.signature import flags_of
from paceline.cli.summary import rich_table, widen_pipe
from paceline.core.errors import ConfigError
from paceline.core.settings import check_input_rate
from paceline.core.untrusted import one_line
from paceline.plan.cluster import Cluster
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.planner.accelerators import Accelerator
from paceline.planner.answer import Answer, Question
from paceline.planner.layers import (
    TRACED,
    Network,
    check_ends,
    check_image_size,
    known_network,
)
from paceline.planner.memory import MemoryEstimate, check_memory, step_memory
from paceline.planner.recommend import (
    Job,
    Limits,
    largest_global_batch,
    limits_of,
    recommended_batch,
)
from paceline.planner.request import ClusterRequest, StepRequest, question_about
from paceline.planner.workload import LARGEST_BATCH, Workload
from paceline.report.run_page import write_page


class _Step(StepRequest):
    """The training step to predict.

    Uses torch to trace the layers of models that the planner does not know.
    """

    def network(self, name: str) -> Network:
        if ":" not in name and name not in TRACED:
            return super().network(name)
        size, classes, channels = self.images
        check_image_size(size)
        check_ends(classes, channels)
        from paceline.rehearsal.layer_count import count_layers

        return count_layers(name, size, classes, channels)


def _step_flags(
    model: str = typer.Option(
        "",
        help="Which model: a built-in name, timm:NAME or module:factory; resnet50, or the profile's.",
    ),
    gpu: str = typer.Option(
        "",
        help="An accelerator of the catalogue, such as H100, or a TOML file that describes another.",
    ),
    software: str = typer.Option(
        "", help="Round of MLPerf Training whose libraries are used, such as v0.7; the newest."
    ),
    profile: Path | None = typer.Option(
        None, help="A file of paceline profile or tune; then --gpu decides the links inside a node."
    ),
    image_size: int | None = typer.Option(None, help="Edge of the images in pixels; 224."),
    classes: int | None = typer.Option(None, help="Outputs of the model; 1000."),
    channels: int | None = typer.Option(None, help="Channels of an image; 3."),
) -> _Step:
    return _Step(model, gpu, software, profile, image_size, classes, channels)


def _cluster_flags(
    nodes: int | None = typer.Option(None, help="Nodes; 1, or as in the cluster file."),
    gpus_per_node: int | None = typer.Option(None, help="Ranks of a node; 8."),
    node_gbps: float | None = typer.Option(
        None, help="All links of a node, Gb/s; those of the GPU's reference system."
    ),
    latency_us: float | None = typer.Option(None, help="Start of a message between nodes; 10."),
    links: int | None = typer.Option(
        None, help="Links of a node; 1 with --node-gbps, else those of the reference system."
    ),
    oversubscription: float | None = typer.Option(None, help="Between nodes; 1."),
    cluster: Path | None = typer.Option(None, help="A file of paceline tune, instead of flags."),
) -> ClusterRequest:
    return ClusterRequest(
        nodes, gpus_per_node, node_gbps, latency_us, links, oversubscription, cluster
    )


@flags_of(step=_step_flags, where=_cluster_flags)
def plan(
    step: _Step, where: ClusterRequest,
    input_images_per_s: float = typer.Option(
        0.0, help="Images/s that the input of a rank delivers; 0: enough."
    ),
    batch_size: int | None = typer.Option(
        None, "--batch-size", "-b", help="Of one GPU; by default one is recommended."
    ),
    epochs: float = typer.Option(90.0, help="Epochs of the job."),
    dataset_size: int = typer.Option(1_281_167, help="Training images."),
    max_global_batch: int | None = typer.Option(
        None,
        help="Largest batch of all GPUs together; 65536, or less for a small data set or few epochs.",
    ),
    noise_scale: float = typer.Option(
        0.0,
        help="Noise scale that a run with run.noise_scale measured; limits the recommended batch.",
    ),
    target_minutes: float = typer.Option(0.0, help="Recommend nodes that train in this time."),
    price_per_gpu_hour: float = typer.Option(0.0, help="In any currency; none is built in."),
    budget: float = typer.Option(0.0, help="Recommend the fastest job for this price."),
    startup_s: float | None = typer.Option(
        None, help="Seconds until the first step; an estimate by the number of ranks."
    ),
    recompute_norms: bool = typer.Option(
        False,
        "--recompute-norms",
        help="With run.accel.recompute_norms: less memory, a longer step.",
    ),
    algorithm: list[str] = typer.Option([], help="Allowed all-reduces; may be repeated. All."),
    wire: list[str] = typer.Option(
        [],
        help="Allowed formats: auto (as held), fp32, fp16, bf16, and in 8 bits int8, e4m3, e5m2; may be "
        "repeated. auto.",
    ),
    with_plan: Path | None = typer.Option(None, help="Score this plan file instead of the best."),
    plan_out: Path | None = typer.Option(None, help="Write the plan, for comm.plan."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a page with plots."),
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Predict a job's speed, recommend its batch and choose its fusion plan."""
    file, profiled = step.read(where)
    job = Job(
        epochs, dataset_size, step.chip.watts if step.chip else 0.0, price_per_gpu_hour,
        _meets_over_nccl(step.chip, file, profiled), startup_s,
    )  # fmt: skip
    net = _network(step, profiled)
    if recompute_norms:
        net = _recomputing_norms(net, profiled)
    check_input_rate(input_images_per_s)
    work = step.workload(net, profiled).fed_at(input_images_per_s)
    place = where.place(step.chip, file)
    question = question_about(work, place, algorithm, wire)
    most = largest_global_batch(max_global_batch, noise_scale, dataset_size, epochs)
    # The number format of a profile may differ from the default of the GPU.
    half = None if profiled is None else work.in_half
    limits = limits_of(net, step.chip, most, target_minutes, budget, price_per_gpu_hour, half)
    if batch_size is None:
        limits = limits.near_timed(work)
    batch = _batch(batch_size, question, place, limits)
    is_gpu = _is_gpu(step.chip, file, profiled)
    memory = _memory(net, step.chip, batch, work, is_gpu=is_gpu, half=half)
    _check_batch(batch, place, dataset_size)
    question = replace(question, batch=batch)
    chosen = _fusion_plan(with_plan, question, place, restricted=bool(algorithm or wire))
    answer = Answer.of(
        question, place, chosen, job=job, limits=limits, memory=memory,
        memory_bytes=step.chip.memory_bytes if step.chip else 0.0,
        recommended=batch_size is None, assumed=where.assumed(step.chip),
    )  # fmt: skip
    if plan_out is not None:
        _write_plan(plan_out, file, chosen, answer)
    if as_json:
        typer.echo(json.dumps(answer.to_json()))
    else:
        _print(answer)
    if html is not None:
        typer.echo(f"page: {write_page(plan_page(answer), html, PAGE_NAME)}", err=as_json)
    return 0


def _batch(given: int | None, question: Question, place: Cluster, limits: Limits) -> int:
    batch = recommended_batch(question, place, limits) if given is None else given
    if not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError("--batch-size", batch, f"must be from 1 to {LARGEST_BATCH:,}")
    return batch


def _is_gpu(chip: Accelerator | None, file: PlanFile, profiled: Workload | None) -> bool:
    if file.probed is not None:
        return file.probed.device == "cuda"
    if chip is not None:
        return chip.is_gpu
    return profiled is None or profiled.device != "cpu"


def _meets_over_nccl(chip: Accelerator | None, file: PlanFile, profiled: Workload | None) -> bool:
    """Returns True if ranks use NCCL: as in the measured cluster, else if the ranks have GPUs."""
    if file.probed is None:
        return _is_gpu(chip, file, profiled)
    return file.probed.backend == "nccl"


def _memory(
    net: Network | None, chip: Accelerator | None, batch: int, work: Workload, *, is_gpu: bool,
    half: bool | None,
) -> MemoryEstimate | None:  # fmt: skip
    """Estimates the GPU memory of a step; returns None if the model's layers are unknown.

    Raises:
        ConfigError: If the memory of the GPU is too small for the batch.
    """
    if net is None:
        return None
    if chip is not None:
        return check_memory(net, chip, batch, half)
    return step_memory(net, batch, work.in_half, graphs=is_gpu, fused=is_gpu, on_gpu=is_gpu)


def _check_batch(batch: int, place: Cluster, samples: int) -> None:
    """Checks the global batch; raises ConfigError if it is larger than the data set."""
    if batch * place.ranks > samples:
        raise ConfigError(
            "--batch-size", batch,
            f"the batch of all {place.ranks:,} GPUs is {batch * place.ranks:,}, more than the "
            f"{samples:,} images of an epoch",
            "use fewer nodes or a smaller batch, or give --dataset-size",
        )  # fmt: skip


def _fusion_plan(
    path: Path | None, question: Question, place: Cluster, *, restricted: bool
) -> FusionPlan:
    """Returns the plan in the file `path` or, without a file, the best plan that the flags allow.

    `restricted` is True if flags restrict the algorithms or wire formats, which excludes a file.
    """
    work = question.workload
    if path is None:
        return best_plan(work, place, question.batch, question.algorithms, question.wires)
    if restricted:
        raise ConfigError(
            "--with-plan", str(path), "the plan file already contains algorithms and wire formats",
            "leave out --algorithm and --wire",
        )  # fmt: skip
    file = PlanFile.read(path, "--with-plan")
    model = ModelFacts.of((gradient.name, gradient.elements) for gradient in work.gradients)
    file.check(model, ClusterFacts(place.ranks, place.nodes), str(path))
    return file.plan


def _network(step: _Step, profiled: Workload | None) -> Network | None:
    """Returns the layers of the model; None if the step is profiled and its model is unknown.

    Code that a profile names is not run: with a profile, only Paceline's own models are traced.
    """
    if profiled is None:
        return step.network(step.model or "resnet50")
    name, pixels = profiled.model, profiled.image_size
    known = known_network(name, pixels)
    if known is not None or name not in TRACED or not pixels or not find_spec("torch"):
        return known
    try:
        return _Step(image_size=pixels).network(name)
    except ConfigError:  # images that are too small for the model
        return None


def _recomputing_norms(net: Network | None, profiled: Workload | None) -> Network:
    if net is None or profiled is not None:
        raise ConfigError(
            "--recompute-norms", True, "cannot change the step that a profile has measured",
            "leave it out, or write the profile with paceline tune RECIPE "
            "--set run.accel.recompute_norms=true",
        )  # fmt: skip
    if not net.can_recompute_norms:
        raise ConfigError(
            "--recompute-norms", True, f"{net.name} has no norms that can be recomputed",
            "leave it out",
        )  # fmt: skip
    return net.recomputing_norms()


def _write_plan(path: Path, file: PlanFile, chosen: FusionPlan, answer: Answer) -> None:
    """Writes the plan; keeps measurements of the cluster file if its number of ranks and nodes is equal.

    A start-up time given by the user is left out, because the file lists the parts of this time.
    """
    work, place = answer.workload, answer.cluster
    cluster = ClusterFacts(place.ranks, place.nodes)
    kept = file if file.cluster == cluster else PlanFile(workload=file.workload)
    sizes = ((gradient.name, gradient.elements) for gradient in work.gradients)
    replace(
        kept, fusion=chosen, model=ModelFacts.of(sizes), cluster=cluster,
        expected=answer.now.expected(), why=(),
        start_up=answer.start_up.to_table() if answer.job.startup_s is None else None,
    ).write(path)  # fmt: skip


def _print(answer: Answer) -> None:
    """Prints facts and tables.

    In a pipe, the output is as wide as the widest table, so that nothing is cut.
    """
    console = Console()
    tables = [
        rich_table(table, boxed=True, caption=table.title)
        for table in answer_tables(answer)
        if table.rows
    ]
    widen_pipe(console, tables)
    facts = RichTable(show_header=False, box=None)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for row in fact_rows(answer):
        facts.add_row(*(Text(one_line(cell)) for cell in row))
    console.print(facts)
    for table in tables:
        console.print()
        console.print(table)
