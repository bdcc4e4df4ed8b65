"""`FastPath`: an acceleration of the forward pass, memory format and CUDA graphs, each if it helps.

`choose_fast_path` asks the accelerations (`models.acceleration`) for a faster forward pass and decides
about CUDA graphs. A switch that cannot be obeyed is refused. `try_fast_path` runs it once: what was
chosen automatically and does not work with this model is left out on all ranks, and said. `share_norms`
makes batch norms that compute over several ranks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.config import RunConfig, RunSettings
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.extensions import provided
from paceline.models.acceleration import (
    AccelerationContext,
    Applied,
    Forward,
    Result,
    TrialPass,
    accelerations,
)
from paceline.models.synced_norm import (
    find_norms,
    use_torch_norms,
)
from paceline.train.model_checks import VARIES


@dataclass(frozen=True)
class ModelLimits:
    """Fast forms that the built model cannot use on any rank, whatever the settings allow.

    Attributes:
        eager: A pass has collectives inside, which no fast form can hold.
        varies: The model keeps state or draws numbers in Python, which a CUDA graph would repeat.
    """

    eager: bool = False
    varies: bool = False

    @classmethod
    def of(cls, settings: RunSettings, group: Group, eager: bool, varies: bool) -> ModelLimits:
        """The limits of all ranks. `varies` is what this rank has found. A collective on GPUs."""
        if eager:
            return cls(eager=True)
        if group.device.type != "cuda" or settings.cuda_graphs == "off":
            return cls()
        found = torch.tensor(float(varies), device=group.device)
        group.all_reduce_sum(found)
        if found and settings.cuda_graphs == "on":
            raise ConfigError(
                "run.cuda_graphs", "on", f"the model {VARIES}, which a CUDA graph would freeze",
                "use 'auto', or draw with torch's generators",
            )  # fmt: skip
        return cls(varies=bool(found))


@dataclass(frozen=True)
class FastPath:
    """What was chosen for one run. It is recorded, and not written back into the settings.

    Attributes:
        forward: The pass in training.
        applied: The acceleration that has made it, None for the plain model.
    """

    forward: Forward
    channels_last: bool
    graphs: bool
    applied: Applied | None = None
    remark: str = ""

    @property
    def image_channels(self) -> int | None:
        return None if self.applied is None else self.applied.input_channels

    @property
    def gradients_at_end(self) -> bool:
        return self.applied is not None and self.applied.gradients_at_end

    def advise(self, error: Exception) -> Sequence[str]:
        return () if self.applied is None else self.applied.advise(error)

    def describe(self) -> str:
        pass_ = "plain model" if self.applied is None else self.applied.describe()
        return (
            f"{'NHWC' if self.channels_last else 'NCHW'}, {pass_}, "
            f"CUDA graphs {'on' if self.graphs else 'off'}{self.remark}"
        )


def choose_fast_path(
    settings: RunSettings,
    model: nn.Module,
    device: torch.device,
    triton_problem: str,
    *,
    shared_gpu: bool = False,
    dtype: torch.dtype = torch.float16,
    limits: ModelLimits = ModelLimits(),
) -> FastPath:
    """Decides the switches and prepares `model` for them. `triton_problem`: why kernels cannot run.
    `dtype`: that of the model's maps and convolutions.
    `shared_gpu`: other ranks use the same GPU; cuDNN's batch norm hangs beside their collectives."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        # Shapes hardly ever change in training: the search for the fastest algorithm pays at once.
        torch.backends.cudnn.benchmark = True
    # The exchange is between the graphs, so they work with any number of ranks and any backend.
    graphs = settings.cuda_graphs == "on" or (settings.cuda_graphs == "auto" and on_gpu)
    if graphs and not on_gpu:
        raise ConfigError("run.cuda_graphs", "on", f"needs a GPU, not {device}", "use 'auto'")
    remark = f" (Triton: {triton_problem})" if on_gpu and triton_problem else ""
    if on_gpu and shared_gpu and use_torch_norms(model):
        remark += ", no batch norm by cuDNN (shared GPU)"
    context = AccelerationContext(
        device=device, dtype=dtype, channels_last=settings.channels_last,
        kernel_problem=triton_problem, collective_norms=limits.eager,
    )  # fmt: skip
    applied, reason = accelerate(settings, model, context)
    if reason:
        remark += f"; {reason}"
    return FastPath(
        model if applied is None else applied.forward, settings.channels_last,
        graphs and not limits.eager and not limits.varies, applied, remark,
    )  # fmt: skip


def accelerate(
    settings: RunSettings, model: nn.Module, context: AccelerationContext
) -> tuple[Applied | None, str]:
    """Returns the first acceleration that supports the model, applied to it, and which tables of others
    have no effect; or None and the reasons.

    On a CPU, one of this installation is asked only if its table is in the settings.
    """
    on_gpu, reasons = context.device.type == "cuda", []
    for name, found in accelerations(lambda name: on_gpu or name in settings.owned):
        own = replace(context, settings=settings.owned.get(name))
        reason: object = found.supports(model, own)
        if not isinstance(reason, str):
            raise _error(name, f"its supports returned {reason!r}", "return '' or the reason")
        if not reason:
            applied: object = found.apply(model, own)
            if not isinstance(applied, Applied):
                problem = f"its apply returned {type(applied).__name__}"
                raise _error(name, problem, "return an object of a subclass of Applied")
            idle = [f"run.{o}" for o in provided("accelerations") if o in settings.owned]
            given = name not in settings.owned and idle
            return applied, f"{', '.join(idle)} without effect with {name}" if given else ""
        reasons.append(f"{name}: {reason}")
    if on_gpu and not reasons:
        reasons = ["no acceleration is installed"]
    return None, "; ".join(reasons)


def _error(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("acceleration", name, problem, remedy)


@dataclass(frozen=True)
class AllRanks:
    """The ranks of a group, for `Applied.calibrate`."""

    group: Group

    def agree_on(self, phase: str, make: Callable[[], Result]) -> Result:
        return self.group.agree_on(phase, make)

    def all_gather(self, value: Any) -> list[Any]:
        gathered = self.group.gather_bytes(json.dumps(value).encode())
        rows = None if gathered is None else [json.loads(row) for row in gathered]
        sent = self.group.broadcast_bytes(None if rows is None else json.dumps(rows).encode())
        found: list[Any] = json.loads(sent)
        return found


def try_fast_path(
    settings: RunSettings, fast: FastPath, group: Group, trial: TrialPass, *, foreign: bool
) -> FastPath:
    """`fast` after the trials of the acceleration, and without CUDA graphs if a `foreign` model waits for
    the device, which a graph cannot repeat, and `run.cuda_graphs` is `auto`. All ranks decide alike."""
    ranks = AllRanks(group)
    if fast.applied is not None:
        fast.applied.calibrate(ranks, trial, foreign=foreign)
        fast = replace(fast, forward=fast.applied.forward)
    if fast.graphs and foreign:
        must = settings.cuda_graphs == "on"
        probe = functools.partial(_graph_problem, trial, fast.forward, must)
        own = group.agree_on("trial of CUDA graphs", probe)
        if any(ranks.all_gather(own)):
            reason = own or "on another rank"
            fast = replace(
                fast, graphs=False,
                remark=f"{fast.remark}; this model cannot be captured ({reason})",
            )  # fmt: skip
    return fast


def _graph_problem(trial: TrialPass, forward: Forward, must: bool) -> str:
    """Where a pass waits for the device."""
    trial(forward)  # compiles and chooses algorithms, which may wait once
    try:
        trial(forward, _refused_waits())
    except PacelineError as error:
        cause = error.__cause__
        if cause is None or "synchroniz" not in str(cause):
            raise
        problem = f"it waits for the device{_place(cause)}"
    else:
        return ""
    if must:
        raise ConfigError("run.cuda_graphs", "on", problem, "use 'auto' or 'off'")
    return problem


@contextmanager
def _refused_waits() -> Iterator[None]:
    """Inside, an operation that waits for the GPU raises RuntimeError, as far as torch knows it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is called a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _place(error: BaseException) -> str:
    """The last line of code outside of torch and Paceline, as ` (my_net.py:12)`."""
    own = str(Path(__file__).parents[1])
    torch_folder = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith((own, torch_folder, "<"))]
    return f", {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


# Whether Triton's kernels can run here.
#
# In: a device. Out: nothing, or why not: no package, no C compiler in a slim container, a GPU too
# old. One small kernel is built and launched: versions and capabilities listed in code would grow
# old.


@functools.cache
def triton_problem(device: torch.device) -> str:
    """Empty where kernels run. A CPU has no use for them and is asked nothing."""
    if device.type != "cuda":
        return "needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from paceline.data.device.kernels import normalized

        pixel = torch.ones((1, 1, 1, 1), dtype=torch.uint8, device=device)
        one = torch.ones((1, 1, 1, 1), device=device)
        value = normalized(pixel, one, one, torch.float32, 0)
        return "" if float(value) == 2.0 else "a kernel gave a wrong result"
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"


def check_model_norms(config: RunConfig, model: nn.Module) -> None:
    """Raises ConfigError for settings of batch norm that this model's layers cannot follow."""
    if config.model.norm_statistics == "last" and not find_norms(model):
        raise ConfigError(
            "model.norm_statistics", "last", "this model has no batch norm", "leave it out"
        )
