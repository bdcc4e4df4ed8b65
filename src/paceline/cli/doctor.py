"""`paceline doctor`: checks if this machine is ready for training, and names remedies.

The command reports missing packages (torch, Pillow, safetensors) instead of failing. It changes nothing,
except that it builds the region decoder if necessary, as a run does.
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
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.errors import PacelineError
from paceline.core.host import available_cores
from paceline.core.topology import Topology
from paceline.core.units import format_bytes
from paceline.core.untrusted import one_line
from paceline.version import __version__

# Checkpoints of a ResNet-50 run need about this many bytes.
_ENOUGH_DISK_BYTES = 2 * 2**30
_CONNECT_S = 5.0
# Packages that a run needs, with their import names.
_PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "pillow": "PIL",
    "safetensors": "safetensors",
    "tomli-w": "tomli_w",
    "typer": "typer",
    "rich": "rich",
}


@dataclass(frozen=True)
class Finding:
    """The result of a check, a row of the table. If `ok` is False, `remedy` says what to do."""

    what: str
    found: str
    ok: bool = True
    remedy: str = ""


def doctor(
    data_dir: str = typer.Option("", help="Data to check. Default: the embedded set."),
    output: Path = typer.Option(Path("runs"), help="Where runs are written."),
) -> int:
    """Check versions, devices, backends, rendezvous, data and disk; exit code 1 for a problem."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": check_versions,
        "devices": check_devices,
        "region decoder": check_decoder,
        "rendezvous": check_rendezvous,
        "data": lambda: check_data(data_dir),
        "disk": lambda: check_disk(output),
    }
    findings = [finding for what, check in checks.items() for finding in _run(what, check)]
    table = Table("what", "found", "state", "remedy")
    for finding in findings:
        state = "ok" if finding.ok else "problem"
        row = (finding.what, finding.found, state, finding.remedy)
        table.add_row(*(Text(one_line(cell)) for cell in row))
    Console().print(table)
    return 0 if all(finding.ok for finding in findings) else 1


def _run(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields the results of `check`, or a problem if a package that it needs cannot be imported."""
    try:
        yield from check()
    except ImportError as error:
        remedy = "install what is missing, or reinstall it for this machine"
        yield Finding(what, f"not checked: {error}", False, remedy)


def check_versions() -> Iterator[Finding]:
    yield Finding("paceline", __version__)
    yield Finding("python", platform.python_version())
    for package, module in _PACKAGES.items():
        try:
            missing = find_spec(module) is None
        except ImportError:
            missing = True
        if missing:
            yield Finding(package, "missing", False, f"pip install {package}")
            continue
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:  # installed without metadata
            yield Finding(package, "unknown version")


def check_devices() -> Iterator[Finding]:
    yield Finding("cpu", f"{available_cores()} cores")
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = format_bytes(properties.total_memory)
            yield Finding(f"cuda:{index}", f"{properties.name}, {memory}")
        yield _available("nccl", dist.is_nccl_available(), "install torch with CUDA")
    elif torch.version.cuda and shutil.which("nvidia-smi"):
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield Finding("cuda", "a driver, but no usable GPU", False, remedy)
    else:
        yield Finding("cuda", "none; training runs on the CPU")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield _available("gloo", gloo, "install torch with Gloo")


def _available(what: str, there: bool, remedy: str) -> Finding:
    return Finding(what, "available") if there else Finding(what, "missing", False, remedy)


def check_decoder() -> Iterator[Finding]:
    """Checks if the C library that decodes crops of JPEGs works.

    A missing one is no problem, because Pillow replaces it.
    """
    from paceline.data import RegionUnavailableError, region_library

    try:
        yield Finding("region decoder", f"available, {region_library().version}")
    except RegionUnavailableError as error:
        state = f"none, Pillow decodes: {error.cause}"
        yield Finding("region decoder", state, True, f"for speed: {error.remedy}")


def check_rendezvous() -> Iterator[Finding]:
    try:
        topology = Topology.from_env(os.environ)
    except PacelineError as error:
        yield Finding("rendezvous", error.cause, False, error.remedy)
        return
    place = f"{topology.master_addr}:{topology.master_port}"
    if topology.launcher == "single":
        yield Finding("rendezvous", f"{place}, not needed by one process")
        return
    yield Finding("launcher", f"{topology.launcher}, rank {topology.rank} of {topology.world_size}")
    try:
        address = socket.getaddrinfo(topology.master_addr, topology.master_port)[0][4][0]
    except OSError:
        remedy = "set MASTER_ADDR to rank 0's host"
        yield Finding("rendezvous", f"{place} cannot be resolved", False, remedy)
        return
    # torchrun's agent listens already, and every rank but the first only connects.
    listens = topology.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    check = _listening_problem if listens else _connecting_problem
    if problem := check(str(address), topology.master_port):
        yield Finding("rendezvous", f"{place}: {problem[0]}", False, problem[1])
    else:
        yield Finding("rendezvous", f"{place} {'free' if listens else 'answers'}")


def _connecting_problem(address: str, port: int) -> tuple[str, str] | None:
    """Returns the problem and its remedy if no process answers at the port, else None."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error), "start rank 0 first; check the firewall"
    return None


def _listening_problem(address: str, port: int) -> tuple[str, str] | None:
    """Returns a problem and its remedy if this process cannot listen at the port, else None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            return "not allowed", "use a port above 1024"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "in use", "set MASTER_PORT to a free port"
            return "not an address of this host, but this is rank 0", "set MASTER_ADDR to this host"
    return None


def check_data(data_dir: str) -> Iterator[Finding]:
    from paceline.data import DataSettings, open_source

    settings = DataSettings(dir=data_dir, source="auto" if data_dir else "embedded")
    for split in ("train", "val"):
        try:
            source = open_source(settings, split)
        except PacelineError as error:
            yield Finding(f"data {split}", error.cause, False, error.remedy)
            continue
        images = f"{len(source)} images, {len(source.classes)} classes"
        yield Finding(f"data {split}", f"{data_dir or 'embedded'}: {images}")
        source.close()


def check_disk(output: Path) -> Iterator[Finding]:
    existing = output
    while not existing.exists():
        existing = existing.absolute().parent
    if not os.access(existing, os.W_OK):
        yield Finding("disk", f"{existing} cannot be written", False, "choose another --output")
        return
    free = shutil.disk_usage(existing).free
    remedy = "" if free >= _ENOUGH_DISK_BYTES else "free space, or choose another --output"
    yield Finding("disk", f"{format_bytes(free)} free for {output}", not remedy, remedy)
