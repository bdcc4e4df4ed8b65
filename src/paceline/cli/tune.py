"""`paceline tune`: measures the cluster and writes the table of sizes that hybrid all-reduce goes by.

In: where the ranks run, which sizes and algorithms to try. Out: a TOML file with the table, the numbers
behind it and the cost of the links (docs/communication.md), and a summary of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from paceline.bench.placement import Placement
from paceline.cli.bench_ranks import (
    BACKEND,
    DEVICE,
    HOSTS,
    LINK_MBIT,
    RANKS,
    RANKS_PER_HOST,
    SHARE_GPUS,
    algorithm_names,
    check_settings,
    run_on_ranks,
)
from paceline.comm.algorithms.names import ALGORITHMS
from paceline.comm.tuning_choice import MARGIN, MeasuredSize, check_noise
from paceline.comm.tuning_file import ClusterShape, LinkFacts, TuningFile
from paceline.core.errors import ConfigError
from paceline.core.units import format_bytes, parse_bytes

# All but the parameter server, which is there to be compared with.
_WORTH_TRYING = tuple(name for name in ALGORITHMS if name != "central")


def tune(
    output: Path = typer.Option(Path("sizes.toml"), "--output", "-o", help="The file to write."),
    force: bool = typer.Option(False, "--force", help="Overwrite it."),
    hosts: int = HOSTS,
    ranks_per_host: int = RANKS_PER_HOST,
    link_mbit: float = LINK_MBIT,
    ranks: int = RANKS,
    algorithms: str = typer.Option(
        ",".join(_WORTH_TRYING), help="Names, with commas; native always is one."
    ),
    min_bytes: str = typer.Option("1KiB", help="First size."),
    max_bytes: str = typer.Option("64MiB", help="Last size, where the time suffices."),
    factor: float = typer.Option(4.0, help="From one size to the next."),
    iterations: int = typer.Option(30, help="Samples of each at most; the median counts."),
    limit_s: float = typer.Option(180.0, help="Seconds for all sizes together, about."),
    margin: float = typer.Option(MARGIN, help="By how much another must beat native."),
    group_size: int = typer.Option(0, help="Ranks of a group; 0: those of a node."),
    device: str = DEVICE,
    backend: str = BACKEND,
    share_gpus: bool = SHARE_GPUS,
    accept_noise: bool = typer.Option(
        False, "--accept-noise", help="Write the table even where repeated samples differ widely."
    ),
) -> int:
    """Measure this cluster; write the table of sizes for hybrid all-reduce."""
    placement = Placement(hosts, ranks_per_host, link_mbit, ranks)
    check_settings(device, backend, group_size)
    names = algorithm_names(algorithms)
    for flag, value, least in (("--iterations", iterations, 3), ("--limit-s", limit_s, 1)):
        if value < least:
            raise ConfigError(flag, value, f"must be at least {least}")
    if not 0 <= margin < 1:
        raise ConfigError("--margin", margin, "must be 0 or more and below 1", "try 0.05")
    if factor <= 1:
        raise ConfigError("--factor", factor, "must be above 1", "try 4")
    low, high = parse_bytes("--min-bytes", min_bytes), parse_bytes("--max-bytes", max_bytes)
    if low > high:
        raise ConfigError("--min-bytes", min_bytes, f"is more than --max-bytes {max_bytes}")
    launched = placement.is_launched()
    if not launched:
        check_output(output, force)
        code = run_on_ranks(placement)
        assert code is not None
        return code
    run_on_ranks(placement)

    from paceline.bench.allreduce import choose_sizes
    from paceline.bench.ranks import RankGroup
    from paceline.bench.tune import TuneJob, Tuner

    job = TuneJob(choose_sizes(low, high, factor), names, iterations, limit_s, margin)
    with RankGroup(
        backend=backend, device=device, group_size=group_size or None, share_gpus=share_gpus
    ) as joined:
        # Only rank 0 writes; its folder counts, and all learn what is wrong with it.
        main = joined.rank == 0
        joined.group.agree_on("output", lambda: check_output(output, force) if main else output)

        def tell(row: MeasuredSize) -> None:
            if main:
                sys.stdout.write(_size_line(row))
                sys.stdout.flush()

        tuner = Tuner(joined, job)
        cluster = tuner.cluster()
        if main:
            sys.stdout.write(_link_line("inside a node", cluster.intra))
            sys.stdout.write(_link_line("between nodes", cluster.inter))
            sys.stdout.write(_hidden_line(cluster))
        measured = tuner.measure(tell)
        noisy = check_noise(measured, tuner.foreign_share(), accept_noise)
        found = tuner.conclude(measured, cluster)
        if main:
            found.write(output)
            sys.stdout.write(_conclusion(found, output, len(job.sizes)))
            sys.stdout.write(f"warning: {noisy}\n" if noisy else "")
    return 0


def check_output(output: Path, force: bool) -> Path:
    if output.exists() and not force:
        raise ConfigError("--output", str(output), "is there already", "give --force, or another")
    if not output.parent.is_dir():
        raise ConfigError("--output", str(output), "its folder does not exist", "make it first")
    return output


def _link_line(where: str, link: LinkFacts | None) -> str:
    if link is None:
        return ""
    return (
        f"{where}: {1e6 * link.alpha_s:.0f} µs + {8e-6 / (link.beta_s_per_byte or 1e-15):.0f} Mbit/s, "
        f"fit off by {100 * link.residual:.0f} %; {link.contention:.1f} times as long when all send\n"
    )


def _hidden_line(cluster: ClusterShape) -> str:
    if cluster.hidden_cost is not None:
        return f"an exchange behind compute costs it {cluster.hidden_cost:.2f} of its own time\n"
    if cluster.device == "cpu" and cluster.ranks > 1:
        return "what an exchange costs the compute that hides it was not measured: too slow\n"
    return ""


def _size_line(row: MeasuredSize) -> str:
    ordered = sorted(row.medians_s.items(), key=lambda item: item[1])
    words = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in ordered)
    return f"{format_bytes(row.size_bytes):>9}: {words} ms\n"


def _conclusion(found: TuningFile, output: Path, wanted: int) -> str:
    lines = []
    for row in found.table.rows:
        limit = "larger" if row.up_to_bytes is None else f"up to {format_bytes(row.up_to_bytes)}"
        lines.append(f"{limit}: {row.algorithm}")
    if len(found.table.rows) == 1:
        lines = [f"every size: {found.table.rows[0].algorithm}"]
    if len(found.measured) < wanted:
        last = format_bytes(found.measured[-1].size_bytes)
        lines.append(f"sizes above {last} were not measured: no time left (--limit-s)")
    lines.append(f"written to {output}; use it with --set comm.algorithm=hybrid "
                 f"--set comm.sizes={output}")  # fmt: skip
    return "\n".join(lines) + "\n"
