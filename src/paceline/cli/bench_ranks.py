"""`paceline bench allreduce`, `exchange` and `ddp`: measurements between ranks.

Rank 0 prints a table or, with `--json`, one object that includes the environment and the raw samples. The
ranks are those of a launcher, processes on this host, or processes on the hosts of an emulated cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import options
from paceline.cli.options import (
    Placement,
    check_at_least,
    check_settings,
    environment,
    parse_algorithms,
    parse_size_range,
    print_json,
    run_on_ranks,
)
from paceline.comm.settings import CommSettings
from paceline.core.errors import ConfigError, nearest
from paceline.core.units import parse_bytes
from paceline.models.settings import check_model_name
from paceline.plan.fusion_plan import ALL_TO_ALL, EIGHT_BIT, WIRES
from paceline.plan.plan_file import PlanFile
from paceline.plan.size_table import SizeTable

if TYPE_CHECKING:
    from paceline.bench.allreduce import AllReduceJob
    from paceline.tune.timing import RankGroup


def allreduce(
    hosts: options.Hosts = 0,
    ranks_per_host: options.RanksPerHost = 1,
    link_mbit: options.LinkMbit = 0.0,
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
    placement = Placement(hosts, ranks_per_host, link_mbit, ranks)
    check_settings(device, backend, group_size)
    if wire not in WIRES or wire == "auto":
        raise ConfigError("--wire", wire, "unknown", f"use one of {', '.join(WIRES[1:])}")
    names = parse_algorithms(algorithms)
    if wire in EIGHT_BIT and (algorithms != "all" or sizes is not None):
        name, value = ("--sizes", str(sizes)) if sizes is not None else ("--algorithms", algorithms)
        raise ConfigError(
            name, value, f"cannot sum {wire} numbers", f"leave it out: {ALL_TO_ALL} does"
        )
    table = None if sizes is None else SizeTable.read(sizes)
    check_at_least(1, {"--iterations": iterations})
    check_at_least(0, {"--warm-up": warm_up})
    parts = [part for part in byte_list.split(",") if part.strip()]
    given = tuple(parse_bytes("--bytes", part) for part in parts)
    low, high = parse_size_range(min_bytes, max_bytes, factor)
    if (code := run_on_ranks(placement)) is not None:
        return code

    from paceline.bench.allreduce import AllReduceJob, choose_sizes
    from paceline.tune.timing import RankGroup

    job = AllReduceJob(
        given or choose_sizes(low, high, factor), names, table, wire, iterations, warm_up,
        size_limit_s or None, link_mbit,
    )  # fmt: skip
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        rows = _measure_sizes(joined, job, print_lines=joined.rank == 0 and not as_json)
        settings = vars(job) | {"table": None if table is None else table.to_table()}
        report = _report(joined, settings, rows)
        if joined.rank == 0 and as_json:
            print_json(report)
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


def exchange(
    model: str = typer.Option("resnet50", help="Whose gradients (docs/models.md)."),
    hosts: options.Hosts = 0,
    ranks_per_host: options.RanksPerHost = 1,
    link_mbit: options.LinkMbit = 0.0,
    ranks: options.Ranks = 0,
    algorithm: str = typer.Option("", help="An all-reduce algorithm, where no table is given."),
    sizes: Path | None = typer.Option(None, help="A size table (paceline tune)."),
    plan: Path | None = typer.Option(None, help="A plan file, which decides everything."),
    fusion_mib: float = typer.Option(16.0, help="Size at which a bucket is closed."),
    group_size: options.GroupSize = 0,
    iterations: int = typer.Option(10, help="Samples of each; the median counts."),
    warm_up: int = typer.Option(2, help="Samples before."),
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    as_json: options.AsJson = False,
) -> int:
    """One whole gradient exchange of a model: ours against DDP's."""
    placement = Placement(hosts, ranks_per_host, link_mbit, ranks)
    check_settings(device, backend, group_size)
    check_model_name(model)
    check_at_least(1, {"--iterations": iterations})
    check_at_least(0, {"--warm-up": warm_up})
    given = [flag for flag, value in (("--algorithm", algorithm), ("--sizes", sizes),
             ("--plan", plan)) if value]  # fmt: skip
    if len(given) > 1:
        raise ConfigError(given[0], None, f"cannot be given with {given[1]}", "leave out one")
    if plan is not None:
        PlanFile.read(plan)
        comm = CommSettings(plan=str(plan), group_size=group_size)
    else:
        if sizes is not None:
            SizeTable.read(sizes)
        comm = CommSettings(
            algorithm="hybrid" if sizes else algorithm or "auto", sizes=str(sizes or ""),
            fusion_mib=fusion_mib, group_size=group_size,
        )  # fmt: skip
    if (code := run_on_ranks(placement)) is not None:
        return code

    from paceline.bench.exchange import ExchangeBench, ExchangeJob
    from paceline.tune.timing import RankGroup

    job = ExchangeJob(model, comm, iterations=iterations, warm_up=warm_up)
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        measuring = ExchangeBench(joined, job)
        rows = measuring.measure()
        measuring.close()
        settings = {**vars(job), "comm": vars(comm)}
        more = {"link_mbit": link_mbit, "bytes": measuring.bytes}
        report = _report(joined, settings, rows) | more
        _print_report(joined, report, as_json, _exchange_table)
    return 0


def ddp(
    model: options.Model = "resnet50",
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Of one rank."),
    image_size: options.ImageSize = 224,
    classes: options.Classes = 1000,
    hosts: options.Hosts = 0,
    ranks_per_host: options.RanksPerHost = 1,
    link_mbit: options.LinkMbit = 0.0,
    ranks: options.Ranks = 0,
    ways: list[str] = typer.Option([], "--way", help="Only this way; may be repeated."),
    block: int = typer.Option(10, help="Steps of one sample."),
    iterations: int = typer.Option(7, help="Samples of each; the median counts."),
    norm: str = typer.Option(
        "auto", help="DDP's batch-norm kernels: cudnn or torch; auto: torch where GPUs are shared."
    ),
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    share_gpus: options.ShareGpus = False,
    as_json: options.AsJson = False,
) -> int:
    """Whole training steps on several ranks: ours against DistributedDataParallel."""
    placement = Placement(hosts, ranks_per_host, link_mbit, ranks)
    check_settings(device, backend)
    check_model_name(model)
    check_at_least(1, {"--iterations": iterations, "--batch-size": batch_size, "--block": block})
    if norm not in ("auto", "cudnn", "torch"):
        raise ConfigError("--norm", norm, "unknown", "use auto, cudnn or torch")
    if (code := run_on_ranks(placement)) is not None:
        return code

    from paceline.bench.ddp import NAMES, DdpBench, DdpJob
    from paceline.tune.timing import RankGroup

    if norm == "auto":
        norm = "torch" if share_gpus else "cudnn"
    for name in ways:
        if name not in NAMES:
            raise ConfigError("--way", name, "unknown", nearest(name, NAMES))
    chosen = tuple(dict.fromkeys(ways)) or NAMES
    job = DdpJob(model, batch_size, image_size, classes, block, iterations, chosen, norm)
    with RankGroup(backend=backend, device=device, share_gpus=share_gpus) as joined:
        measuring = DdpBench(joined, job)
        rows = measuring.measure()
        measuring.close()  # after an error the group releases the CUDA graphs itself
        report = _report(joined, vars(job), rows) | {"link_mbit": link_mbit}
        _print_report(joined, report, as_json, _ddp_table)
    return 0


def _ddp_table(report: dict[str, Any]) -> str:
    head = f"{'way':<24}{'images/s':>10}{'ms a step':>11}{'p10':>8}{'p90':>8}{'exposed':>9}{'× ddp':>7}"
    lines = [head]
    for row in report["rows"]:
        exposed = f"{1e3 * row['exposed_s']:.2f}" if "exposed_s" in row else "–"
        ratio = f"{row['speed_against_ddp']:.3f}" if "speed_against_ddp" in row else "–"
        lines.append(
            f"{row['way']:<24}{row['images_per_s']:>10,.0f}{1e3 * row['step_s']:>11.2f}"
            f"{1e3 * row['step_s_p10']:>8.2f}{1e3 * row['step_s_p90']:>8.2f}{exposed:>9}{ratio:>7}"
        )
    return "\n".join(lines) + "\n"


def _exchange_table(report: dict[str, Any]) -> str:
    head = f"{'way':<16}{'time ms':>10}{'p10':>10}{'p90':>10}{'× ddp':>8}{'× ddp fp16':>12}  what"
    lines = [
        f"{row['way']:<16}{1e3 * row['s']:>10.1f}{1e3 * row['s_p10']:>10.1f}"
        f"{1e3 * row['s_p90']:>10.1f}{row['speed_against_ddp']:>8.2f}"
        f"{row['speed_against_ddp_fp16']:>12.2f}  {row['about']}"
        for row in report["rows"]
    ]
    model = report["settings"]["model"]
    end = (
        f"{model}: {report['bytes'] / 1e6:,.1f} MB of gradients, {report['cluster']['ranks']} ranks"
    )
    return "\n".join([head, *lines, end]) + "\n"


_ALLREDUCE_HEAD = (
    f"{'bytes':>10}  {'algorithm':<17}{'time ms':>10}{'p10':>10}{'p90':>10}{'algbw GB/s':>12}"
    f"{'busbw GB/s':>12}{'× native':>10}{'link %':>8}\n"
)


def _allreduce_line(row: dict[str, Any]) -> str:
    share = f"{100 * row['link_share']:.0f}" if "link_share" in row else "–"
    name = f"hybrid: {row['chosen']}" if "chosen" in row else row["algorithm"]
    return (
        f"{row['bytes']:>10}  {name:<17}{1e3 * row['s']:>10.3f}{1e3 * row['s_p10']:>10.3f}"
        f"{1e3 * row['s_p90']:>10.3f}{row['algbw_gb_s']:>12.4f}{row['busbw_gb_s']:>12.4f}"
        f"{row['speed_against_native']:>10.2f}{share:>8}\n"
    )


def _report(
    joined: RankGroup, settings: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    described = {"settings": settings, "cluster": joined.describe(), "rows": rows}
    return described | environment(joined.device)


def _print_report(
    joined: RankGroup, report: dict[str, Any], as_json: bool, table: Callable[[dict[str, Any]], str]
) -> None:
    if joined.rank == 0 and as_json:
        print_json(report)
    elif joined.rank == 0:
        sys.stdout.write(table(report))
