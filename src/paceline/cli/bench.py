"""`paceline bench`: training step, optimizer and input pipeline against peers, measured in the same run.

The result is a table or, with `--json`, one object that includes the environment. `bench_ranks` has the
benchmarks between ranks.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Literal, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli import bench_ranks, options
from paceline.cli.options import (
    check_at_least,
    chosen_device,
    environment,
    print_json,
)
from paceline.config import RunConfig, parse_assignment
from paceline.core.errors import ConfigError
from paceline.core.units import format_duration, format_percent
from paceline.models.settings import check_model_name

if TYPE_CHECKING:
    from paceline.bench.input_rows import InputRow

bench = typer.Typer(help="Measure against peers.", no_args_is_help=True)
bench.command("allreduce")(bench_ranks.allreduce)
bench.command("exchange")(bench_ranks.exchange)
bench.command("ddp")(bench_ranks.ddp)
_PEERS = ("dataloader", "webdataset", "processes")
# Settings of a step that have a flag in `bench`.
_FLAG_OF = {
    "model.name": "--model", "data.image_size": "--image-size", "run.device": "--device",
    "run.batch_size": "--batch-size", "run.global_batch_size": "--batch-size",
    "model.num_classes": "--classes",
}  # fmt: skip


def _switches(settings: list[str], flags: dict[str, str] = _FLAG_OF) -> dict[str, Any]:
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
        _report_progress(f"{result['name']}: {speed}")

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


@bench.command("kernels")
def kernels(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(256, "--batch-size", "-b", help="Of one process."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    steps: int = typer.Option(3, help="Steps to profile."),
    warm_up: int = typer.Option(3, help="Steps before."),
    top: int = typer.Option(30, help="Rows to print; --json has all."),
    shapes: bool = typer.Option(False, "--shapes", help="A row for each shape."),
    settings: list[str] = typer.Option([], "--set", help="section.key=value of the step."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> int:
    """Where a training step's time goes, kernel by kernel, against the memory's limit."""
    # Before torch: its profiler would report its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from paceline.bench.kernels import profile_step
    from paceline.tune.step import StepRow

    check_model_name(model)
    counts = {"--batch-size": batch_size, "--steps": steps, "--warm-up": warm_up}
    check_at_least(1, counts | {"--classes": classes, "--top": top})
    switches = _switches(settings)
    chosen = chosen_device(device)
    row = StepRow(
        name="kernels", kind="ours", model=model, batch_size=batch_size, image_size=image_size,
        classes=classes, device=chosen, steps=steps, warm_up=warm_up, switches=switches,
    )  # fmt: skip
    found = profile_step(row, shapes=shapes)
    if as_json:
        print_json({
            "settings": {"model": model, "batch_size": batch_size, "image_size": image_size,
                         "changed": switches}, **found, **environment(chosen),
        })  # fmt: skip
        return 0
    console = Console(highlight=False)
    table = Table("ms", "share", "calls", "MB", "of copy", "TFLOP/s")
    for name in ("call", "kernels"):
        table.add_column(name, overflow="fold")
    for each in found["rows"][:top]:
        table.add_row(*_kernel_cells(each, found["device_ms"]))
    console.print(table)
    console.print(
        f"a step: {found['device_ms']:.2f} ms in {len(found['rows'])} rows, "
        f"{found['unknown_ms']:.2f} ms by calls without known bytes; a copy of the known ones takes "
        f"{found['limit_ms']:.2f} ms at {found['copy_bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    console.print(found["step"], markup=False)
    return 0


def _kernel_cells(row: dict[str, Any], whole_ms: float) -> tuple[str | Text, ...]:
    def shown(name: str, form: str) -> str:
        return "–" if row[name] is None else format(row[name], form)

    return (
        f"{row['ms']:.3f}", format_percent(100 * row["ms"] / whole_ms, 1), f"{row['calls']:g}",
        shown("mb", ",.1f"), shown("share_of_copy", ".2f"), shown("tflops_per_s", ",.3g"),
        Text(" ".join(filter(None, (row["call"], row["shape"])))), Text(row["kernels"]),
    )  # fmt: skip


@bench.command("optimizer")
def optimizer(
    model: str = typer.Option("resnet50", help="Whose parameters."),
    amp_dtype: options.AmpDtype = "auto",
    repeats: int = typer.Option(50, help="Updates to time; the median counts."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> int:
    """One update of all weights: ours against PyTorch's optimizers."""
    import torch

    from paceline.bench.optimizer import measure_all

    check_model_name(model)
    check_at_least(1, {"--repeats": repeats})
    chosen = torch.device(chosen_device(device))
    found = measure_all(model, chosen, amp_dtype=amp_dtype, repeats=repeats, warm_up=5)
    if as_json:
        print_json({**found, **environment(chosen)})
        return 0
    console = Console()
    table = Table("update", "ms", "p10–p90", "what")
    for row in found["rows"]:
        spread = f"{row['ms_p10']:.3f}–{row['ms_p90']:.3f}"
        table.add_row(row["name"], f"{row['ms']:.3f}", spread, row["note"])
    console.print(table)
    console.print(
        f"{model}, {found['elements']:,} weights, {found['dtype']}: {found['bytes'] / 1e6:,.0f} MB "
        f"to move; a plain copy of that takes {found['floor_ms']:.3f} ms", highlight=False,
    )  # fmt: skip
    return 0


@bench.command("input")
def bench_input(
    data_dir: str = typer.Option("", help="Our images: shards or class folders (docs/data.md)."),
    peer_dir: str = typer.Option("", help="The peers' images, where they are others."),
    split: str = typer.Option("train", help="train (random crops) or val (centre crops)."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Images of a batch."),
    image_size: int = typer.Option(224, help="Edge of the crops in pixels."),
    rounds: int = typer.Option(5, help="Each measures every row once; the median counts."),
    seconds: float = typer.Option(5.0, help="For each row of a round."),
    workers: str = typer.Option("2", help="Our threads; several counts with commas."),
    peers: str = typer.Option("dataloader,webdataset", help="Also processes: our own in them."),
    peer_workers: str = typer.Option("1,2,3,4", help="The peers' processes, with commas."),
    decoder: str = typer.Option("", help="data.decoder of our rows."),
    settings: list[str] = typer.Option(
        [], "--set", help="data.KEY=VALUE; others of the step of --train-step."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda: where the batches must be."),
    train_step: str = typer.Option("", help="A model: its training from these images, too."),
    steps: int = typer.Option(50, help="Steps of each round of --train-step."),
    warm_up: int = typer.Option(20, help="Steps before the first round of --train-step."),
    synthetic_index: int = typer.Option(0, help="Instead: memory and seek on so many samples."),
    as_json: options.AsJson = False,
) -> int:
    """Images/s as normalised tensors: ours against torch's DataLoader with Pillow, and webdataset."""
    from paceline.bench.input_pipelines import measure_training
    from paceline.bench.input_rows import measure_memory, measure_rows, one_torch_thread, ratios

    check_at_least(
        1, {"--batch-size": batch_size, "--rounds": rounds, "--steps": steps, "--warm-up": warm_up}
    )
    if split not in ("train", "val"):
        raise ConfigError("--split", split, "unknown", "use train or val")
    if decoder:
        settings = [*settings, f"data.decoder={decoder}"]
    data_values, switches = _input_settings(settings, train_step, synthetic_index)
    ours, chosen = _counts("--workers", workers), chosen_device(device)
    found: dict[str, Any] = {}
    if synthetic_index:
        if synthetic_index < batch_size:
            raise ConfigError("--synthetic-index", synthetic_index, "is less than a batch")
        with one_torch_thread():
            found["memory"] = measure_memory(
                synthetic_index, batch_size=batch_size, image_size=image_size, workers=ours[0],
                on_progress=_report_progress,
            )  # fmt: skip
    else:
        rows, notes = _rows(
            data_dir, peer_dir or data_dir, split, batch_size, image_size, chosen, ours,
            _counts("--peer-workers", peer_workers), _names(peers),
            data_values,
        )  # fmt: skip
        results = measure_rows(rows, rounds=rounds, seconds=seconds, on_progress=_report_progress)
        found |= {
            "rows": [result.to_dict() for result in results], "ratios": ratios(results),
            "notes": notes,
        }  # fmt: skip
        if train_step:
            fastest = max((r for r in results if r.row.kind == "ours"), key=lambda r: r.median)
            found["training"] = measure_training(
                train_step, fastest.row, switches, rounds=rounds, steps=steps, warm_up=warm_up,
                on_progress=_report_progress,
            )  # fmt: skip
    if as_json:
        asked = {
            "split": split, "batch_size": batch_size, "image_size": image_size, "rounds": rounds,
            "seconds": seconds, "device": chosen, "set": settings,
        }  # fmt: skip
        print_json({"settings": asked, **found, **environment(chosen)})
    else:
        _print_input(found)
    return 0


def _input_settings(
    settings: list[str], train_step: str, synthetic_index: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the data, and those of the step that trains on it, which are refused here and not after
    minutes of measuring."""
    flags = {name: flag for name, flag in _FLAG_OF.items() if name != "model.num_classes"}
    changed = _switches(settings, flags | {"model.name": "--train-step"})
    if "model.num_classes" in changed:
        raise ConfigError("--set", "model.num_classes", "comes from the data", "leave it out")
    switches = {name: value for name, value in changed.items() if not name.startswith("data.")}
    for name in switches if synthetic_index or not train_step else ():
        remedy = "leave out --synthetic-index" if synthetic_index else "add --train-step MODEL"
        raise ConfigError("--set", name, "is a setting of a step", remedy)
    RunConfig().with_values(({"model.name": train_step} if train_step else {}) | switches)
    return {name: value for name, value in changed.items() if name not in switches}, switches


def _rows(
    data_dir: str, peer_dir: str, split: str, batch_size: int, image_size: int, device: str,
    ours: list[int], theirs: list[int], peers: list[str], changed: dict[str, Any],
) -> tuple[list[InputRow], list[str]]:  # fmt: skip
    """Our rows first; and notes on peers that cannot be measured."""
    from paceline.bench.input_pipelines import no_webdataset
    from paceline.bench.input_rows import InputRow, Kind

    if not data_dir:
        raise ConfigError("--data-dir", None, "is needed", "give a folder of shards or classes")
    common: dict[str, Any] = {
        "data.image_size": image_size, "data.eval_resize": round(image_size * 8 / 7),
        "data.resident": "off",
    }  # fmt: skip
    our_data = RunConfig().with_values({**common, "data.dir": data_dir, **changed}).data
    peer_data = RunConfig().with_values({**common, "data.dir": peer_dir}).data
    of_split = cast(Literal["train", "val"], split)
    rows = [InputRow("ours", count, our_data, of_split, batch_size, device) for count in ours]
    notes = []
    for peer in peers:
        problem = no_webdataset(peer_dir, split) if peer == "webdataset" else None
        if problem:
            notes.append(f"webdataset: not measured: {problem}")
            _report_progress(notes[-1])
            continue
        data = our_data if peer == "processes" else peer_data
        rows += [
            InputRow(cast(Kind, peer), count, data, of_split, batch_size, device)
            for count in theirs
        ]
    return rows, notes


def _counts(flag: str, text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(flag, text, "must be whole numbers from 1, separated by commas")
    return counts


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in _PEERS:
            raise ConfigError("--peers", name, "unknown", f"use {', '.join(_PEERS)}")
    return names


def _print_input(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if rows := found.get("rows"):
        table = Table("row", "images/s", "lowest–highest", "from")
        for row in rows:
            spread = f"{row['lowest']:,.0f}–{row['highest']:,.0f}"
            table.add_row(row["name"], f"{row['images_per_s']:,.0f}", spread, row["directory"])
        console.print(table)
        for row in rows:
            # The remarks of rounds differ in counts only: the last is enough.
            for note in filter(None, (row["input"], *row["remarks"][-1:])):
                console.print(f"{row['name']}: {note}", markup=False)
    for name, value in found.get("ratios", {}).items():
        console.print(f"{name}: {value:.2f} ×")
    if training := found.get("training"):
        console.print(
            f"training {training['model']} from these images: "
            f"{training['input_images_per_s']:,.0f} images/s, "
            f"{format_percent(100 * training['share'], 1)} of "
            f"{training['synthetic_images_per_s']:,.0f} synthetic"
        )
    if memory := found.get("memory"):
        console.print(
            f"{memory['samples']:,} samples: at most {memory['most_mib']:,.0f} MiB resident, "
            f"{memory['grown_mib']:+.1f} MiB from a tenth of the epoch to its end; "
            f"seek to its middle in {format_duration(memory['seek_s'])}"
        )


def _report_progress(text: str) -> None:
    sys.stderr.write(text + "\n")
