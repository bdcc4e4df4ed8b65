"""`paceline doctor`: is this machine ready, and if not, what to do.

In: the environment. Out: a row for each thing a run needs, ok or problem with its remedy; exit code 1
where there is a problem. Nothing is changed, but that the region decoder is built as a run would do it.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.cores import available_cores
from paceline.core.errors import PacelineError
from paceline.core.topology import Topology
from paceline.core.untrusted import one_line
from paceline.version import __version__

# A ResNet-50 run with its kept checkpoints needs about this much.
_ENOUGH_DISK_BYTES = 2 * 2**30
_REACH_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One row. A problem has a remedy."""

    what: str
    found: str
    ok: bool = True
    remedy: str = ""


def doctor(
    data_dir: str = typer.Option("", help="Data to look at. Default: the embedded set."),
    output: Path = typer.Option(Path("runs"), help="Where runs shall be written."),
) -> int:
    """Check versions, devices, backends, rendezvous, data and disk."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        check_versions,
        check_devices,
        check_decoder,
        check_rendezvous,
        lambda: check_data(data_dir),
        lambda: check_disk(output),
    )
    findings = [finding for check in checks for finding in check()]
    table = Table("what", "found", "state", "remedy")
    for finding in findings:
        state = "ok" if finding.ok else "problem"
        row = (finding.what, finding.found, state, finding.remedy)
        table.add_row(*(Text(one_line(cell)) for cell in row))
    Console().print(table)
    return 0 if all(finding.ok for finding in findings) else 1


def check_versions() -> Iterator[Finding]:
    yield Finding("paceline", __version__)
    yield Finding("python", platform.python_version())
    for name in ("torch", "numpy", "pillow", "safetensors", "tomli-w", "typer", "rich"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "missing", False, f"pip install {name}")


def check_devices() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("devices", str(error), False, "install torch for this machine")
        return
    yield Finding("cpu", f"{available_cores()} cores")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            yield Finding(f"cuda:{index}", f"{properties.name}, {memory}")
        nccl = dist.is_nccl_available()
        yield Finding(
            "nccl", "there" if nccl else "missing", nccl, "" if nccl else "install torch with CUDA"
        )
    elif torch.version.cuda and shutil.which("nvidia-smi"):
        yield Finding(
            "cuda",
            "a driver, but no usable GPU",
            False,
            "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding("cuda", "none; training runs on the CPU")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        "gloo", "there" if gloo else "missing", gloo, "" if gloo else "install torch with Gloo"
    )


def check_decoder() -> Iterator[Finding]:
    """No problem where it is missing: Pillow gives the same pixels, later."""
    from paceline.data import RegionUnavailableError, region_library

    try:
        yield Finding("region decoder", f"there, {region_library().version}")
    except RegionUnavailableError as error:
        found = f"none, Pillow decodes: {error.cause}"
        yield Finding("region decoder", found, True, f"for speed: {error.remedy}")


def check_rendezvous() -> Iterator[Finding]:
    try:
        topology = Topology.from_env(os.environ)
    except PacelineError as error:
        yield Finding("rendezvous", error.cause, False, error.remedy)
        return
    where = f"{topology.master_addr}:{topology.master_port}"
    if topology.launcher == "single":
        yield Finding("rendezvous", f"{where}, not needed by one process")
        return
    yield Finding("launcher", f"{topology.launcher}, rank {topology.rank} of {topology.world_size}")
    try:
        address = socket.getaddrinfo(topology.master_addr, topology.master_port)[0][4][0]
    except OSError:
        yield Finding(
            "rendezvous", f"{where} cannot be resolved", False, "set MASTER_ADDR to rank 0's host"
        )
        return
    # torchrun's agent listens there already, and every rank but the first only connects.
    if topology.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield _port_to_host(where, str(address), topology.master_port)
    else:
        yield _port_to_reach(where, str(address), topology.master_port)


def _port_to_reach(where: str, address: str, port: int) -> Finding:
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(
            "rendezvous", f"{where}: {reason}", False, "start rank 0 first; check the firewall"
        )
    return Finding("rendezvous", f"{where} answers")


def _port_to_host(where: str, address: str, port: int) -> Finding:
    """Rank 0 must be able to listen on it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            return Finding("rendezvous", f"{where} not allowed", False, "use a port above 1024")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Finding(
                    "rendezvous", f"{where} in use", False, "set MASTER_PORT to a free port"
                )
            return Finding(
                "rendezvous",
                f"{where} is not this host's, but this is rank 0",
                False,
                "set MASTER_ADDR to this host",
            )
    return Finding("rendezvous", f"{where} free")


def check_data(data_dir: str) -> Iterator[Finding]:
    from paceline.data import DataSettings, open_source

    settings = DataSettings(dir=data_dir, source="auto" if data_dir else "embedded")
    for split in ("train", "val"):
        try:
            source = open_source(settings, split)
        except PacelineError as error:
            yield Finding(f"data {split}", error.cause, False, error.remedy)
            continue
        where = data_dir or "embedded"
        yield Finding(
            f"data {split}", f"{where}: {len(source)} images, {len(source.classes)} classes"
        )
        source.close()


def check_disk(output: Path) -> Iterator[Finding]:
    there = output
    while not there.exists():
        there = there.absolute().parent
    if not os.access(there, os.W_OK):
        yield Finding("disk", f"{there} cannot be written", False, "choose another --output")
        return
    free = shutil.disk_usage(there).free
    enough = free >= _ENOUGH_DISK_BYTES
    yield Finding(
        "disk",
        f"{free / 2**30:.1f} GiB free for {output}",
        enough,
        "" if enough else "free space, or choose another --output",
    )
