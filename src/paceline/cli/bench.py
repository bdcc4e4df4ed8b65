"""`paceline bench`: checks of a machine: the training step, the input pipeline and all-reduces.

The result is a table or, with `--json`, one object that includes the environment. Comparisons with other
libraries are programs in benchmarks/, outside the package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
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
from paceline.core.units import format_percent, parse_bytes
from paceline.models.settings import check_model_name
from paceline.plan.size_table import SizeTable
from paceline.plan.wires import AUTO, wire_format

if TYPE_CHECKING:
    from paceline.bench.allreduce import AllReduceJob
    from paceline.bench.input_rows import InputRow
    from paceline.tune.timing import RankGroup

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
# Settings of a step that have a flag in `bench`.
_FLAG_OF = {
    "model.name": "--model", "data.image_size": "--image-size", "run.device": "--device",
    "run.batch_size": "--batch-size", "run.global_batch_size": "--batch-size",
    "model.num_classes": "--classes",
}  # fmt: skip


def parse_switches(settings: list[str], flags: dict[str, str] = _FLAG_OF) -> dict[str, Any]:
    """Settings of a step. `flags`: names that have a flag instead."""
    switches = dict(parse_assignment(text) for text in settings)
    for name, flag in flags.items():
        if name in switches:
            raise ConfigError("--set", name, "has a flag here", f"use {flag}")
    return switches


@bench.command("step")
def step(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(256, "--batch-size", "-b", help="Of one process."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    steps: int = typer.Option(50, help="Steps to time; the median counts."),
    warm_up: int = typer.Option(20, help="Steps before."),
    rows: list[str] = typer.Option([], "--row", help="Only this row; may be repeated."),
    row_limit_s: float = typer.Option(900.0, help="Limit for the start of a row."),
    together: int = typer.Option(1, help="Rows that compile at once; they measure in turn."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> int:
    """A whole training step on synthetic images: ours against plain PyTorch."""
    from paceline.bench.step import choose_rows, measure_rows, ratios

    check_model_name(model)
    counts = {"--batch-size": batch_size, "--steps": steps, "--warm-up": warm_up}
    check_at_least(1, counts | {"--classes": classes, "--together": together})
    chosen = chosen_device(device)
    common = {
        "model": model, "batch_size": batch_size, "image_size": image_size, "classes": classes,
        "device": chosen, "steps": steps, "warm_up": warm_up,
    }  # fmt: skip

    def on_row(result: dict[str, Any]) -> None:
        """Rows can take minutes: each is reported as soon as it is measured."""
        speed = f"{result['images_per_s']:,.0f} images/s" if "step_s" in result else result["error"]
        report_progress(f"{result['name']}: {speed}")

    results = measure_rows(choose_rows(rows, common), row_limit_s, together, on_row)
    found = ratios(results)
    if as_json:
        print_json({
            "settings": common, "rows": results, "ratios": found,
            **environment(chosen),
        })  # fmt: skip
    else:
        console = Console()
        table = Table("row", "images/s", "ms a step", "p10–p90", "start s", "GiB", "what")
        for result in results:
            table.add_row(*_step_cells(result))
        console.print(table)
        for name, value in found.items():
            console.print(f"{name}: {value:.3f} ×", highlight=False)
    return 0 if all("step_s" in result for result in results) else 1


def _step_cells(result: dict[str, Any]) -> tuple[str, ...]:
    if "error" in result:
        return (result["name"], "–", "–", "–", "–", "–", result["error"])
    low, high = 1e3 * result["step_s_p10"], 1e3 * result["step_s_p90"]
    return (
        result["name"], f"{result['images_per_s']:,.0f}", f"{1e3 * result['step_s']:.2f}",
        f"{low:.2f}–{high:.2f}", f"{result['start_s']:.0f}", f"{result['memory_gib']:.1f}",
        result["what"],
    )  # fmt: skip


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
    settings: list[str] = typer.Option(
        [], "--set", help="data.KEY=VALUE; others of the step of --train-step."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda: where the batches must be."),
    train_step: str = typer.Option("", help="A model: its training from these images, too."),
    steps: int = typer.Option(50, help="Steps of each round of --train-step."),
    warm_up: int = typer.Option(20, help="Steps before the first round of --train-step."),
    as_json: options.AsJson = False,
) -> int:
    """Images/s as normalised tensors, and of a training from real and synthetic images."""
    from paceline.bench.input_rows import measure_rows, open_threads
    from paceline.bench.input_training import measure_training

    check_at_least(
        1, {"--batch-size": batch_size, "--rounds": rounds, "--steps": steps, "--warm-up": warm_up}
    )
    if decoder:
        settings = [*settings, f"data.decoder={decoder}"]
    data_values, switches = _input_settings(settings, train_step)
    chosen = chosen_device(device)
    rows = input_rows(
        "ours", parse_counts("--workers", workers), data_dir, split, batch_size, image_size, chosen,
        data_values,
    )  # fmt: skip
    results = measure_rows(
        rows, {"ours": open_threads}, rounds=rounds, seconds=seconds, on_progress=report_progress
    )
    found: dict[str, Any] = {"rows": [result.to_dict() for result in results]}
    if train_step:
        fastest = max(results, key=lambda result: result.median)
        found["training"] = measure_training(
            train_step, fastest.row, switches, rounds=rounds, steps=steps, warm_up=warm_up,
            on_progress=report_progress,
        )  # fmt: skip
    if as_json:
        asked = {
            "split": split, "batch_size": batch_size, "image_size": image_size, "rounds": rounds,
            "seconds": seconds, "device": chosen, "set": settings,
        }  # fmt: skip
        print_json({"settings": asked, **found, **environment(chosen)})
        return 0
    print_input_rows(found["rows"])
    if training := found.get("training"):
        sys.stdout.write(
            f"training {training['model']} from these images: "
            f"{training['input_images_per_s']:,.0f} images/s, "
            f"{format_percent(100 * training['share'], 1)} of "
            f"{training['synthetic_images_per_s']:,.0f} synthetic\n"
        )
    return 0


def _input_settings(settings: list[str], train_step: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the data, and those of the step that trains on it, which are refused here and not after
    minutes of measuring."""
    flags = {name: flag for name, flag in _FLAG_OF.items() if name != "model.num_classes"}
    changed = parse_switches(settings, flags | {"model.name": "--train-step"})
    if "model.num_classes" in changed:
        raise ConfigError("--set", "model.num_classes", "comes from the data", "leave it out")
    switches = {name: value for name, value in changed.items() if not name.startswith("data.")}
    for name in () if train_step else switches:
        raise ConfigError("--set", name, "is a setting of a step", "add --train-step MODEL")
    RunConfig().with_values(({"model.name": train_step} if train_step else {}) | switches)
    return {name: value for name, value in changed.items() if name not in switches}, switches


def input_rows(
    kind: str, workers: list[int], data_dir: str, split: str, batch_size: int, image_size: int,
    device: str, changed: dict[str, Any],
) -> list[InputRow]:  # fmt: skip
    """A row of this kind for each number of workers. `changed`: settings of the data."""
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
    of_split = cast(Literal["train", "val"], split)
    return [InputRow(kind, count, data, of_split, batch_size, device) for count in workers]


def parse_counts(flag: str, text: str) -> list[int]:
    """`1,2,4` → [1, 2, 4]."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(flag, text, "must be whole numbers from 1, separated by commas")
    return counts


def print_input_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A table of `RowRates.to_dict`, and the notes on each row."""
    console = Console(highlight=False)
    table = Table("row", "images/s", "lowest–highest", "from")
    for row in rows:
        spread = f"{row['lowest']:,.0f}–{row['highest']:,.0f}"
        table.add_row(row["name"], f"{row['images_per_s']:,.0f}", spread, row["directory"])
    console.print(table)
    for row in rows:
        # The remarks of rounds differ in counts only: the last is enough.
        for note in filter(None, (row["input"], *row["remarks"][-1:])):
            console.print(f"{row['name']}: {note}", markup=False)


def report_progress(text: str) -> None:
    sys.stderr.write(text + "\n")


@bench.command("allreduce")
def allreduce(
    ranks: options.Ranks = 0,
    algorithms: str = typer.Option(
        "all", help="Names, separated by commas (docs/communication.md)."
    ),
    sizes: Path | None = typer.Option(None, help="A size table (paceline tune): adds hybrid."),
    byte_list: str = typer.Option("", "--bytes", help="Sizes, with commas: 4096,64KiB,16MiB."),
    min_bytes: str = typer.Option("1KiB", help="First size, where --bytes is not given."),
    max_bytes: str = typer.Option("16MiB", help="Last size."),
    factor: options.SizeFactor = 4.0,
    wire: str = typer.Option(
        "float32", help="float32, float16, bfloat16, int8, float8_e4m3 or float8_e5m2."
    ),
    group_size: options.GroupSize = 0,
    iterations: int = typer.Option(20, help="Samples of each; the median counts."),
    warm_up: int = typer.Option(3, help="Samples before."),
    size_limit_s: float = typer.Option(0.0, help="Seconds for each size at most; 0: no limit."),
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    as_json: options.AsJson = False,
) -> int:
    """All-reduce: every size by every algorithm, against the backend's own."""
    check_settings(device, backend, group_size)
    own = wire_format(wire, "--wire").algorithm
    if wire == AUTO:
        raise ConfigError("--wire", wire, "is each gradient's own format", "name a format")
    names = parse_algorithms(algorithms)
    if own and (algorithms != "all" or sizes is not None):
        name, value = ("--sizes", str(sizes)) if sizes is not None else ("--algorithms", algorithms)
        raise ConfigError(name, value, f"cannot sum {wire} numbers", f"leave it out: {own} does")
    table = None if sizes is None else SizeTable.read(sizes)
    check_at_least(1, {"--iterations": iterations})
    check_at_least(0, {"--warm-up": warm_up})
    parts = [part for part in byte_list.split(",") if part.strip()]
    given = tuple(parse_bytes("--bytes", part) for part in parts)
    low, high = parse_size_range(min_bytes, max_bytes, factor)
    if (code := run_on_ranks(ranks)) is not None:
        return code

    from paceline.bench.allreduce import AllReduceJob, choose_sizes
    from paceline.tune.timing import RankGroup

    job = AllReduceJob(
        given or choose_sizes(low, high, factor), names, table, wire, iterations, warm_up,
        size_limit_s or None,
    )  # fmt: skip
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        rows = _measure_sizes(joined, job, print_lines=joined.rank == 0 and not as_json)
        settings = vars(job) | {"table": None if table is None else table.to_table()}
        if joined.rank == 0 and as_json:
            print_json({
                "settings": settings, "cluster": joined.describe(), "rows": rows,
                **environment(joined.device),
            })  # fmt: skip
    return 0


def _measure_sizes(
    joined: RankGroup, job: AllReduceJob, *, print_lines: bool
) -> list[dict[str, Any]]:
    """A size can take minutes: its lines are printed as soon as it is measured."""
    from paceline.bench.allreduce import AllReduceBench

    measuring, rows = AllReduceBench(joined, job), []
    if print_lines:
        sys.stdout.write(_ALLREDUCE_HEAD)
    for size in job.sizes:
        found = measuring.measure(size)
        rows += found
        if print_lines:
            sys.stdout.writelines(map(_allreduce_line, found))
            sys.stdout.flush()
    return rows


_ALLREDUCE_HEAD = (
    f"{'bytes':>10}  {'algorithm':<17}{'time ms':>10}{'p10':>10}{'p90':>10}{'algbw GB/s':>12}"
    f"{'busbw GB/s':>12}{'× native':>10}\n"
)


def _allreduce_line(row: dict[str, Any]) -> str:
    name = f"hybrid: {row['chosen']}" if "chosen" in row else row["algorithm"]
    return (
        f"{row['bytes']:>10}  {name:<17}{1e3 * row['s']:>10.3f}{1e3 * row['s_p10']:>10.3f}"
        f"{1e3 * row['s_p90']:>10.3f}{row['algbw_gb_s']:>12.4f}{row['busbw_gb_s']:>12.4f}"
        f"{row['speed_against_native']:>10.2f}\n"
    )
