"""`FastPath`: fused kernels, torch.compile and CUDA graphs, each where it helps.

`choose_fast_path` returns the function that computes a forward pass, whether micro-steps are captured
in CUDA graphs, and a description of what was chosen. A switch that cannot be obeyed is refused.
`try_fast_path` runs it once: what was chosen automatically and does not work with this model is left out
on all ranks, and said. `share_norms` makes batch norms that compute over several ranks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.config import RunConfig, RunSettings
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.imports import first_line
from paceline.models import product_choice
from paceline.models.recompute import recompute_norms
from paceline.models.resnet import (
    ResidualBlock,
    fuse_norms,
    fuse_products,
)
from paceline.models.stem import PADDED_CHANNELS, describe_stem
from paceline.models.synced_norm import (
    find_norms,
    use_torch_norms,
)
from paceline.train.machine import out_of_memory
from paceline.train.micro_step import compile_reason, is_compile_error
from paceline.train.model_checks import VARIES

Forward = Callable[[Tensor], Tensor]


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

    def within(self, settings: RunSettings) -> RunSettings:
        """The settings of the fast path that are left."""
        if self.eager:
            return replace(
                settings,
                fused_norm="off",
                fused_convolutions="off",
                compile="off",
                cuda_graphs="off",
            )
        return replace(settings, cuda_graphs="off") if self.varies else settings


@dataclass(frozen=True)
class FastPath:
    """What was chosen for one run. It is recorded, and not written back into the settings."""

    forward: Forward
    channels_last: bool
    fused_norm: bool
    compile: str
    graphs: bool
    remark: str = ""
    image_channels: int | None = None
    # Whether the model has kernels that fuse its norms.
    can_fuse: bool = True
    # `run.fused_convolutions` as it applies to this model.
    products: str = "off"

    def describe(self) -> str:
        def switch(on: bool) -> str:
            return "on" if on else "off"

        norms = switch(self.fused_norm) if self.can_fuse else "off (this model has none)"
        return (
            f"{'NHWC' if self.channels_last else 'NCHW'}, fused norms {norms}, "
            f"compile {self.compile}, CUDA graphs {switch(self.graphs)}{self.remark}"
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
    settings = limits.within(settings)
    on_gpu = device.type == "cuda"
    if on_gpu:
        # Shapes hardly ever change in training: the search for the fastest algorithm pays at once.
        torch.backends.cudnn.benchmark = True
    fused = _choose_fused(settings, model, triton_problem)
    how = settings.compile
    if how == "auto":
        # The compiler would not take part in what is computed again.
        how = "model" if on_gpu and not fused and not settings.recompute_norms else "off"
    # The exchange is between the graphs, so they work with any number of ranks and any backend.
    graphs = settings.cuda_graphs == "on" or (settings.cuda_graphs == "auto" and on_gpu)
    if graphs and not on_gpu:
        raise ConfigError("run.cuda_graphs", "on", f"needs a GPU, not {device}", "use 'auto'")
    # The fused stem takes images with a fourth channel of zeros (see `convolve_images`).
    channels = PADDED_CHANNELS if fused and getattr(model, "pads_images", False) else None
    remark = f" (Triton: {triton_problem})" if on_gpu and triton_problem else ""
    if fused and describe_stem(model):
        remark += f", {describe_stem(model)}"
    if on_gpu and shared_gpu and use_torch_norms(model):
        remark += ", no batch norm by cuDNN (shared GPU)"
    if recompute_norms(model, settings.recompute_norms) and settings.recompute_norms:
        remark += ", norms recomputed"
    elif settings.recompute_norms:
        raise ConfigError(
            "run.recompute_norms", True, "this model has no norms that backward can compute again",
            "use false",
        )  # fmt: skip
    forward = compiled(model, how)
    can_fuse = fused or fuse_norms(model, False) > 0
    products, problem = _choose_products(settings, model, fused, dtype, triton_problem)
    if problem and settings.fused_convolutions != "off":
        remark += f", convolutions: off ({problem})"
    return FastPath(
        forward, settings.channels_last, fused, how, graphs, remark, channels, can_fuse, products,
    )  # fmt: skip


def _choose_fused(settings: RunSettings, model: nn.Module, problem: str) -> bool:
    if not fuse_norms(model, False):
        problem = problem or "this model has no fused form"
    elif not settings.channels_last:
        problem = problem or "needs run.channels_last"
    if settings.fused_norm == "on" and problem:
        raise ConfigError("run.fused_norm", "on", problem, "use 'auto'")
    if problem or not settings.allows_fused_norms:
        return False
    return fuse_norms(model, True) > 0


def _choose_products(
    settings: RunSettings, model: nn.Module, fused: bool, dtype: torch.dtype, triton_problem: str
) -> tuple[str, str]:
    """`run.fused_convolutions` as it applies, and why it does not: the model comes first, then what the
    fused norms lack, which they need."""
    cudnn = settings.fused_convolutions == product_choice.CUDNN
    bottlenecks = fuse_products(model, False)
    problem = ""
    if not fuse_products(model, False, cudnn=cudnn):
        problem = f"this model has no {'residual blocks' if cudnn else 'bottlenecks'}"
    elif triton_problem:
        problem = triton_problem
    elif settings.compile not in ("auto", "off"):
        problem = f"cannot be compiled by run.compile = {settings.compile!r}"
    elif not settings.channels_last:
        problem = "needs run.channels_last"
    elif not fused:
        problem = "needs run.fused_norm"
    elif dtype == torch.float32:
        problem = "needs half precision"
    elif not bottlenecks and dtype != torch.float16:
        problem = "needs fp16 for a model without bottlenecks"
    if settings.fused_convolutions == "on" and problem:
        raise ConfigError("run.fused_convolutions", "on", problem, "use 'auto'")
    if settings.fused_convolutions == "off" or problem:
        return "off", problem
    fuse_products(model, True, cudnn=cudnn)
    return settings.fused_convolutions, ""


def compiled(model: nn.Module, how: str) -> Forward:
    """The forward pass under torch.compile: not at all, block by block, or as a whole.

    Static shapes: `MicroStep` calls it with the usual micro-batch only.
    """
    if how == "model":
        # A model of its own name in the compiler's eyes: evaluation calls the plain one.
        forward: Forward = torch.compile(model, dynamic=False)
        return forward
    if how == "blocks":
        blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
        if not blocks:
            raise ConfigError(
                "run.compile", how, "this model has no residual blocks", "use 'model' or 'off'"
            )
        # One code object serves blocks of many shapes; each gets a version of its own.
        torch._dynamo.config.recompile_limit = max(64, 4 * len(blocks))
        for block in blocks:
            block.compile(dynamic=False)
    return model


class TrialPass(Protocol):
    """A forward and backward pass with `forward`, inside `guard`, that leaves no trace. Raises the
    errors of a first step."""

    def __call__(
        self, forward: Forward, guard: AbstractContextManager[None] | None = None
    ) -> object: ...


def try_fast_path(
    settings: RunSettings, fast: FastPath, model: nn.Module, group: Group, trial: TrialPass, *,
    foreign: bool,
) -> FastPath:  # fmt: skip
    """`fast` without torch.compile where the compiler fails and `run.compile` is `auto`, and without
    CUDA graphs where a `foreign` model waits for the device, which a graph cannot repeat, and
    `run.cuda_graphs` is `auto`. All ranks decide alike."""
    product_choice.begin(fast.products, group.device)
    if fast.products != "off":
        group.agree_on("trial of fused convolutions", lambda: trial(fast.forward))
        differs = product_choice.settle(_agreed_products(group))
        # What another rank has chosen is built here before the first step.
        group.agree_on(
            "agreed fused convolutions", lambda: trial(fast.forward) if differs else None
        )
        fast = replace(
            fast, remark=f"{fast.remark}, convolutions: {product_choice.choices.describe()}"
        )
    if fast.compile == "model" and settings.compile == "auto":
        attempt = functools.partial(_compile_problem, trial, fast.forward, foreign)
        if reason := _on_any_rank(group, "compile", attempt):
            fast = replace(
                fast, forward=model, compile="off",
                remark=f"{fast.remark}; torch.compile failed ({reason})",
            )  # fmt: skip
    if fast.graphs and foreign:
        must = settings.cuda_graphs == "on"
        probe = functools.partial(_graph_problem, trial, fast.forward, must)
        if reason := _on_any_rank(group, "CUDA graphs", probe):
            fast = replace(
                fast, graphs=False,
                remark=f"{fast.remark}; this model cannot be captured ({reason})",
            )  # fmt: skip
    return fast


def _agreed_products(group: Group) -> dict[str, str]:
    """The choices of the first rank with this kind of GPU; for shapes that only other ranks have, of
    the first of those. They affect rounding, and ranks and resumed runs are to round alike."""
    own = [product_choice.kind(), product_choice.choices.own()]
    gathered = group.gather_bytes(json.dumps(own).encode())
    agreed: dict[str, dict[str, str]] = {}
    for kind, chosen in reversed([json.loads(given) for given in gathered or ()]):
        agreed.setdefault(kind, {}).update(chosen)
    sent = group.broadcast_bytes(None if gathered is None else json.dumps(agreed).encode())
    found: dict[str, str] = json.loads(sent)[own[0]]
    return found


def _on_any_rank(group: Group, phase: str, attempt: Callable[[], str]) -> str:
    """The problem of this rank, or that another rank has one; empty where none has."""
    problem = group.agree_on(f"trial of {phase}", attempt)
    found = torch.tensor(float(bool(problem)), device=group.device)
    group.all_reduce_sum(found)
    return problem or ("on another rank" if found > 0 else "")


def _compile_problem(trial: TrialPass, forward: Forward, foreign: bool) -> str:
    """Why a compiled pass fails. Any error of a user's model counts: the pass without the compiler,
    which follows, raises the model's own."""
    try:
        trial(forward)
    except PacelineError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        compiler = is_compile_error(cause)
        if out_of_memory(cause, "", "") is not None or not (foreign or compiler):
            raise
        torch._dynamo.reset()
        return compile_reason(cause) if compiler else first_line(cause)
    return ""


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
