"""Device time of one update, ours and common alternatives.

    python -m benchmarks.optimizer --device cpu --model resnet_tiny --repeats 5

Ours include everything of a mixed-precision update: unscaling, finite check, fp32 masters, writing
back half weights. torch's fused SGD does less (fp32 weights, no norms) and is the cheapest update
available.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.program import run
from paceline.cli import options
from paceline.cli.measure import chosen_device, environment, print_json
from paceline.cli.options import check_at_least
from paceline.models.registry import create_model, parameter_groups
from paceline.models.settings import ModelSettings, check_model_name
from paceline.optim.adam import LAMB, AdamW
from paceline.optim.base import MasterOptimizer
from paceline.optim.build import create_optimizer
from paceline.optim.lars import LARS, SGD
from paceline.optim.settings import OptimSettings
from paceline.precision.policy import Policy, choose_policy
from paceline.precision.settings import PrecisionSettings
from paceline.tune.timing import Times

# Long enough for the host to queue a whole optimizer step before the GPU starts it.
_HEAD_START_CYCLES = 20_000_000


def device_times(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int
) -> Times:
    """Time on the device alone: the host gets a head start, so that launch overhead does not count."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return _host_times(work, repeats)
    pairs = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize(device)
    return Times(tuple(start.elapsed_time(stop) / 1e3 for start, stop in pairs))


def _host_times(work: Callable[[], object], repeats: int) -> Times:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Times(tuple(seconds))


def measure_all(
    model_name: str, device: torch.device, *, amp_dtype: str, repeats: int, warm_up: int
) -> dict[str, Any]:
    """All rows, with the bytes that an update must move and the time of a copy of as many bytes."""
    policy = choose_policy(PrecisionSettings(amp_dtype=amp_dtype), device)
    rows, elements = [], 0
    for name, make in _ways(device).items():
        model, groups = _model(model_name, policy)
        elements = sum(p.numel() for p in model.parameters())
        work, note = make(model, groups, policy)
        times = device_times(work, device, repeats=repeats, warm_up=warm_up)
        rows.append({"name": name, **times.to_row("ms", 1e3), "note": note})
    half = 2 if policy.is_half else 4
    # Norms read gradient and master; the update reads both and the momentum and writes all but the
    # gradient, and the half weight.
    moved = elements * (half + 4) + elements * (half + 4 + 4 + 4 + 4 + (2 if policy.is_half else 0))
    floor = copy_seconds(moved, device, repeats)
    return {
        "model": model_name, "device": str(device), "elements": elements, "dtype": policy.name,
        "bytes": moved, "floor_ms": 1e3 * floor, "rows": rows,
    }  # fmt: skip


Groups = list[dict[str, Any]]
# Makes the function that updates once, and a note, for a model and its parameter groups.
Way = Callable[[nn.Module, Groups, Policy], tuple[Callable[[], object], str]]


def _ways(device: torch.device) -> dict[str, Way]:
    ways: dict[str, Way] = {
        "ours lars": _ours("LARS", lambda groups: _lars(groups, None)),
        "ours sgd": _ours("momentum SGD", lambda groups: SGD(groups, 0.1)),
        "ours muon": _ours("Muon on filters", _muon),
        "ours adamw": _ours("AdamW", lambda groups: AdamW(groups, 1e-3)),
        "ours lamb": _ours("LAMB", lambda groups: LAMB(groups, 1e-3)),
    }
    if device.type == "cuda":
        ways["ours lars, foreach"] = _ours("LARS", lambda groups: _lars(groups, False))
    ways["torch fused sgd"] = _torch_sgd
    ways["torch fused adamw"] = _torch_adamw
    ways["lars, a loop over tensors"] = _loop
    return ways


def _ours(name: str, create: Callable[[Groups], MasterOptimizer]) -> Way:
    def make(model: nn.Module, groups: Groups, policy: Policy) -> tuple[Callable[[], object], str]:
        optimizer = create(groups)
        optimizer.grad_scale = torch.tensor(1024.0, device=policy.device)
        return optimizer.step, f"{name}, {optimizer.path}, masters, finite check"

    return make


def _lars(groups: Groups, fused: bool | None) -> LARS:
    return LARS(groups, 0.1, fused=fused)


def _muon(groups: Groups) -> MasterOptimizer:
    return create_optimizer(OptimSettings(name="muon", nesterov=True), groups, 0.1)


def _torch_sgd(
    model: nn.Module, groups: Groups, policy: Policy
) -> tuple[Callable[[], object], str]:
    fused = True if policy.device.type == "cuda" else None
    optimizer = torch.optim.SGD(_wide(model), 0.1, momentum=0.9, weight_decay=5e-5, fused=fused)
    return optimizer.step, "fp32 weights and gradients, no LARS, no finite check"


def _torch_adamw(
    model: nn.Module, groups: Groups, policy: Policy
) -> tuple[Callable[[], object], str]:
    fused = True if policy.device.type == "cuda" else None
    optimizer = torch.optim.AdamW(_wide(model), 1e-3, fused=fused)
    return optimizer.step, "fp32 weights and gradients, no finite check"


def _wide(model: nn.Module) -> list[nn.Parameter]:
    """fp32 copies of the parameters, with gradients."""
    parameters = []
    for parameter in model.parameters():
        wide = nn.Parameter(parameter.detach().float())
        wide.grad = torch.randn_like(wide) * 1e-3
        parameters.append(wide)
    return parameters


def _loop(model: nn.Module, groups: Groups, policy: Policy) -> tuple[Callable[[], object], str]:
    """LARS as in most libraries: tensor by tensor, with norms and where() for each."""
    parameters = [parameter.requires_grad_(False) for parameter in _wide(model)]
    momenta = [torch.zeros_like(p) for p in parameters]

    def step() -> None:
        for parameter, momentum in zip(parameters, momenta, strict=True):
            assert parameter.grad is not None
            weight, gradient = parameter.norm(), parameter.grad.norm()
            ratio = 0.001 * weight / (gradient + 5e-5 * weight)
            ratio = torch.where((weight > 0) & (gradient > 0), ratio, torch.ones_like(ratio))
            update = parameter.grad.add(parameter, alpha=5e-5).mul_(ratio)
            momentum.mul_(0.9).add_(update)
            parameter.add_(momentum, alpha=-0.1)

    return step, "fp32 weights and gradients, no finite check; bound by kernel launches"


def _model(name: str, policy: Policy) -> tuple[nn.Module, Groups]:
    torch.manual_seed(0)
    model = create_model(ModelSettings(name=name), num_classes=1000)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = policy.convert(model.to(policy.device))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, parameter_groups(model, 5e-5)


def copy_seconds(moved: int, device: torch.device, repeats: int) -> float:
    """Time of a copy that reads and writes `moved` bytes in total."""
    source = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return device_times(lambda: target.copy_(source), device, repeats=repeats, warm_up=2).median


def main(
    model: str = typer.Option("resnet50", help="Whose parameters."),
    amp_dtype: options.AmpDtype = "auto",
    repeats: int = typer.Option(50, help="Updates to time; the median counts."),
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """One update of all weights: ours against PyTorch's optimizers."""
    check_model_name(model)
    check_at_least(1, {"--repeats": repeats})
    chosen = torch.device(chosen_device(device))
    found = measure_all(model, chosen, amp_dtype=amp_dtype, repeats=repeats, warm_up=5)
    if as_json:
        print_json({**found, **environment(chosen)})
        return
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


if __name__ == "__main__":
    run(main)
