"""`paceline bench`: measurements against peers, in the same run.

In: what to measure. Out: a table, or one JSON object with `--json`, environment included.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import bench_input, bench_ranks
from paceline.core.errors import ConfigError

bench = typer.Typer(help="Measure against peers.", no_args_is_help=True)
bench.command("allreduce")(bench_ranks.allreduce)
bench.command("exchange")(bench_ranks.exchange)
bench.command("ddp")(bench_ranks.ddp)
bench.command("input")(bench_input.bench_input)


@bench.command("step")
def step(
    model: str = typer.Option("resnet50", help="Which model (docs/models.md)."),
    batch_size: int = typer.Option(256, "--batch-size", "-b", help="Of one process."),
    image_size: int = typer.Option(224, help="Edge of the images in pixels."),
    classes: int = typer.Option(1000, help="Number of classes."),
    steps: int = typer.Option(50, help="Steps to time; the median counts."),
    warm_up: int = typer.Option(20, help="Steps before."),
    rows: list[str] = typer.Option([], "--row", help="Only this row; may be repeated."),
    row_limit_s: float = typer.Option(900.0, help="A row that takes longer to start is given up."),
    together: int = typer.Option(1, help="Rows that compile side by side; they measure in turn."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """A whole training step on synthetic images: ours against plain PyTorch."""
    from paceline.bench.step_table import choose_rows, measure_rows, ratios
    from paceline.models.settings import check_model_name

    check_model_name(model)
    for flag, count in (
        ("--batch-size", batch_size), ("--steps", steps), ("--warm-up", warm_up),
        ("--together", together),
    ):  # fmt: skip
        if count < 1:
            raise ConfigError(flag, count, "must be at least 1")
    common = {
        "model": model, "batch_size": batch_size, "image_size": image_size, "classes": classes,
        "device": chosen_device(device), "steps": steps, "warm_up": warm_up,
    }  # fmt: skip
    console = Console(stderr=as_json)
    table = Table("row", "images/s", "ms a step", "p10–p90", "start s", "GiB", "what")

    def tell(result: dict[str, Any]) -> None:
        """Rows can take minutes: each is told as soon as it is there."""
        speed = f"{result['images_per_s']:,.0f} images/s" if "step_s" in result else result["error"]
        sys.stderr.write(f"{result['name']}: {speed}\n")

    results = measure_rows(choose_rows(rows, common), row_limit_s, together, tell)
    found = ratios(results)
    if as_json:
        report = {"settings": common, "rows": results, "ratios": found, **environment(device)}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        for r in results:
            table.add_row(*_step_cells(r))
        console.print(table)
        for name, value in found.items():
            console.print(f"{name}: {value:.3f} ×", highlight=False)
    return 0 if all("step_s" in r for r in results) else 1


def _step_cells(result: dict[str, Any]) -> tuple[str, ...]:
    if "error" in result:
        return (result["name"], "–", "–", "–", "–", "–", result["error"])
    low, high = 1e3 * result["step_s_p10"], 1e3 * result["step_s_p90"]
    return (
        result["name"], f"{result['images_per_s']:,.0f}", f"{1e3 * result['step_s']:.2f}",
        f"{low:.2f}–{high:.2f}", f"{result['start_s']:.0f}", f"{result['memory_gib']:.1f}",
        result["what"],
    )  # fmt: skip


@bench.command("optimizer")
def optimizer(
    model: str = typer.Option("resnet50", help="Whose parameters."),
    amp_dtype: str = typer.Option("auto", help="fp16, bf16, fp32 or auto."),
    repeats: int = typer.Option(50, help="Updates to time; the median counts."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """One update of all weights: ours against what people use."""
    import torch

    from paceline.bench.optimizer_rows import measure_all
    from paceline.models.settings import check_model_name

    check_model_name(model)
    if repeats < 1:
        raise ConfigError("--repeats", repeats, "must be at least 1")
    place = torch.device(chosen_device(device))
    found = measure_all(model, place, amp_dtype=amp_dtype, repeats=repeats, warm_up=5)
    if as_json:
        sys.stdout.write(json.dumps({**found, **environment(device)}, indent=1) + "\n")
        return 0
    console = Console()
    table = Table("update", "ms", "p10–p90", "what")
    for row in found["rows"]:
        spread = f"{row['ms_p10']:.3f}–{row['ms_p90']:.3f}"
        table.add_row(row["name"], f"{row['ms']:.3f}", spread, row["note"])
    console.print(table)
    console.print(
        f"{model}, {found['elements']:,} weights, {found['dtype']}: {found['bytes'] / 1e6:,.0f} MB "
        f"to move, a copy of as many takes {found['floor_ms']:.3f} ms", highlight=False,
    )  # fmt: skip
    return 0


def chosen_device(name: str) -> str:
    import torch

    from paceline.core.gpu_connections import ask_for_connections

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("--device", name, "unknown", "use auto, cpu or cuda")
    ask_for_connections()
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", name, "no CUDA device here", "use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def environment(device: str) -> dict[str, Any]:
    import torch

    from paceline.train.machine import hardware, versions

    return {"versions": versions(), "hardware": hardware(torch.device(chosen_device(device)))}
