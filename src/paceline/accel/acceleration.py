"""`ACCELERATION`: chooses how to compute a model's forward pass, by settings, model and device.

If a setting is `on` and the model does not support the feature, an error is raised. If it is
`auto`, the feature is switched off on all ranks, and a note tells the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from paceline.accel.implementation_choice import CUDNN, Choices, is_fatal
from paceline.accel.networks import Network, network_of
from paceline.accel.settings import AccelSettings
from paceline.accel.stem import PADDED_CHANNELS, describe_stem, pads_images
from paceline.core.errors import ConfigError, PacelineError, compile_reason, is_compile_error
from paceline.core.imports import first_line
from paceline.models.acceleration import AccelerationContext, Applied, Forward, Ranks, TrialPass

_TABLE = "run.accel"


@dataclass(frozen=True)
class _Plan:
    """The faster implementations to use for one model; `notes` tell why others are switched off."""

    network: Network | None = None
    fused: bool = False
    # The value of the setting `fused_convolutions`, or `off` if the model or device lacks support.
    fused_convolutions: str = "off"
    recompute: bool = False
    compile: str = "off"
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.fused or self.recompute or self.compile != "off"


class Accel:
    """Accelerates models by fused norms and convolutions, recomputed norms and torch.compile."""

    def supports(self, model: nn.Module, context: AccelerationContext) -> str:
        plan = _plan(model, context)
        return "" if plan.changes else ", ".join(plan.notes) or "no acceleration is switched on"

    def apply(self, model: nn.Module, context: AccelerationContext) -> AppliedAccel:
        return AppliedAccel(model, _plan(model, context), _settings(context), context.device)


ACCELERATION = Accel()


def _settings(context: AccelerationContext) -> AccelSettings:
    settings = context.settings or AccelSettings()
    assert isinstance(settings, AccelSettings)
    return settings


def _plan(model: nn.Module, context: AccelerationContext) -> _Plan:
    settings = _settings(context)
    if settings.fused_convolutions != "off" and not context.calibrates:
        raise ConfigError(
            "example", None, "is needed to time the kernels of fused_convolutions", "give images"
        )
    network = network_of(model)
    notes = []
    problem = context.kernel_problem
    if network is None or not network.can_fuse():
        problem = problem or "this model has none"
    elif context.collective_norms:
        problem = problem or "norms exchange their statistics"
    elif not context.channels_last:
        problem = problem or "needs run.channels_last"
    if settings.fused_norm == "on" and problem:
        raise ConfigError(f"{_TABLE}.fused_norm", "on", problem, "use 'auto'")
    fused = not problem and settings.allows_fused_norms
    if not fused:
        notes.append(f"fused norms off ({problem})" if problem else "fused norms off")
    if settings.recompute_norms and network is None:
        raise ConfigError(
            f"{_TABLE}.recompute_norms", True,
            "this model has no norms that can be recomputed", "use false",
        )  # fmt: skip
    how = settings.compile
    if how == "auto":
        # torch.compile cannot handle fused, recomputed or synchronized norms.
        plain = not (fused or settings.recompute_norms or context.collective_norms)
        how = "model" if plain and context.device.type == "cuda" else "off"
    mode, problem = _fused_convolutions(settings, network, fused, context)
    if problem and settings.fused_convolutions != "off":
        notes.append(f"convolutions: off ({problem})")
    return _Plan(network, fused, mode, settings.recompute_norms, how, tuple(notes))


def _fused_convolutions(
    settings: AccelSettings, network: Network | None, fused: bool, context: AccelerationContext
) -> tuple[str, str]:
    """Returns how to fuse convolutions (`auto`, `on` or `cudnn`) and "", or `off` and the reason.

    Args:
        settings: Settings with `fused_convolutions`.
        network: The parts of the model, if they are known.
        fused: True if the norms are fused, which fused convolutions need.
        context: The number format, memory layout and kernel support of the run.
    """
    cudnn = settings.fused_convolutions == CUDNN
    blocks = [] if network is None else network.blocks()
    bottlenecks = [block for block in blocks if len(block.branch) == 3]
    problem = ""
    if not (blocks if cudnn else bottlenecks):
        problem = f"this model has no {'residual blocks' if cudnn else 'bottlenecks'}"
    elif context.kernel_problem:
        problem = context.kernel_problem
    elif settings.compile not in ("auto", "off"):
        problem = f"cannot be compiled by {_TABLE}.compile = {settings.compile!r}"
    elif not context.channels_last:
        problem = "needs run.channels_last"
    elif not fused:
        problem = f"needs {_TABLE}.fused_norm"
    elif context.dtype == torch.float32:
        problem = "needs half precision"
    elif not bottlenecks and context.dtype != torch.float16:
        problem = "needs fp16 for a model without bottlenecks"
    if settings.fused_convolutions == "on" and problem:
        raise ConfigError(f"{_TABLE}.fused_convolutions", "on", problem, "use 'auto'")
    return "off" if problem else settings.fused_convolutions, problem


@dataclass
class AppliedAccel(Applied):
    """An accelerated model: its forward pass, and the kernels chosen for its fused convolutions.

    See `models.acceleration.Applied` for the methods.
    """

    model: nn.Module
    plan: _Plan
    settings: AccelSettings
    device: torch.device
    choices: Choices | None = None
    forward: Forward = field(init=False)
    input_channels: int | None = None
    _failed: str = ""

    def __post_init__(self) -> None:
        self.forward = self._forward()
        first = None if self.plan.network is None else self.plan.network.first
        if self.plan.fused and first is not None and pads_images(first):
            self.input_channels = PADDED_CHANNELS

    @property
    def gradients_at_end(self) -> bool:
        return self.plan.compile == "model"

    def _forward(self) -> Forward:
        plan = self.plan
        if plan.compile == "model":
            # Compiles a separate function, because evaluation calls the plain model. Shapes are
            # static, so only full micro-batches are compiled.
            compiled: Forward = torch.compile(self.model, dynamic=False)
            return compiled
        if not plan.changes:
            return self.model
        network = plan.network
        assert network is not None
        if plan.fused:
            from paceline.accel.fused_forward import FusedForward

            return FusedForward(network, recompute=plan.recompute, choices=self.choices)
        from paceline.accel.forward import Forward as PlainForward

        return PlainForward(network, recompute=plan.recompute)

    def calibrate(self, ranks: Ranks, trial: TrialPass, *, foreign: bool) -> None:
        if self.plan.fused_convolutions != "off":
            self.choices = Choices.begin(self.plan.fused_convolutions, self.device)
            self.forward = self._forward()
            ranks.agree_on("trial of fused convolutions", lambda: trial(self.forward))
            differs = self.choices.adopt(_agreed_choices(self.choices, ranks))
            # Compile kernels that only other ranks had chosen before the first step.
            ranks.agree_on(
                "agreed fused convolutions", lambda: trial(self.forward) if differs else None
            )
        if self.plan.compile == "model" and self.settings.compile == "auto":
            attempt = partial(_compile_problem, trial, self.forward, foreign)
            own = ranks.agree_on("trial of compile", attempt)
            if any(ranks.all_gather(own)):
                self._failed = own or "on another rank"
                self.plan = replace(self.plan, compile="off")
                self.forward = self._forward()

    def describe(self) -> str:
        plan = self.plan
        notes = ["fused norms on" if plan.fused else "", *plan.notes, f"compile {plan.compile}"]
        if self._failed:
            notes[-1] += f" (torch.compile failed: {self._failed})"
        if plan.fused and plan.network is not None and plan.network.first is not None:
            notes.append(describe_stem(plan.network.first))
        if plan.recompute:
            notes.append("norms recomputed")
        if self.choices is not None:
            notes.append(f"convolutions: {self.choices.describe()}")
        return ", ".join(filter(None, notes))

    def advise(self, error: Exception) -> Sequence[str]:
        plan, use = self.plan, f"use --set {_TABLE}"
        if is_fatal(error):
            short = plan.network is not None and plan.compile == "off" and not plan.recompute
            return [f"--set {_TABLE}.recompute_norms=true also needs less memory"] if short else []
        remedies = [f"{use}.fused_convolutions=off"] if self.choices is not None else []
        if is_compile_error(error):
            triton = type(error).__module__.startswith("triton")
            remedies.append(f"{use}.fused_norm=off" if triton else "use --compile off")
        return remedies

    def undo(self) -> None:
        self.forward, self.choices = self.model, None


def _agreed_choices(choices: Choices, ranks: Ranks) -> dict[str, str]:
    """Agrees with the other ranks on one kernel for each fused convolution, per kind of GPU.

    The lowest rank with the same kind of GPU that has timed a convolution decides. The kernels
    affect rounding, and all ranks and resumed runs must round equally.
    """
    agreed: dict[str, str] = {}
    for kind, chosen in reversed(ranks.all_gather([choices.kind(), choices.own()])):
        if kind == choices.kind():
            agreed.update(chosen)
    return agreed


def _compile_problem(trial: TrialPass, forward: Forward, foreign: bool) -> str:
    """Runs a compiled model once and returns the reason if that fails, else "".

    For a user's model (`foreign`), this includes errors that torch.compile does not cause. If the
    model itself raises them, the next pass without the compiler reports them.
    """
    try:
        trial(forward)
    except PacelineError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        compiler = is_compile_error(cause)
        if is_fatal(cause) or not (foreign or compiler):
            raise
        torch._dynamo.reset()
        return compile_reason(cause) if compiler else first_line(cause)
    return ""
