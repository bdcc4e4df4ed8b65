"""What a device gets: fused kernels, torch.compile, CUDA graphs; and whether Triton's kernels run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from comm.exchanges import joined
from paceline.comm import CommSettings, Group
from paceline.config import RunConfig, RunSettings
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.topology import Topology
from paceline.accel import product_choice
from paceline.accel.product_choice import begin, choices
from paceline.models.resnet import RESNET_LAYOUTS, FastResNet, ResidualBlock, ResNet, SmallResNet
from paceline.models.synced_norm import NormGroup, TorchNorm, use_torch_norms
from paceline.train import fast_path
from paceline.train.fast_path import (
    FastPath,
    ModelLimits,
    choose_fast_path,
    triton_problem,
    try_fast_path,
)
from ranks import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda")


Compiled = list[tuple[nn.Module, bool]]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """What was handed to the compiler, which is not called: `test_compile.py` does that."""
    seen: Compiled = []

    def note(model: nn.Module, *, dynamic: bool) -> nn.Module:
        seen.append((model, dynamic))
        return model

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(nn.Module, "compile", note)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    return seen


def choose(
    device: torch.device, model: nn.Module | None = None, problem: str = "", **settings: object
) -> FastPath:
    """As where kernels run on GPUs, unless there is a `problem`; choosing runs none."""
    chosen = RunSettings(**settings)  # type: ignore[arg-type]
    problem = problem or ("" if device == GPU else "needs a GPU")
    return choose_fast_path(chosen, model or SmallResNet(), device, problem)


def plain() -> nn.Module:
    """Without residual blocks."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def parts(model: nn.Module) -> set[bool]:
    return {part.fused for part in model.modules() if hasattr(part, "fused")}


def test_no_batch_norm_by_cudnn_where_ranks_share_a_gpu() -> None:
    for device, shared, expected in ((GPU, True, True), (GPU, False, False), (CPU, True, False)):
        model = SmallResNet()
        keys = list(model.state_dict())
        path = choose_fast_path(RunSettings(), model, device, "", shared_gpu=shared)
        norms = {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
        assert norms == {TorchNorm if expected else nn.BatchNorm2d}
        assert ("shared GPU" in path.describe()) == expected
        assert list(model.state_dict()) == keys


def test_a_norm_without_cudnn_computes_the_same_and_leaves_the_switch_as_it_was() -> None:
    plain_norm, norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    assert use_torch_norms(norm) == 1
    x = torch.randn(3, 4, 5, 5)
    assert norm(x).equal(plain_norm(x))
    assert norm.running_var.equal(plain_norm.running_var)
    assert torch.backends.cudnn.enabled


def test_a_cpu_gets_none_of_it() -> None:
    model = SmallResNet()
    path = choose(CPU, model)
    assert (path.fused_norm, path.compile, path.graphs) == (False, "off", False)
    assert path.forward is model


def test_a_gpu_gets_fused_norms_and_graphs() -> None:
    model = SmallResNet()
    path = choose(GPU, model)
    assert (path.fused_norm, path.compile, path.graphs) == (True, "off", True)
    assert parts(model) == {True}
    assert choose(GPU, FastResNet()).image_channels == 4
    assert torch.backends.cudnn.benchmark
    assert not choose(GPU, cuda_graphs="off").graphs


def test_a_gpu_compiles_what_has_no_fused_form() -> None:
    path = choose(GPU, plain())
    assert (path.compile, path.fused_norm) == ("model", False)
    model = SmallResNet()
    path = choose(GPU, model, fused_norm="off")
    assert (path.compile, path.fused_norm) == ("model", False)
    assert parts(model) == {False}
    assert choose(GPU, compile="off", fused_norm="off").compile == "off"
    path = choose(GPU, model, compile="blocks")
    assert (path.compile, path.fused_norm) == ("blocks", False), "what is compiled is not fused"


def test_switches_that_cannot_be_obeyed_are_refused() -> None:
    broken = "no kernel can be built: no C compiler"
    for given, settings in (
        ((CPU,), {"fused_norm": "on"}),
        ((GPU, plain()), {"fused_norm": "on"}),
        ((GPU,), {"fused_norm": "on", "channels_last": False}),
        ((GPU, None, broken), {"fused_norm": "on"}),
        ((CPU,), {"cuda_graphs": "on"}),
        ((CPU, plain()), {"compile": "blocks"}),
        ((GPU, plain()), {"recompute_norms": True}),
    ):
        with pytest.raises(ConfigError) as caught:
            choose(*given, **settings)  # type: ignore[arg-type]
        assert caught.value.field == f"run.{next(iter(settings))}"
    without = choose(GPU, None, broken)  # auto goes on without, and says so
    assert (without.fused_norm, without.compile) == (False, "model")
    assert broken in without.describe()


def bottlenecks() -> nn.Module:
    with torch.device("meta"):
        return ResNet(*RESNET_LAYOUTS["resnet50"], num_classes=3)


def test_fused_convolutions_are_asked_for_and_need_bottlenecks_in_half_precision() -> None:
    def switched(model: nn.Module) -> set[bool]:
        return {m.fused_products for m in model.modules() if isinstance(m, ResidualBlock)}

    model = bottlenecks()
    assert (choose(GPU, model).products, switched(model)) == ("off", {False})
    for value in ("auto", "on", "cudnn"):
        path = choose(GPU, model, fused_convolutions=value)
        assert (path.products, switched(model)) == (value, {True})
    settings = RunSettings(fused_convolutions="auto")
    assert choose_fast_path(settings, model, GPU, "", dtype=torch.float32).products == "off"
    assert switched(model) == {False}
    for path in (
        choose(GPU, SmallResNet(), fused_convolutions="auto"),
        choose(CPU, bottlenecks(), "needs a GPU", fused_convolutions="auto"),
        choose(GPU, bottlenecks(), fused_convolutions="auto", fused_norm="off"),
    ):
        assert path.products == "off"
    # Blocks of 3 × 3 convolutions have kernels of cuDNN, in fp16, and no others.
    basic = SmallResNet()
    assert choose(GPU, basic, fused_convolutions="cudnn").products == "cudnn"
    assert switched(basic) == {True}
    assert choose(GPU, basic, fused_convolutions="auto").products == "off"
    assert switched(basic) == {False}
    by_cudnn = RunSettings(fused_convolutions="cudnn")
    for given, kind in (
        (basic, torch.bfloat16), (basic, torch.float32), (plain(), torch.float16)
    ):  # fmt: skip
        assert choose_fast_path(by_cudnn, given, GPU, "", dtype=kind).products == "off"
        assert switched(given) <= {False}
    assert (
        choose_fast_path(by_cudnn, bottlenecks(), GPU, "", dtype=torch.bfloat16).products != "off"
    )
    settings = RunSettings(fused_convolutions="on")
    for given, other in (
        ((SmallResNet(), GPU, ""), {}),
        ((bottlenecks(), CPU, "needs a GPU"), {}),
        ((bottlenecks(), GPU, ""), {"channels_last": False}),
        ((bottlenecks(), GPU, ""), {"compile": "model"}),
    ):
        with pytest.raises(ConfigError) as caught:
            choose_fast_path(replace(settings, **other), *given)
        assert caught.value.field == "run.fused_convolutions"
    with pytest.raises(ConfigError):
        choose_fast_path(settings, model, GPU, "", dtype=torch.float32)


def test_norms_are_recomputed_where_asked_for_and_not_compiled() -> None:
    def switched(model: nn.Module) -> set[bool]:
        return {m.recompute for m in model.modules() if hasattr(m, "recompute")}

    for device, problem, settings in (
        (CPU, "", {}),
        (GPU, "", {}),
        (GPU, "", {"fused_convolutions": "auto"}),
        (GPU, "no C compiler", {}),
        (GPU, "", {"fused_norm": "off"}),
    ):
        model = bottlenecks()
        path = choose(device, model, problem, recompute_norms=True, **settings)
        assert switched(model) == {True}
        assert (path.compile, "norms recomputed" in path.describe()) == ("off", True)
        path = choose(device, model, problem, **settings)
        assert switched(model) == {False}
        assert "recomputed" not in path.describe()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("fused_convolutions", {"fused_convolutions": "yes"}),
        ("fused_convolutions", {"fused_convolutions": "on", "fused_norm": "off"}),
        ("recompute_norms", {"recompute_norms": True, "compile": "model"}),
        ("compile", {"compile": "block"}),
        ("fused_norm", {"fused_norm": "yes"}),
        ("cuda_graphs", {"cuda_graphs": "onn"}),
        ("fused_norm", {"compile": "model", "fused_norm": "on"}),
    ],
)
def test_unknown_values_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunSettings(**settings)
    assert caught.value.field == f"run.{field}"


def test_only_a_fused_stem_of_three_channels_takes_padded_images() -> None:
    def made(channels: int) -> nn.Module:
        return ResNet(*RESNET_LAYOUTS["resnet18"], in_channels=channels, stem="small")

    with torch.device("meta"):
        assert choose(GPU, made(3)).image_channels == 4
        assert choose(GPU, made(1)).image_channels is None
        assert choose(GPU, made(3), fused_norm="off").image_channels is None
        assert choose(CPU, made(3)).image_channels is None


def test_blocks_or_the_whole_model_are_compiled(compiled: Compiled) -> None:
    model = SmallResNet()
    assert choose(CPU, model, compile="blocks").forward is model
    blocks = [model.layer1[0], model.layer2[0], model.layer3[0], model.layer3[1]]
    assert compiled == [(block, False) for block in blocks]
    choose(CPU, model, compile="model")
    assert compiled[-1] == (model, False)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """What the probe finds where `run` is the kernel; its tensors lie on the CPU here."""
    ones = torch.ones
    monkeypatch.setattr(
        fast_path.torch, "ones", lambda *shape, device=None, **how: ones(*shape, **how)
    )

    def probe(run: Any) -> str:
        triton_problem.cache_clear()  # answers are kept for a process
        stand_in: Any = SimpleNamespace(normalized=run)
        monkeypatch.setitem(sys.modules, "paceline.data.device.kernels", stand_in)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if run else None)
        return triton_problem(GPU)

    return probe


def test_whether_kernels_can_run_is_found_out_by_running_one(probed: Callable[[Any], str]) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    assert triton_problem(CPU) == "needs a GPU"
    assert probed(None) == "the package triton is not installed"
    assert probed(lambda pixel, scale, shift, dtype, extra: pixel.to(dtype) * scale + shift) == ""
    assert probed(fail) == "no kernel can be built: Failed to find C compiler."
    assert probed(lambda *given: torch.zeros(1)) == "a kernel gave a wrong result"
    triton_problem.cache_clear()


class Trial:
    """Passes that fail as a model, a compiler or a wait for the device does."""

    def __init__(self, problems: dict[str, Exception]) -> None:
        self.problems, self.ran = problems, []  # type: ignore[var-annotated]

    def __call__(self, forward: Any, guard: AbstractContextManager[None] | None = None) -> None:
        what = "guarded" if guard else getattr(forward, "kind", "eager")
        self.ran.append(what)
        if what in self.problems:
            try:
                raise self.problems[what]
            except Exception as error:
                raise RunError("the pass failed") from error


class CompilerError(Exception):
    """Found by its module, as the compiler's own are."""

    __module__ = "torch._dynamo.exc"


def tried(problems: dict[str, Exception], *, foreign: bool = True, **settings: Any) -> FastPath:
    def compiled_form(images: torch.Tensor) -> torch.Tensor:
        return images

    compiled_form.kind = "compiled"  # type: ignore[attr-defined]
    fast = FastPath(compiled_form, True, False, "model", True)
    with Group(Topology(), CommSettings(), CPU) as group:
        return try_fast_path(
            RunSettings(**settings), fast, plain(), group, Trial(problems), foreign=foreign
        )


def test_what_was_chosen_by_itself_and_fails_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    broken = {"compiled": CompilerError("backend='inductor' raised:\nno such operator")}
    for foreign in (True, False):
        fast = tried(broken, foreign=foreign)
        assert (fast.compile, fast.graphs) == ("off", True)
        assert "torch.compile failed (no such operator)" in fast.describe()
        assert isinstance(fast.forward, nn.Sequential)
    waits = {"guarded": RuntimeError("called a synchronizing CUDA operation")}
    fast = tried(waits)
    assert (fast.compile, fast.graphs) == ("model", False)
    assert "cannot be captured (it waits for the device" in fast.describe()
    assert tried({}).graphs
    assert tried(waits, foreign=False).graphs, "ours are known to be capturable"


def test_what_was_asked_for_and_fails_is_refused() -> None:
    waits = {"guarded": RuntimeError("called a synchronizing CUDA operation")}
    with pytest.raises(PacelineError, match="run.cuda_graphs = 'on': it waits for the device"):
        tried(waits, cuda_graphs="on")
    broken = {"compiled": CompilerError("no such operator")}
    with pytest.raises(PacelineError, match="the pass failed"):
        tried(broken, compile="model")
    for problem in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        with pytest.raises(PacelineError, match="the pass failed"):
            tried({"compiled": problem})


def test_shared_norms_can_be_recomputed() -> None:
    settings = RunConfig().with_values({"run.recompute_norms": True}).run
    shared = NormGroup(2, lambda tensor: None)
    limits = ModelLimits.of(settings, cast(Group, SimpleNamespace()), shared, False)
    assert limits.within(settings) == replace(
        settings, fused_norm="off", fused_convolutions="off", compile="off", cuda_graphs="off"
    )


# What each rank chooses in its trial. Ranks 0 and 1 have one kind of GPU, and different shapes.
OWN = (
    {"forward x": "a", "backward x": "separate"},
    {"forward x": "b", "forward y": "c"},
    {"forward x": "d"},
)


def _chosen(rank: int) -> tuple[dict[str, str], int, str, str]:
    trials = 0

    def trial(forward: Any, guard: AbstractContextManager[None] | None = None) -> None:
        nonlocal trials
        trials += 1
        if trials == 1:
            choices.chosen |= OWN[rank]
            choices.chosen["forward of the file"] = "a"
            choices.used |= OWN[rank].keys()

    fast = FastPath(lambda images: images, True, True, "off", False, products="auto")
    with joined() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_choice, "kind", lambda: "other" if rank == 2 else "usual")
        found = try_fast_path(RunSettings(), fast, plain(), group, trial, foreign=False)
    chosen, mode = dict(choices.chosen), choices.mode
    begin("off", CPU)
    return chosen, trials, found.describe().partition("convolutions: ")[2], mode


def test_ranks_with_one_kind_of_gpu_take_the_choices_of_the_first() -> None:
    first, second, other = run_ranks(len(OWN), _chosen)
    agreed = {"forward x": "a", "backward x": "separate", "forward y": "c"}
    assert first == (agreed, 1, "1 of 2 kinds of products fused (cached)", "auto")
    assert second == (agreed, 2, "2 of 2 kinds of products fused (cached)", "auto")
    assert other == (OWN[2], 1, "1 of 1 kinds of products fused (cached)", "auto")
