"""`paceline bench`: measures the training step, input pipeline and all-reduces of a machine.

The result is a table or, with `--json`, one object that includes the environment. Comparisons with other
libraries are programs in benchmarks/, outside the package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import options
from paceline.cli.measure import (
    check_settings,
    chosen_device,
    environment,
    parse_algorithms,
    parse_size_range,
    print_json,
    run_on_ranks,
)
from paceline.cli.options import check_at_least
from paceline.config import RunConfig, parse_assignment
from paceline.core.errors import ConfigError
from paceline.core.units import parse_bytes
from paceline.models.settings import check_model_name
from paceline.plan.wires import AUTO, wire_format

if TYPE_CHECKING:
    from paceline.bench.allreduce import AllReduceJob
    from paceline.bench.input_rows import InputRow
    from paceline.tune.step import StepRow
    from paceline.tune.timing import RankGroup, Times

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
# The flags of `bench` for settings, which `--set` must not name.
_FLAG_OF = {
    "model.name": "--model", "data.image_size": "--image-size", "run.device": "--device",
    "run.batch_size": "--batch-size", "run.global_batch_size": "--batch-size",
    "model.num_classes": "--classes",
}  # fmt: skip


def parse_switches(settings: list[str]) -> dict[str, Any]:
    """Parses `--set section.key=value` options to a dict of values by setting.

    Raises:
        ConfigError: If the command has another flag for the setting.
    """
    switches = dict(parse_assignment(text) for text in settings)
    for name, flag in _FLAG_OF.items():
        if name in switches:
            raise ConfigError("--set", name, "has its own flag in this command", f"use {flag}")
    return switches


@bench.command("step")
def step(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(256, "--batch-size", "-b", help="Of one process."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    steps: int = typer.Option(50, help="Steps to time; the median counts."),
    warm_up: int = typer.Option(20, help="Steps before."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value, as in training."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> int:
    """Measure a whole training step on synthetic images."""
    from paceline.tune.step import StepRow

    check_model_name(model)
    check_at_least(
        1,
        {"--batch-size": batch_size, "--steps": steps, "--warm-up": warm_up, "--classes": classes},
    )
    switches, chosen = parse_switches(settings), chosen_device(device)
    RunConfig().with_values(switches)
    common: dict[str, Any] = {
        "model": model, "batch_size": batch_size, "image_size": image_size, "classes": classes,
        "device": chosen, "steps": steps, "warm_up": warm_up, "switches": switches,
    }  # fmt: skip
    result = measure_step(StepRow("ours", "ours", **common))
    if as_json:
        print_json({"settings": common, "rows": [result], **environment(chosen)})
    else:
        print_steps([result])
    return 0


def measure_step(row: StepRow) -> dict[str, Any]:
    """Builds a training step, warms it up and times it; returns the result of `step_result`."""
    from paceline.train.machine import explain_out_of_memory
    from paceline.tune.step import measure_ours

    started, start_s = time.perf_counter(), 0.0

    def ready() -> None:
        nonlocal start_s
        start_s = time.perf_counter() - started

    with explain_out_of_memory(f"with batches of {row.batch_size:,}", "lower --batch-size"):
        times, description = measure_ours(row, ready)
    return step_result(row, times, description, start_s)


def step_result(row: StepRow, times: Times, description: str, start_s: float) -> dict[str, Any]:
    """Returns the times, speed and settings of a measured step as a dict for the output.

    Args:
        row: The model, batch and device of the step.
        times: The seconds of each timed step.
        description: Names what was chosen automatically for the step.
        start_s: The seconds until the end of the warm-up, including compilation.
    """
    import torch

    gib = torch.cuda.max_memory_allocated() / 2**30 if row.device == "cuda" else 0.0
    return {
        "name": row.name,
        **times.to_row("step_s"),
        "steps": len(times.seconds),
        "images_per_s": row.batch_size / times.median,
        "memory_gib": round(gib, 2),
        "start_s": round(start_s, 1),
        "what": description,
    }


def print_steps(results: Sequence[dict[str, Any]]) -> None:
    """Prints a table of results of `step_result`, and the errors of steps that failed."""
    table = Table("row", "images/s", "ms a step", "p10–p90", "start s", "GiB", "what")
    for result in results:
        if "error" in result:
            table.add_row(result["name"], *5 * ["–"], result["error"])
            continue
        low, high = 1e3 * result["step_s_p10"], 1e3 * result["step_s_p90"]
        table.add_row(
            result["name"], f"{result['images_per_s']:,.0f}", f"{1e3 * result['step_s']:.2f}",
            f"{low:.2f}–{high:.2f}", f"{result['start_s']:.0f}", f"{result['memory_gib']:.1f}",
            result["what"],
        )  # fmt: skip
    Console().print(table)


@bench.command("input")
def bench_input(
    data_dir: str = typer.Option("", help="Images: shards or class folders (docs/data.md)."),
    split: str = typer.Option("train", help="train (random crops) or val (centre crops)."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Images of a batch."),
    image_size: int = typer.Option(224, help="Edge of the crops in pixels."),
    rounds: int = typer.Option(5, help="Each measures every row once; the median counts."),
    seconds: float = typer.Option(5.0, help="For each row of a round."),
    workers: str = typer.Option("2", help="Threads; several counts with commas."),
    decoder: str = typer.Option("", help="data.decoder."),
    settings: list[str] = typer.Option([], "--set", help="data.KEY=VALUE."),
    device: str = typer.Option("auto", help="auto, cpu or cuda: the place of the batches."),
    as_json: options.AsJson = False,
) -> int:
    """Measure how many images/s the input pipeline delivers as normalised tensors."""
    from paceline.bench.input_rows import measure_rows

    check_at_least(1, {"--batch-size": batch_size, "--rounds": rounds})
    if decoder:
        settings = [*settings, f"data.decoder={decoder}"]
    counts, changed, chosen = (
        parse_counts("--workers", workers), parse_data_settings(settings), chosen_device(device),
    )  # fmt: skip
    rows = input_rows("ours", counts, data_dir, split, batch_size, image_size, chosen, changed)
    results = measure_rows(rows, rounds=rounds, seconds=seconds, on_progress=report_progress)
    table = [result.to_dict() for result in results]
    if as_json:
        asked = {
            "split": split, "batch_size": batch_size, "image_size": image_size, "rounds": rounds,
            "seconds": seconds, "device": chosen, "set": settings,
        }  # fmt: skip
        print_json({"settings": asked, "rows": table, **environment(chosen)})
    else:
        print_input_rows(table)
    return 0


def parse_data_settings(settings: list[str]) -> dict[str, Any]:
    """Parses `--set data.KEY=VALUE` options to a dict of values by setting.

    Raises:
        ConfigError: If a setting is not in the section `data`.
    """
    changed = parse_switches(settings)
    for name in changed:
        if not name.startswith("data."):
            raise ConfigError("--set", name, "is not a setting of the data", "leave it out")
    return changed


def input_rows(
    kind: str, workers: list[int], data_dir: str, split: str, batch_size: int, image_size: int,
    device: str, changed: dict[str, Any],
) -> list[InputRow]:  # fmt: skip
    """Returns the pipelines to measure, one for each number of threads in `workers`.

    `changed` has the settings given by `--set`.
    """
    from paceline.bench.input_rows import InputRow

    if split not in ("train", "val"):
        raise ConfigError("--split", split, "unknown", "use train or val")
    if not data_dir:
        raise ConfigError("--data-dir", None, "is needed", "give a folder of shards or classes")
    common: dict[str, Any] = {
        "data.image_size": image_size, "data.eval_resize": round(image_size * 8 / 7),
        "data.resident": "off", "data.dir": data_dir,
    }  # fmt: skip
    data = RunConfig().with_values({**common, **changed}).data
    checked_split = cast(Literal["train", "val"], split)
    return [InputRow(kind, count, data, checked_split, batch_size, device) for count in workers]


def parse_counts(flag: str, text: str) -> list[int]:
    """Parses the value of a flag such as `1,2,4` to [1, 2, 4]."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(flag, text, "must be whole numbers from 1, separated by commas")
    return counts


def print_input_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table of measured input pipelines, with notes on each."""
    console = Console(highlight=False)
    table = Table("row", "images/s", "lowest–highest", "from")
    for row in rows:
        spread = f"{row['lowest']:,.0f}–{row['highest']:,.0f}"
        table.add_row(row["name"], f"{row['images_per_s']:,.0f}", spread, row["directory"])
    console.print(table)
    for row in rows:
        # The remarks of different rounds differ only in numbers, so the last remark is enough.
        for note in filter(None, (row["input"], *row["remarks"][-1:])):
            console.print(f"{row['name']}: {note}", markup=False)


def report_progress(text: str) -> None:
    sys.stderr.write(text + "\n")


@bench.command("allreduce")
def allreduce(
    ranks: options.Ranks = 0,
    algorithms: str = typer.Option("all", help="Names, separated by commas (docs/distributed.md)."),
    byte_list: str = typer.Option("", "--bytes", help="Sizes, with commas: 4096,64KiB,16MiB."),
    min_bytes: str = typer.Option("1KiB", help="First size, without --bytes."),
    max_bytes: str = typer.Option("16MiB", help="Last size."),
    factor: options.SizeFactor = 4.0,
    wire: str = typer.Option(
        "float32", help="float32, float16, bfloat16, int8, float8_e4m3 or float8_e5m2."
    ),
    group_size: options.GroupSize = 0,
    iterations: int = typer.Option(20, help="Samples of each; the median counts."),
    warm_up: int = typer.Option(3, help="Samples before."),
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    as_json: options.AsJson = False,
) -> int:
    """Compare all-reduce algorithms with the backend's own at several sizes."""
    check_settings(device, backend, group_size)
    own = wire_format(wire, "--wire").algorithm
    if wire == AUTO:
        raise ConfigError("--wire", wire, "sends gradients in their own dtype", "name a format")
    names = parse_algorithms(algorithms)
    if own and algorithms != "all":
        problem = f"cannot be used with {wire}, which only {own} can sum"
        raise ConfigError("--algorithms", algorithms, problem, "leave it out")
    check_at_least(1, {"--iterations": iterations})
    check_at_least(0, {"--warm-up": warm_up})
    parts = [part for part in byte_list.split(",") if part.strip()]
    given = tuple(parse_bytes("--bytes", part) for part in parts)
    low, high = parse_size_range(min_bytes, max_bytes, factor)
    if (code := run_on_ranks(ranks)) is not None:
        return code

    from paceline.bench.allreduce import AllReduceJob, choose_sizes
    from paceline.tune.timing import RankGroup

    job = AllReduceJob(given or choose_sizes(low, high, factor), names, wire, iterations, warm_up)
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        rows = _measure_sizes(joined, job, print_lines=joined.rank == 0 and not as_json)
        if joined.rank == 0 and as_json:
            print_json({
                "settings": vars(job), "cluster": joined.describe(), "rows": rows,
                **environment(joined.device),
            })  # fmt: skip
    return 0


def _measure_sizes(
    joined: RankGroup, job: AllReduceJob, *, print_lines: bool
) -> list[dict[str, Any]]:
    """Measures all buffer sizes, and prints the results of each size at once, as it can take minutes."""
    from paceline.bench.allreduce import AllReduceBench

    benchmark, rows = AllReduceBench(joined, job), []
    if print_lines:
        sys.stdout.write(_ALLREDUCE_HEAD)
    for size in job.sizes:
        of_size = benchmark.measure(size)
        rows += of_size
        if print_lines:
            sys.stdout.writelines(map(_allreduce_line, of_size))
            sys.stdout.flush()
    return rows


_ALLREDUCE_HEAD = (
    f"{'bytes':>10}  {'algorithm':<17}{'time ms':>10}{'p10':>10}{'p90':>10}{'algbw GB/s':>12}"
    f"{'busbw GB/s':>12}{'× native':>10}\n"
)


def _allreduce_line(row: dict[str, Any]) -> str:
    return (
        f"{row['bytes']:>10}  {row['algorithm']:<17}{1e3 * row['s']:>10.3f}{1e3 * row['s_p10']:>10.3f}"
        f"{1e3 * row['s_p90']:>10.3f}{row['algbw_gb_s']:>12.4f}{row['busbw_gb_s']:>12.4f}"
        f"{row['speed_against_native']:>10.2f}\n"
    )
