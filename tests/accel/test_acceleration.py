"""Choices of `[run.accel]` by model and device: fused kernels, recomputed norms, torch.compile."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from comm.exchanges import joined
from paceline.accel.acceleration import ACCELERATION, AppliedAccel
from paceline.accel.implementation_choice import Choices
from paceline.accel.settings import AccelSettings
from paceline.comm import CommSettings, Group
from paceline.config import RunConfig
from paceline.core.errors import PacelineError, RunError
from paceline.core.topology import Topology
from paceline.models.acceleration import AccelerationContext, Applied
from paceline.models.resnet import RESNET_LAYOUTS, FastResNet, ResNet, SmallResNet
from paceline.train.fast_path import AllRanks
from ranks import run_ranks
from refusals import refused

CPU, GPU = torch.device("cpu"), torch.device("cuda")


Compiled = list[tuple[nn.Module, bool]]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Records the calls of torch.compile, which does not run: `test_compile.py` runs it."""
    seen: Compiled = []

    def note(model: nn.Module, *, dynamic: bool) -> Any:
        seen.append((model, dynamic))
        return lambda images: model(images)

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    return seen


def context(device: torch.device, problem: str = "", **values: Any) -> AccelerationContext:
    """Builds a context in which kernels run on GPUs, unless there is a `problem`; no kernel runs."""
    problem = problem or ("" if device == GPU else "needs a GPU")
    values = {"dtype": torch.float16, "kernel_problem": problem} | values
    return AccelerationContext(device=device, **values)


def choose(
    device: torch.device, model: nn.Module | None = None, problem: str = "", *,
    dtype: torch.dtype = torch.float16, channels_last: bool = True, **settings: Any,
) -> AppliedAccel:  # fmt: skip
    """Plain if nothing is supported."""
    about = context(
        device,
        problem,
        dtype=dtype,
        channels_last=channels_last,
        settings=AccelSettings(**settings),
    )
    model = model or SmallResNet()
    reason = ACCELERATION.supports(model, about)
    applied = ACCELERATION.apply(model, about)
    assert (applied.forward is model) == bool(reason)
    return applied


def plain() -> nn.Module:
    """Returns a model without residual blocks."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def test_a_cpu_gets_none_of_it() -> None:
    model = SmallResNet()
    applied = choose(CPU, model)
    assert applied.forward is model
    assert ACCELERATION.supports(model, context(CPU)) == "fused norms off (needs a GPU)"


def test_a_gpu_gets_fused_norms() -> None:
    model = SmallResNet()
    applied = choose(GPU, model)
    assert applied.plan.fused
    assert applied.describe().startswith("fused norms on, compile off")
    assert "forward" not in vars(model), "evaluation uses the plain model"
    assert choose(GPU, FastResNet()).input_channels == 4
    applied.undo()
    assert applied.forward is model


def test_a_gpu_compiles_what_has_no_fused_form() -> None:
    def forms(applied: AppliedAccel) -> tuple[bool, str]:
        return applied.plan.fused, applied.plan.compile

    assert forms(choose(GPU, plain())) == (False, "model")
    assert choose(GPU, plain()).gradients_at_end
    assert forms(choose(GPU, fused_norm="off")) == (False, "model")
    assert forms(choose(GPU, compile="off", fused_norm="off")) == (False, "off")
    assert forms(choose(GPU, compile="model")) == (False, "model"), "compiled, so not fused"


def test_switches_that_cannot_be_obeyed_are_refused() -> None:
    broken = "no kernel can be built: no C compiler"
    for given, settings in (
        ((CPU,), {"fused_norm": "on"}),
        ((GPU, plain()), {"fused_norm": "on"}),
        ((GPU,), {"fused_norm": "on", "channels_last": False}),
        ((GPU, None, broken), {"fused_norm": "on"}),
        ((GPU, plain()), {"recompute_norms": True}),
    ):
        with refused(f"run.accel.{next(iter(settings))}"):
            choose(*given, **settings)  # type: ignore[arg-type]
    without = choose(GPU, None, broken)  # auto goes on without, and says so
    assert without.plan.compile == "model"
    assert broken in without.describe()


def bottlenecks() -> nn.Module:
    with torch.device("meta"):
        return ResNet(*RESNET_LAYOUTS["resnet50"], num_classes=3)


def test_fused_convolutions_are_asked_for_and_need_bottlenecks_in_half_precision() -> None:
    model = bottlenecks()
    assert choose(GPU, model).plan.fused_convolutions == "off"
    for value in ("auto", "on", "cudnn"):
        assert choose(GPU, model, fused_convolutions=value).plan.fused_convolutions == value
    for off in (
        choose(GPU, model, fused_convolutions="auto", dtype=torch.float32),
        choose(GPU, SmallResNet(), fused_convolutions="auto"),
        choose(CPU, model, fused_convolutions="auto"),
        choose(GPU, model, fused_convolutions="auto", fused_norm="off"),
    ):
        assert off.plan.fused_convolutions == "off"
        assert "convolutions: off (" in off.describe()
    # Blocks of 3 × 3 convolutions have kernels of cuDNN, in fp16, and no others.
    basic = SmallResNet()
    assert choose(GPU, basic, fused_convolutions="cudnn").plan.fused_convolutions == "cudnn"
    for given, kind in (
        (basic, torch.bfloat16), (basic, torch.float32), (plain(), torch.float16)
    ):  # fmt: skip
        applied = choose(GPU, given, fused_convolutions="cudnn", dtype=kind)
        assert applied.plan.fused_convolutions == "off"
    applied = choose(GPU, model, fused_convolutions="cudnn", dtype=torch.bfloat16)
    assert applied.plan.fused_convolutions == "cudnn"
    for given, other in (
        ((GPU, SmallResNet()), {}),
        ((CPU, model), {}),
        ((GPU, model), {"channels_last": False}),
        ((GPU, model), {"compile": "model"}),
        ((GPU, model), {"dtype": torch.float32}),
    ):
        with refused("run.accel.fused_convolutions"):
            choose(*given, fused_convolutions="on", **other)  # type: ignore[arg-type]


def test_norms_are_recomputed_where_asked_for_and_not_compiled() -> None:
    for device, problem, settings in (
        (CPU, "", {}),
        (GPU, "", {}),
        (GPU, "", {"fused_convolutions": "auto"}),
        (GPU, "no C compiler", {}),
        (GPU, "", {"fused_norm": "off"}),
    ):
        model = bottlenecks()
        applied = choose(device, model, problem, recompute_norms=True, **settings)  # type: ignore[arg-type]
        assert (applied.plan.recompute, applied.plan.compile) == (True, "off")
        assert "norms recomputed" in applied.describe()
        assert "recomputed" not in choose(device, model, problem, **settings).describe()  # type: ignore[arg-type]


def test_norms_over_several_ranks_can_be_recomputed_only() -> None:
    model = SmallResNet()
    about = context(GPU, collective_norms=True)
    assert "exchange their statistics" in ACCELERATION.supports(model, about)
    about = context(GPU, collective_norms=True, settings=AccelSettings(recompute_norms=True))
    plan = ACCELERATION.apply(model, about).plan
    assert (plan.fused, plan.compile, plan.recompute) == (False, "off", True)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("accel.fused_convolutions", {"fused_convolutions": "yes"}),
        ("accel.fused_convolutions", {"fused_convolutions": "on", "fused_norm": "off"}),
        ("accel.recompute_norms", {"recompute_norms": True, "compile": "model"}),
        ("accel.compile", {"compile": "block"}),
        ("accel.fused_norm", {"fused_norm": "yes"}),
        ("accel.fused_norm", {"compile": "model", "fused_norm": "on"}),
    ],
)
def test_unknown_values_and_combinations_are_refused(
    field: str, settings: dict[str, object]
) -> None:
    with refused(f"run.{field}"):
        RunConfig().with_values({f"run.accel.{name}": value for name, value in settings.items()})


def test_only_a_fused_stem_of_three_channels_takes_padded_images() -> None:
    def made(channels: int) -> nn.Module:
        return ResNet(*RESNET_LAYOUTS["resnet18"], in_channels=channels, stem="small")

    with torch.device("meta"):
        assert choose(GPU, made(3)).input_channels == 4
        assert choose(GPU, made(1)).input_channels is None
        assert choose(GPU, made(3), fused_norm="off").input_channels is None
        assert choose(CPU, made(3)).input_channels is None


def test_the_whole_model_is_compiled(compiled: Compiled) -> None:
    model = SmallResNet()
    ACCELERATION.apply(model, context(CPU, settings=AccelSettings(compile="model")))
    assert compiled[-1] == (model, False)


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


def tried(
    problems: dict[str, Exception], *, foreign: bool = True, how: str = "auto"
) -> tuple[Applied, nn.Module]:
    model = plain()
    applied = ACCELERATION.apply(model, context(GPU, settings=AccelSettings(compile=how)))

    def compiled_form(images: torch.Tensor) -> torch.Tensor:
        return images

    compiled_form.kind = "compiled"  # type: ignore[attr-defined]
    applied.forward = compiled_form
    with Group(Topology(), CommSettings(), CPU) as group:
        applied.calibrate(AllRanks(group), Trial(problems), foreign=foreign)
    return applied, model


def test_a_compiler_that_fails_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    broken = {"compiled": CompilerError("backend='inductor' raised:\nno such operator")}
    for foreign in (True, False):
        applied, model = tried(broken, foreign=foreign)
        assert applied.forward is model
        assert "compile off (torch.compile failed: no such operator)" in applied.describe()
    assert tried({})[0].forward is not model
    assert tried(broken, how="model")[0].forward is not model, "requested, so not tried"
    for problem in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        with pytest.raises(PacelineError, match="the pass failed"):
            tried({"compiled": problem})


def test_what_to_do_about_an_error() -> None:
    short = MemoryError("out of memory")
    assert "recompute_norms=true" in choose(GPU).advise(short)[0]
    assert not choose(GPU, recompute_norms=True).advise(short)
    assert not choose(GPU, plain()).advise(short), "compiled"
    assert choose(GPU, plain()).advise(CompilerError("x")) == ["use --compile off"]
    fused = choose(GPU, bottlenecks(), fused_convolutions="auto")
    fused.choices = Choices("auto")
    assert "fused_convolutions=off" in fused.advise(RuntimeError("capture"))[0]


# What each rank chooses in its trial. Ranks 0 and 1 have one kind of GPU, and different shapes.
OWN = (
    {"forward x": "a", "backward x": "separate"},
    {"forward x": "b", "forward y": "c"},
    {"forward x": "d"},
)


def _chosen(rank: int) -> tuple[dict[str, str], int, str]:
    trials = 0

    def trial(forward: Any, guard: AbstractContextManager[None] | None = None) -> None:
        nonlocal trials
        trials += 1
        if trials == 1:
            applied.choices.chosen |= OWN[rank]
            applied.choices.chosen["forward of the file"] = "a"
            applied.choices.used |= OWN[rank].keys()

    def begin(mode: str, device: torch.device) -> Choices:
        return Choices(mode, open=True)

    applied = choose(GPU, bottlenecks(), fused_convolutions="auto")
    with joined() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choices, "begin", begin)
        patch.setattr(Choices, "kind", lambda _: "other" if rank == 2 else "usual")
        applied.calibrate(AllRanks(group), trial, foreign=False)
        chosen, said = dict(applied.choices.chosen), applied.describe()
    return chosen, trials, said.partition("convolutions: ")[2]


def test_ranks_with_one_kind_of_gpu_take_the_choices_of_the_first() -> None:
    first, second, other = run_ranks(len(OWN), _chosen)
    agreed = {"forward x": "a", "backward x": "separate", "forward y": "c"}
    assert first == (agreed, 1, "1 of 2 kinds of convolutions fused (cached)")
    assert second == (agreed, 2, "2 of 2 kinds of convolutions fused (cached)")
    assert other == (OWN[2], 1, "1 of 1 kinds of convolutions fused (cached)")
