"""`paceline bench allreduce`, `exchange` and `ddp`: measurements between ranks.

Rank 0 prints a table or, with `--json`, one object that includes the environment and the raw samples. The
ranks are those of a launcher, processes on this host, or processes on the hosts of an emulated cluster.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.train import without_options
from paceline.comm.settings import CommSettings
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, LaunchError, nearest
from paceline.core.topology import Topology
from paceline.core.units import parse_bytes
from paceline.plan.fusion_plan import ALL_TO_ALL, EIGHT_BIT, WIRES
from paceline.plan.schedules import algorithm_names, check_name
from paceline.plan.size_table import SizeTable

if TYPE_CHECKING:
    import torch

    from paceline.bench.timing import RankGroup

HOSTS = typer.Option(0, help="Hosts of an emulated cluster (root on Linux; docs/cluster.md).")
RANKS_PER_HOST = typer.Option(1, help="Ranks on each of these hosts.")
LINK_MBIT = typer.Option(0.0, help="Rate of each host's link; 0: no limit.")
RANKS = typer.Option(0, help="Ranks on this host, without a cluster or launcher.")
DEVICE = typer.Option("auto", help="auto, cpu or cuda.")
BACKEND = typer.Option("auto", help="auto, gloo or nccl.")
SHARE_GPUS = typer.Option(False, "--share-gpus", help="NCCL ranks may share a GPU, under MPS.")
JSON = typer.Option(False, "--json", help="One JSON object on standard output.")
# Not passed on to ranks; --link-mbit is, to compute the share of the link.
_START_OPTIONS = ("--hosts", "--ranks-per-host", "--ranks")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a benchmark run. `hosts` > 0: on an emulated cluster (--hosts,
    --ranks-per-host, --link-mbit); `ranks` > 0: as processes of this host (--ranks); otherwise as
    started by a launcher."""

    hosts: int = 0
    ranks_per_host: int = 1
    link_mbit: float = 0.0
    ranks: int = 0

    def __post_init__(self) -> None:
        for flag, value in (("--hosts", self.hosts), ("--ranks", self.ranks)):
            if value < 0:
                raise ConfigError(flag, value, "must be at least 1")
        if self.ranks_per_host < 1:
            raise ConfigError("--ranks-per-host", self.ranks_per_host, "must be at least 1")
        if self.link_mbit < 0:
            raise ConfigError("--link-mbit", self.link_mbit, "must be above 0", "try 200")
        if self.hosts and self.ranks:
            raise ConfigError(
                "--ranks", self.ranks, "cannot be given with --hosts", "use --ranks-per-host"
            )
        if self.ranks_per_host > 1 and not self.hosts:
            raise ConfigError(
                "--ranks-per-host", self.ranks_per_host, "needs --hosts", "or use --ranks"
            )

    @property
    def rate(self) -> str | None:
        """Rate of the links of an emulated cluster; None: unlimited."""
        return f"{self.link_mbit:g}mbit" if self.link_mbit else None

    def is_launched(self) -> bool:
        """Whether this process is a rank. Raises ConfigError if it is and the flags ask to start
        ranks, or if it is not and they do not."""
        topology = Topology.from_env(os.environ)
        launched = topology.launcher != "single"
        flag = "--hosts" if self.hosts else "--ranks"
        if launched and (self.hosts or self.ranks):
            raise ConfigError(
                flag,
                self.hosts or self.ranks,
                f"this process is a rank of a launcher already ({topology.launcher})",
                "leave the flag out under torchrun, srun and mpirun",
            )
        if not launched and not self.hosts and not self.ranks:
            raise ConfigError(
                "--ranks",
                None,
                "no ranks to measure between",
                "give --ranks 8, or --hosts 4 --ranks-per-host 4, or start with torchrun",
            )
        return launched


def run_on_ranks(placement: Placement) -> int | None:
    """Runs this command line on the ranks of `placement` and returns the exit code; None in a process
    that is a rank itself, and continues."""
    if placement.is_launched():
        return None
    arguments = without_options(sys.argv[1:], _START_OPTIONS)
    if placement.ranks:
        from paceline.cli.launch import launch

        return launch(placement.ranks, arguments, port=0, max_restarts=0)
    from paceline.bench.cluster import EmulatedCluster, why_unavailable
    from paceline.bench.cluster.job import show

    problem = why_unavailable()
    if problem:
        raise LaunchError(
            f"no emulated cluster: {problem}", "use --ranks, or torchrun on real hosts"
        )
    with EmulatedCluster(placement.hosts, placement.rate) as cluster:
        return show(cluster.ranks(["-m", "paceline", *arguments], placement.ranks_per_host))


def parse_size_range(min_bytes: str, max_bytes: str, factor: float) -> tuple[int, int]:
    """First and last size of a series that grows by `factor`."""
    if factor <= 1:
        raise ConfigError("--factor", factor, "must be above 1", "try 4")
    low, high = parse_bytes("--min-bytes", min_bytes), parse_bytes("--max-bytes", max_bytes)
    if low > high:
        raise ConfigError("--min-bytes", min_bytes, f"is more than --max-bytes {max_bytes}")
    return low, high


def allreduce(
    hosts: int = HOSTS,
    ranks_per_host: int = RANKS_PER_HOST,
    link_mbit: float = LINK_MBIT,
    ranks: int = RANKS,
    algorithms: str = typer.Option(
        "all", help="Names, separated by commas (docs/communication.md)."
    ),
    sizes: Path | None = typer.Option(None, help="A size table (paceline tune): adds hybrid."),
    byte_list: str = typer.Option("", "--bytes", help="Sizes, with commas: 4096,64KiB,16MiB."),
    min_bytes: str = typer.Option("1KiB", help="First size, where --bytes is not given."),
    max_bytes: str = typer.Option("16MiB", help="Last size."),
    factor: float = typer.Option(4.0, help="From one size to the next."),
    wire: str = typer.Option(
        "float32", help="float32, float16, bfloat16, int8, float8_e4m3 or float8_e5m2."
    ),
    group_size: int = typer.Option(0, help="Ranks of a group; 0: those of a node."),
    iterations: int = typer.Option(20, help="Samples of each; the median counts."),
    warm_up: int = typer.Option(3, help="Samples before."),
    size_limit_s: float = typer.Option(0.0, help="Seconds for each size at most; 0: no limit."),
    device: str = DEVICE,
    backend: str = BACKEND,
    share_gpus: bool = SHARE_GPUS,
    as_json: bool = JSON,
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
    code = run_on_ranks(placement)
    if code is not None:
        return code

    from paceline.bench.allreduce import AllReduceBench, AllReduceJob, choose_sizes
    from paceline.bench.timing import RankGroup

    job = AllReduceJob(
        given or choose_sizes(low, high, factor), names, table, wire, iterations, warm_up,
        size_limit_s or None, link_mbit,
    )  # fmt: skip
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        measuring, rows = AllReduceBench(joined, job), []
        # A size can take minutes: its lines are printed as soon as it is measured.
        print_lines = joined.rank == 0 and not as_json
        if print_lines:
            sys.stdout.write(_ALLREDUCE_HEAD)
        for size in job.sizes:
            found = measuring.measure(size)
            rows += found
            if print_lines:
                sys.stdout.writelines(map(_allreduce_line, found))
                sys.stdout.flush()
        settings = vars(job) | {"table": None if table is None else table.to_table()}
        report = _report(joined, settings, rows)
        if joined.rank == 0 and as_json:
            print_json(report)
    return 0


def exchange(
    model: str = typer.Option("resnet50", help="Whose gradients (docs/models.md)."),
    hosts: int = HOSTS,
    ranks_per_host: int = RANKS_PER_HOST,
    link_mbit: float = LINK_MBIT,
    ranks: int = RANKS,
    algorithm: str = typer.Option("", help="An all-reduce algorithm, where no table is given."),
    sizes: Path | None = typer.Option(None, help="A size table (paceline tune)."),
    plan: Path | None = typer.Option(None, help="A plan file, which decides everything."),
    fusion_mib: float = typer.Option(16.0, help="Size at which a bucket is closed."),
    group_size: int = typer.Option(0, help="Ranks of a group; 0: those of a node."),
    iterations: int = typer.Option(10, help="Samples of each; the median counts."),
    warm_up: int = typer.Option(2, help="Samples before."),
    device: str = DEVICE,
    backend: str = BACKEND,
    share_gpus: bool = SHARE_GPUS,
    as_json: bool = JSON,
) -> int:
    """One whole gradient exchange of a model: ours against DDP's."""
    from paceline.models.settings import check_model_name
    from paceline.plan.plan_file import PlanFile

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
    elif sizes is not None:
        SizeTable.read(sizes)
        comm = CommSettings(
            algorithm="hybrid", sizes=str(sizes), fusion_mib=fusion_mib, group_size=group_size
        )
    else:
        comm = CommSettings(
            algorithm=algorithm or "auto", fusion_mib=fusion_mib, group_size=group_size
        )
    code = run_on_ranks(placement)
    if code is not None:
        return code

    from paceline.bench.exchange import ExchangeBench, ExchangeJob
    from paceline.bench.timing import RankGroup

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
        if joined.rank == 0:
            if as_json:
                print_json(report)
            else:
                sys.stdout.write(_exchange_table(report))
    return 0


def ddp(
    model: str = typer.Option("resnet50", help="Which model (docs/models.md)."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", help="Of one rank."),
    image_size: int = typer.Option(224, help="Edge of the images in pixels."),
    classes: int = typer.Option(1000, help="Number of classes."),
    hosts: int = HOSTS,
    ranks_per_host: int = RANKS_PER_HOST,
    link_mbit: float = LINK_MBIT,
    ranks: int = RANKS,
    ways: list[str] = typer.Option([], "--way", help="Only this way; may be repeated."),
    block: int = typer.Option(10, help="Steps of one sample."),
    iterations: int = typer.Option(7, help="Samples of each; the median counts."),
    norm: str = typer.Option(
        "auto", help="DDP's batch-norm kernels: cudnn or torch; auto: torch where GPUs are shared."
    ),
    device: str = DEVICE,
    backend: str = BACKEND,
    share_gpus: bool = SHARE_GPUS,
    as_json: bool = JSON,
) -> int:
    """Whole training steps on several ranks: ours against DistributedDataParallel."""
    from paceline.models.settings import check_model_name

    placement = Placement(hosts, ranks_per_host, link_mbit, ranks)
    check_settings(device, backend, 0)
    check_model_name(model)
    check_at_least(1, {"--iterations": iterations, "--batch-size": batch_size, "--block": block})
    if norm not in ("auto", "cudnn", "torch"):
        raise ConfigError("--norm", norm, "unknown", "use auto, cudnn or torch")
    code = run_on_ranks(placement)
    if code is not None:
        return code

    from paceline.bench.ddp import NAMES, DdpBench, DdpJob
    from paceline.bench.timing import RankGroup

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
        if joined.rank == 0:
            if as_json:
                print_json(report)
            else:
                sys.stdout.write(_ddp_table(report))
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


def parse_algorithms(text: str) -> tuple[str, ...]:
    if text == "all":
        return algorithm_names()
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        check_name(name, "--algorithms")
    return names


def check_settings(device: str, backend: str, group_size: int) -> None:
    """Before any rank starts, so that an error is shown once."""
    RunConfig().with_values(
        {"run.device": device, "comm.backend": backend, "comm.group_size": group_size}
    )


def check_at_least(least: int, values: Mapping[str, float]) -> None:
    """`values` by option."""
    for option, value in values.items():
        if value < least:
            raise ConfigError(option, value, f"must be at least {least}")


def _report(
    joined: RankGroup, settings: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    described = {"settings": settings, "cluster": joined.describe(), "rows": rows}
    return described | environment(joined.device)


def print_json(report: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


def environment(device: torch.device | str) -> dict[str, Any]:
    import torch

    from paceline.train.machine import hardware, versions

    return {"versions": versions(), "hardware": hardware(torch.device(device))}
