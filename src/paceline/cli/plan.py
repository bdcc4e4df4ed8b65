"""`paceline plan` predicts how fast a job runs on a cluster and which plan is fastest, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.options import AsJson
from paceline.cli.plan_page import (
    FROM_BACKWARD,
    PAGE_NAME,
    advice_rows,
    bucket_rows,
    curve_columns,
    curve_rows,
    fact_rows,
    option_columns,
    option_rows,
    plan_page,
)
from paceline.core.errors import ConfigError
from paceline.core.settings import check_input_rate
from paceline.core.untrusted import one_line
from paceline.plan.cluster import Cluster
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.plan.schedules import algorithm_names
from paceline.plan.wires import wire_names
from paceline.planner.accelerators import (
    GPUS_PER_NODE,
    Accelerator,
    accelerator,
    assumed,
    catalogue,
    gpu_cluster,
)
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.answer import Answer, Question
from paceline.planner.layers import (
    TRACED,
    Network,
    check_ends,
    check_image_size,
    known_network,
    network,
)
from paceline.planner.memory import MemoryEstimate, check_memory, step_memory
from paceline.planner.plan_parts import planned_cluster, profile_of, required_profile
from paceline.planner.recommend import (
    Job,
    fed_by,
    input_supply,
    largest_global_batch,
    limits_of,
    recommended_batch,
)
from paceline.planner.workload import LARGEST_BATCH, Workload
from paceline.report.run_page import write_page


def plan(
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
        None, help="What paceline profile or tune wrote; --gpu is then for the links inside a node."
    ),
    nodes: int | None = typer.Option(None, help="Nodes; 1, or as in the cluster file."),
    gpus_per_node: int | None = typer.Option(None, help="Ranks of a node; 8."),
    batch_size: int | None = typer.Option(
        None, "--batch-size", "-b", help="Of one GPU; recommended where it is not given."
    ),
    node_gbps: float | None = typer.Option(
        None, help="All links of a node, Gb/s; those of the GPU's reference system."
    ),
    latency_us: float | None = typer.Option(None, help="Start of a message between nodes; 10."),
    links: int | None = typer.Option(
        None, help="Links of a node; 1 with --node-gbps, else those of the reference system."
    ),
    oversubscription: float | None = typer.Option(None, help="Between nodes; 1."),
    cluster: Path | None = typer.Option(None, help="What paceline tune wrote, instead of flags."),
    epochs: float = typer.Option(90.0, help="Epochs of the job."),
    dataset_size: int = typer.Option(1_281_167, help="Training images."),
    image_size: int | None = typer.Option(None, help="Edge of the images in pixels; 224."),
    classes: int | None = typer.Option(None, help="Outputs of the model; 1000."),
    channels: int | None = typer.Option(None, help="Channels of an image; 3."),
    max_global_batch: int | None = typer.Option(
        None,
        help="Largest batch of all GPUs together; 65536, or less for a small data set or few epochs.",
    ),
    noise_scale: float = typer.Option(
        0.0,
        help="As a run with run.noise_scale measured it: up to which batch and ranks time is saved.",
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
    input_images_per_s: float = typer.Option(0.0, help="What a rank's input delivers; 0: enough."),
    cores_per_node: int = typer.Option(0, help="Cores of a node that decode images."),
    packed: bool = typer.Option(False, "--packed", help="Those cores decode packed shards."),
    nvjpeg: bool = typer.Option(False, "--nvjpeg", help="The GPUs decode the images."),
    input_bench: Path | None = typer.Option(
        None, help="What paceline bench input --json wrote, as the speed of a node's input."
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
) -> int:
    """Predict a job's speed, recommend its batch and choose its fusion plan."""
    given = _cluster_flags(
        cluster, gpus_per_node=gpus_per_node, node_gbps=node_gbps, latency_us=latency_us,
        links=links, oversubscription=oversubscription,
    )  # fmt: skip
    file, profiled = _read_files(cluster, profile, gpu)
    chip = accelerator(gpu) if gpu else None
    is_gpu = _is_gpu(chip, file, profiled)
    job = Job(
        epochs, dataset_size, chip.watts if chip else 0.0, price_per_gpu_hour,
        _meets_over_nccl(chip, file, profiled), startup_s,
    )  # fmt: skip
    images = _Images(image_size, classes, channels)
    net = _network(model, profiled, images)
    if recompute_norms:
        net = _recomputing_norms(net, profiled)
    work = _workload(model, chip, net, profiled, images, software)
    place = _gpu_cluster(chip, nodes, given) if cluster is None else planned_cluster(file)
    place = place if nodes is None else place.with_nodes(nodes)
    _check_input(input_images_per_s, cores_per_node, packed, nvjpeg, input_bench)
    supply = input_supply(place.ranks_per_node, cores_per_node, packed, nvjpeg, input_bench)
    work = fed_by(work, supply, place.ranks_per_node).fed_at(input_images_per_s)
    known = place.probed.algorithms if place.probed else algorithm_names()
    question = Question(work, 1, tuple(algorithm) or known, wire_names(wire or ("auto",)))
    most = largest_global_batch(max_global_batch, noise_scale, dataset_size, epochs)
    # A profile may be of another format than is usual on the GPU.
    half = None if profiled is None else work.in_half
    limits = limits_of(net, chip, most, target_minutes, budget, price_per_gpu_hour, half)
    if batch_size is None:
        limits = limits.near_timed(work)
    batch = recommended_batch(question, place, limits) if batch_size is None else batch_size
    if not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError("--batch-size", batch, f"must be from 1 to {LARGEST_BATCH:,}")
    memory = _memory(net, chip, batch, work, is_gpu=is_gpu, half=half)
    _check_batch(batch, place, dataset_size)
    question = replace(question, batch=batch)
    chosen = _fusion_plan(with_plan, question, place, restricted=bool(algorithm or wire))
    answer = Answer.of(
        question, place, chosen, job=job, limits=limits, net=net, gpu=chip, memory=memory,
        supply=supply, recommended=batch_size is None, noise_scale=noise_scale,
        assumed={} if cluster is not None else assumed(chip or accelerator("CPU"), given),
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


class _Images(NamedTuple):
    """What is classified, as far as it is given."""

    size: int | None
    classes: int | None
    channels: int | None

    def network(self, name: str) -> Network:
        """The layers of a model for these images, counted from a trace where the planner has none."""
        pixels = 224 if self.size is None else self.size
        classes = 1000 if self.classes is None else self.classes
        channels = 3 if self.channels is None else self.channels
        if ":" not in name and name not in TRACED:
            return network(name, pixels, classes, channels=channels)
        check_image_size(pixels)
        check_ends(classes, channels)
        from paceline.rehearsal.layer_count import count_layers

        return count_layers(name, pixels, classes, channels)


def _is_gpu(chip: Accelerator | None, file: PlanFile, profiled: Workload | None) -> bool:
    """Whether the ranks have GPUs."""
    if file.probed is not None:
        return file.probed.device == "cuda"
    if chip is not None:
        return chip.is_gpu
    return profiled is None or profiled.device != "cpu"


def _meets_over_nccl(chip: Accelerator | None, file: PlanFile, profiled: Workload | None) -> bool:
    """As the cluster was probed, as in rehearsals: GPUs may meet over Gloo, too. Without a probe GPUs
    meet over NCCL, CPUs over Gloo."""
    if file.probed is None:
        return _is_gpu(chip, file, profiled)
    return file.probed.backend == "nccl"


def _memory(
    net: Network | None, chip: Accelerator | None, batch: int, work: Workload, *, is_gpu: bool,
    half: bool | None,
) -> MemoryEstimate | None:  # fmt: skip
    """What a step needs; a batch that the GPU has no memory for is refused. None where the layers are not
    known."""
    if net is None:
        return None
    if chip is not None:
        return check_memory(net, chip, batch, half)
    return step_memory(net, batch, work.in_half, graphs=is_gpu, fused=is_gpu, on_gpu=is_gpu)


def _check_batch(batch: int, place: Cluster, samples: int) -> None:
    """A request that no one can mean gets a line, not a prediction."""
    if batch * place.ranks > samples:
        raise ConfigError(
            "--batch-size", batch,
            f"{batch * place.ranks:,} on {place.ranks:,} GPUs together, more than the {samples:,} images "
            "of an epoch", "use fewer nodes or a smaller batch, or give --dataset-size",
        )  # fmt: skip


def _cluster_flags(cluster: Path | None, **flags: float | None) -> dict[str, Any]:
    """Those that are given, which a cluster file excludes."""
    given = {name: value for name, value in flags.items() if value is not None}
    if cluster is not None and given:
        name, value = next(iter(given.items()))
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(flag, value, "is in the cluster file already", "leave out one of them")
    return given


def _read_files(
    cluster: Path | None, profile: Path | None, gpu: str
) -> tuple[PlanFile, Workload | None]:
    """The cluster's file with the profile that counts: that of --profile; of the catalogue where a GPU is
    named; else the one that tune has left in the cluster's file."""
    file = PlanFile() if cluster is None else PlanFile.read(cluster, "--cluster")
    if profile is not None:
        measured = PlanFile.read(profile, "--profile")
        return replace(file, workload=measured.workload), required_profile(measured)
    file = replace(file, workload=None) if gpu else file
    return file, profile_of(file)


def _fusion_plan(
    path: Path | None, question: Question, place: Cluster, *, restricted: bool
) -> FusionPlan:
    """That of the file, or the best; `restricted`: flags say which algorithms and formats it may have."""
    work = question.workload
    if path is None:
        return best_plan(work, place, question.batch, question.algorithms, question.wires)
    if restricted:
        raise ConfigError(
            "--with-plan", str(path), "decides algorithms and wire itself",
            "leave out --algorithm and --wire",
        )  # fmt: skip
    file = PlanFile.read(path, "--with-plan")
    model = ModelFacts.of((gradient.name, gradient.elements) for gradient in work.gradients)
    file.check(model, ClusterFacts(place.ranks, place.nodes), str(path))
    return file.plan


def _network(model: str, profiled: Workload | None, images: _Images) -> Network | None:
    """The layers of the model, counted from a trace where the planner has none of them; None where it is
    profiled and they are not known, or not the size of the images. The code that a profile names is not
    run: only our own models are counted for it."""
    if profiled is not None:
        name, pixels = profiled.model, profiled.image_size
        known = known_network(name, pixels)
        if known is not None or name not in TRACED or not pixels or not find_spec("torch"):
            return known
        try:
            return _Images(pixels, None, None).network(name)
        except ConfigError:  # images that are too small for the model
            return None
    return images.network(model or "resnet50")


def _recomputing_norms(net: Network | None, profiled: Workload | None) -> Network:
    if net is None or profiled is not None:
        raise ConfigError(
            "--recompute-norms", True, "a profile has the times and layers of the step it measured",
            "leave it out, or make the file with paceline tune RECIPE "
            "--set run.accel.recompute_norms=true",
        )  # fmt: skip
    if not net.can_recompute_norms:
        raise ConfigError(
            "--recompute-norms", True, f"{net.name} has no norms that backward can compute again",
            "leave it out",
        )  # fmt: skip
    return net.recomputing_norms()


def _workload(
    model: str, chip: Accelerator | None, net: Network | None, profiled: Workload | None,
    images: _Images, software: str,
) -> Workload:  # fmt: skip
    if profiled is not None:
        for flag, value in (
            ("--image-size", images.size), ("--classes", images.classes),
            ("--channels", images.channels), ("--software", software or None),
        ):  # fmt: skip
            if value is not None:
                raise ConfigError(flag, value, "a profile has its own", "leave it out")
        if model and profiled.model != model:
            raise ConfigError(
                "--model", model, f"the profile is of {profiled.model}",
                f"profile {model}, or leave --model out",
            )  # fmt: skip
        return profiled
    if chip is None or net is None:
        raise ConfigError(
            "--gpu", None, "give either --gpu or --profile",
            f"known GPUs are {', '.join(catalogue())}",
        )  # fmt: skip
    return analytic_workload(net, chip, software)


def _check_input(rate: float, cores: int, packed: bool, nvjpeg: bool, bench: Path | None) -> None:
    """The speed of the input is given once; cores scale a benchmark, and may decode packed shards."""
    check_input_rate(rate)
    ways = {
        "--input-images-per-s": bool(rate), "--nvjpeg": nvjpeg, "--input-bench": bench is not None,
        "--cores-per-node": bool(cores) and bench is None,
    }  # fmt: skip
    given = [flag for flag, is_given in ways.items() if is_given]
    if len(given) > 1:
        problem = f"says how fast the input is, as {given[0]} does"
        raise ConfigError(given[1], None, problem, "leave out one of them")
    if packed and given != ["--cores-per-node"]:
        raise ConfigError("--packed", None, "is what cores decode", "give --cores-per-node alone")


def _gpu_cluster(chip: Accelerator | None, nodes: int | None, flags: dict[str, Any]) -> Cluster:
    if chip is None and flags.get("gpus_per_node", GPUS_PER_NODE) > 1:
        raise ConfigError(
            "--gpu", None, "the links inside a node are not known",
            "name the GPU, or give --cluster, or --gpus-per-node 1",
        )  # fmt: skip
    return gpu_cluster(chip or accelerator("CPU"), 1 if nodes is None else nodes, **flags)


def _write_plan(path: Path, file: PlanFile, chosen: FusionPlan, answer: Answer) -> None:
    """What the cluster's file has stays in the new one, unless it is for another number of nodes. A
    start-up that was given has no parts, and is left out."""
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
    """No number is cut: a pipe is as wide as the widest table; in a narrow terminal heads wrap, columns
    move together, and what is left folds."""
    console = Console()
    tables = [
        (head, rows, caption)
        for head, rows, caption in (
            (("buckets", "tensors", "MiB", "algorithm", "ready ms", "start ms", "end ms"),
             bucket_rows(answer), FROM_BACKWARD),
            (curve_columns(answer), curve_rows(answer), ""),
            (option_columns(answer), option_rows(answer), ""),
            (("what would help", "images/s", "price"), advice_rows(answer), ""),
        )
        if rows
    ]  # fmt: skip
    wide = console.options.update(width=10_000)
    if not console.is_terminal:
        widths = (console.measure(_numbers(*table), options=wide).maximum for table in tables)
        console.width = max(console.width, *widths)
    facts = Table(show_header=False, box=None)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for row in fact_rows(answer):
        facts.add_row(*(Text(one_line(cell)) for cell in row))
    console.print(facts)
    for table in tables:
        forms = (_numbers(*table), _numbers(*table, gap=0), _numbers(*table, gap=0, fold=True))
        drawn = (
            form for form in forms if console.measure(form, options=wide).minimum <= console.width
        )
        console.print()
        console.print(next(drawn, forms[-1]))


def _numbers(
    head: tuple[str, ...], rows: list[tuple[str, ...]], caption: str, gap: int = 1,
    fold: bool = False,
) -> Table:  # fmt: skip
    """Cells break at their spaces only, unless they may `fold`."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, caption=caption or None,
        caption_justify="left", padding=(0, gap),
    )  # fmt: skip
    for name, *cells in zip(head, *rows, strict=True):
        words = [word for text in (name, *cells) for word in text.split()]
        least = None if fold else max(map(len, words), default=1)
        table.add_column(name, overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table
