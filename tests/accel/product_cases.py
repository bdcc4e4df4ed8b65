"""Residual blocks with fused convolutions, in Triton's interpreter, which `test_fused.py` runs in its own
process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from accel.forms import Chain, use_forms
from accel.norm_reference import assert_near, away, channels_last, norm_for, random_map
from paceline.accel import fused_convolutions
from paceline.accel.convolution_tiles import Tile
from paceline.accel.fused import apply, norm_act, statistics
from paceline.accel.fused_blocks import DeferredOutput, _convolve
from paceline.accel.fused_convolutions import backward_convolution, forward_convolution
from paceline.accel.fused_forward import FusedForward
from paceline.accel.implementation_choice import CUDNN, SEPARATE, Choices
from paceline.accel.operands import Epilogue, NormedMap, Operand
from paceline.models.resnet import BasicBlock, Bottleneck

# Maps of these nets have no multiple of their rows or channels, and take several programs and steps.
SMALL = (
    Tile(16, 16, 16, 4, 2, 2),
    Tile(32, 16, 64, 4, 2, 1, sums="fragments"),
    Tile(16, 32, 16, 4, 2, 2, sums="turned"),
    Tile(32, 16, 64, 8, 2, 1, sums="turned"),
)


def bottlenecks(narrow: int = 6) -> list[nn.Module]:
    return [Bottleneck(20, narrow, 2), Bottleneck(4 * narrow, narrow)]


def basic(narrow: int = 6) -> list[nn.Module]:
    """Has deferred outputs of a projected shortcut, and of an identity before a stride of 2."""
    return [
        BasicBlock(20, narrow, 2), BasicBlock(narrow, narrow), BasicBlock(narrow, 2 * narrow, 2)
    ]  # fmt: skip


Make = Callable[[], list[nn.Module]]
every_kind = pytest.mark.parametrize("make", [bottlenecks, basic])


class Blocks(Chain):
    """Residual blocks: the first reads a stored activation, the others a deferred output."""

    def __init__(self, make: Make = bottlenecks) -> None:
        super().__init__(*make())


def initialized(net: nn.Module, kind: torch.dtype) -> nn.Module:
    """Returns `net` with norms that are all different, some γ negative, and convolutions of `kind`."""
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.to(kind)
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.copy_(torch.linspace(-0.5, 1.5, module.num_features))
                module.bias.copy_(torch.linspace(0.4, -0.3, module.num_features))
    return net


def choices_of(make: Make, fused: bool = True) -> Choices | None:
    """Blocks without products are fused by the mode of cuDNN only, here without its forms."""
    return Choices("auto" if make is bottlenecks else CUDNN) if fused else None


def made(
    fused: bool, kind: torch.dtype = torch.float32, make: Make = bottlenecks, *,
    recompute: bool = False, choices: Choices | None = None,
) -> Any:  # fmt: skip
    torch.manual_seed(0)
    net = initialized(Blocks(make), kind)
    choices = choices if choices and fused else choices_of(make, fused)
    use_forms(net, fused=True, choices=choices, recompute=recompute)
    return net


def run(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = net(x)
    (y.double() * torch.linspace(-1, 1.5, y.numel()).double().view_as(y)).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert len(found) == 2 + len(list(net.parameters()))
    return found | {name: buffer.clone() for name, buffer in net.named_buffers()}


def assert_same(once: dict[str, Tensor], again: dict[str, Tensor]) -> None:
    assert once.keys() == again.keys()
    for name, value in once.items():
        assert torch.equal(again[name], value), name


def exactly(net: nn.Module) -> nn.Module:
    exact = copy.deepcopy(net).double()
    use_forms(exact)
    return exact


def prefer(form: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(
        _: Choices, key: str, forms: dict[str, Callable[[], object]], device: torch.device,
        then: object = None,
    ) -> str:  # fmt: skip
        names = list(forms)
        fused = [name for name in names if name != SEPARATE]
        both = [name for name in names if name.split()[0] == form]
        if both:  # has tiles of its own
            return both[tile % len(both)]
        if form == SEPARATE or not fused:
            return SEPARATE
        return fused[tile % len(fused)]

    monkeypatch.setattr(Choices, "choose", choose)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_convolutions, "TILES", SMALL)
    monkeypatch.setattr(fused_convolutions, "WEIGHT_TILES", SMALL)
    both = [Tile(16, 64, 32, 4, 2, 1, sums=sums) for sums in ("lines", "fragments", "turned")]
    monkeypatch.setattr(fused_convolutions, "BOTH_TILES", both)
    monkeypatch.setattr(fused_convolutions, "both_fits", lambda *_, **__: True)
    monkeypatch.setattr(fused_convolutions, "fits", lambda *_, **__: True)
    monkeypatch.setattr(fused_convolutions, "weight_fits", lambda *_, **__: True)


def out_of_first(net: Any, x: Tensor) -> object:
    """Returns the output of the first block of a fused net."""
    forward: FusedForward = net.forward
    return forward.block(forward.network.blocks()[0], x)


def test_blocks_without_products_are_left_to_cudnn() -> None:
    """Without cuDNN, their convolutions have only the separate implementation."""
    for make, mode, fused in (
        (basic, CUDNN, True), (basic, "auto", False), (bottlenecks, "auto", True),
    ):  # fmt: skip
        net = made(True, make=make, choices=Choices(mode))
        assert isinstance(out_of_first(net, images(torch.float32)), DeferredOutput) == fused


def images(kind: torch.dtype, seed: int = 1) -> Tensor:
    return channels_last(random_map((2, 20, 7, 5), kind, 0.3, seed))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("make", "form", "tile"),
    [
        (basic, SEPARATE, 0), (bottlenecks, SEPARATE, 0),
        *((bottlenecks, "fused", n) for n in range(4)),
        *((bottlenecks, "both", n) for n in range(3)),
    ],
    ids=str,
)  # fmt: skip
def test_fused_blocks_compute_what_separate_operators_do(
    make: Make, form: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(form, tile, monkeypatch)
    exact = run(exactly(made(False, make=make)), images(torch.float64))
    theirs = run(made(False, make=make), images(torch.float32))
    ours = run(made(True, make=make), images(torch.float32))
    for name, value in exact.items():
        assert away(ours[name], value) < 5 * away(theirs[name], value) + 1e-5, name
    assert all(value == 1 for name, value in ours.items() if name.endswith("tracked"))


@pytest.mark.usefixtures("small_tiles")
def test_convolutions_of_torch_may_answer_in_any_memory_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels read rows × channels."""
    prefer(SEPARATE, 0, monkeypatch)
    expected = run(made(True), images(torch.float32))
    convolve, backward = torch.nn.functional.conv2d, fused_convolutions._torch_backward

    def transposed(*given: object) -> Tensor:
        return convolve(*given).contiguous()  # type: ignore[arg-type]

    def transposed_backward(*given: object) -> tuple[Tensor | None, Tensor | None]:
        dx, weight = backward(*given)  # type: ignore[arg-type]
        return dx.contiguous(), weight

    monkeypatch.setattr(torch.nn.functional, "conv2d", transposed)
    monkeypatch.setattr(fused_convolutions, "_torch_backward", transposed_backward)
    found = run(made(True), images(torch.float32))
    for name, value in expected.items():
        assert away(found[name], value) < 1e-5, name


class _Unused(torch.autograd.Function):
    """Its input has no gradient: None, not zeros."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> None:
        return None


@pytest.mark.usefixtures("small_tiles")
def test_a_first_convolution_without_a_gradient_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(SEPARATE, 0, monkeypatch)
    block = made(True).blocks[0]
    x = images(torch.float32).requires_grad_()
    out, _ = _convolve(x, (block.conv1, block.bn1), Choices("auto"))
    _Unused.apply(out.x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is block.conv1.weight.grad is None


@every_kind
def test_half_precision_is_as_near_as_that_of_separate_operators(make: Make) -> None:
    """Uses the tiles of the package."""
    half = torch.float16
    exact = run(exactly(made(False, half, make)), images(half).double())
    theirs = run(made(False, half, make), images(half))
    ours = run(made(True, half, make), images(half))
    for name, value in exact.items():
        assert ours[name].dtype == theirs[name].dtype, name
        assert away(ours[name], value) < 2 * away(theirs[name], value) + 2e-3, name


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("form", "tile"), [("fused", 0), ("fused", 2), ("both", 2)])
def test_repetitions_are_bit_identical_and_gradients_accumulate(
    form: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(form, tile, monkeypatch)
    net = made(True)
    x = images(torch.float32)
    once, again = run(made(True), x), run(net, x)
    assert_same(once, again)
    twice = run(net, x)
    for name in ("blocks.0.conv1.weight", "blocks.1.conv3.weight", "blocks.0.bn3.bias"):
        assert away(twice[name], 2 * once[name]) < 1e-5, name


@every_kind
@pytest.mark.usefixtures("small_tiles")
def test_recomputed_maps_have_the_bits_of_stored_ones(make: Make) -> None:
    """Deferred outputs are not stored: only the outputs of convolutions are."""

    def stored(net: Blocks) -> int:
        sizes = []

        def pack(kept: Tensor) -> Tensor:
            if kept.dim() == 4 and kept.shape[1] == 6 and kept.shape[2] > 3:
                sizes.append(kept.numel())
            return kept

        # Inside `not_stored` its own hooks apply, so what is left out there is not seen here.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            net(images(torch.float32).requires_grad_())
        return sum(sizes)

    net, plain = made(True, make=make, recompute=True), made(True, make=make)
    assert_same(run(plain, images(torch.float32)), run(net, images(torch.float32)))
    assert 0 < stored(net) < stored(plain)


@every_kind
@pytest.mark.usefixtures("small_tiles")
def test_frozen_weights_get_no_gradient_and_the_others_theirs(make: Make) -> None:
    net = made(True, make=make)
    for block in net.blocks:
        block.conv1.weight.requires_grad_(False)
        if isinstance(block, Bottleneck):
            block.conv3.weight.requires_grad_(False)
    net(images(torch.float32).requires_grad_()).sum().backward()
    for name, parameter in net.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert net.blocks[1].conv2.weight.grad is not None


@every_kind
def test_a_pending_map_is_passed_from_block_to_block_in_training_only(make: Make) -> None:
    net = made(True, make=make)
    x = images(torch.float32)
    assert isinstance(out_of_first(net, x), DeferredOutput)
    plain = made(False, make=make)
    out_of_first(plain, x)
    # A norm in evaluation mode has no fused form: its block takes the map as it comes.
    net.blocks[-1].bn2.eval()
    plain.blocks[-1].bn2.eval()
    last = net.forward.block(net.forward.network.blocks()[-1], net.blocks[:-1](x))
    assert not isinstance(last, DeferredOutput)
    assert away(net(x), plain(x)) < 1e-5
    assert torch.equal(net.eval()(x), net(x))


@pytest.mark.parametrize("place", ["conv1", "downsample"])
def test_a_module_in_the_place_of_a_convolution_is_not_fused(place: str) -> None:
    found = []
    for fused in (True, False):
        net = made(fused)
        for block in net.blocks:
            if place == "conv1":
                block.conv1 = nn.Sequential(block.conv1)  # type: ignore[assignment]
            elif block.downsample is not None:
                block.downsample[0] = nn.Sequential(block.downsample[0])
        use_forms(net, fused=True, choices=choices_of(bottlenecks, fused))
        found.append(run(net, images(torch.float32)))
    for name, value in found[1].items():
        assert away(found[0][name], value) < 1e-4, name


def test_weights_of_another_type_are_not_fused() -> None:
    net = made(True)
    net.blocks[0].conv3.double()
    with pytest.raises(RuntimeError, match="dtype|type"):  # torch's own convolution refuses them
        net(images(torch.float32))


def test_a_single_value_raises_the_error_of_torch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        made(True)(torch.zeros(1, 20, 1, 1))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf − inf
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("tile", range(len(SMALL)))
@pytest.mark.parametrize("running", [1000.0, float("nan"), float("inf")])
def test_statistics_about_a_running_mean(
    running: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the mean it keeps the variance precise; one that is not finite is ignored, or no batch
    after an overflow would have statistics."""
    prefer("fused", tile, monkeypatch)
    mean = 1000.0 if running == 1000.0 else 0.0
    x = channels_last(torch.randn(2, 16, 5, 5) + mean)
    weight = torch.eye(16).view(16, 16, 1, 1)
    norm = norm_for(16)
    norm.running_mean.fill_(running)
    out, saved, _ = forward_convolution(Choices("auto"), Operand(x), weight, norm)
    assert torch.equal(out, x)
    exact = x.double().transpose(0, 1).flatten(1)
    assert_near(saved[0], exact.mean(1), 1e-6)
    assert_near(saved[1], (exact.var(1, correction=0) + norm.eps).rsqrt(), 1e-4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("sums", ["lines", "fragments", "turned"])
@pytest.mark.parametrize("channels", [24, 21], ids=["descriptors", "pointers"])
def test_sums_are_those_of_the_stored_map(channels: int, sums: str) -> None:
    """The sums are those of rounded values, within the rounding of a float32 sum."""
    tile = Tile(32, 16, 32, 8, 2, 2, sums=sums)
    x = channels_last(random_map((3, 40, 7, 5), torch.float16, 0.3, 1))
    weight = torch.randn(channels, 40, 1, 1).half()
    norm = norm_for(channels)
    out, moments, _ = fused_convolutions._fused_forward(Operand(x), weight, norm, tile, False)
    parts = moments.parts
    assert parts.shape[1] > 1, "several programs"
    value = out.double().transpose(0, 1).flatten(1) - norm.running_mean.double()[:, None]
    scale = value.square().sum(1)
    assert ((parts[1].double().sum(0) - scale).abs() < 1e-6 * scale).all()
    error = (parts[0].double().sum(0) - value.sum(1)).abs()
    assert (error < 1e-6 * value.abs().sum(1)).all()
    again = fused_convolutions._fused_forward(Operand(x), weight, norm, tile, False)[1].parts
    assert torch.equal(again, parts)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.usefixtures("small_tiles")
def test_nan_spreads_as_in_separate_kernels() -> None:
    """A gradient that overflows must be seen in the weights' gradients; NaN in a map, in its channel's
    statistics."""
    norm = norm_for(8)
    x = channels_last(random_map((2, 8, 4, 4), torch.float32))
    saved = statistics(x, norm)
    weight = torch.randn(8, 8, 1, 1)
    dz = channels_last(torch.ones(2, 8, 4, 4))
    dz[1, 3, 2, 2] = torch.inf
    found = backward_convolution(
        Choices("auto"), Operand(dz), weight, Operand.normalized(x, saved),
        Epilogue.masked(NormedMap(x, saved, norm.weight, norm.bias)), wants_weight=True,
    )  # fmt: skip
    assert not found.weight[3].isfinite().all()
    assert found.weight[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    x[0, 2, 1, 1] = torch.nan
    out, _, _ = forward_convolution(
        Choices("auto"), Operand.normalized(x, saved), weight, norm_for(8)
    )
    assert out[0, :, 1, 1].isnan().all()
    assert out[1].isfinite().all()


def test_stored_operands_are_the_norms_own() -> None:
    norm = norm_for(5)
    x, residual = (
        channels_last(random_map((2, 5, 3, 3), torch.float32, 0.3, seed)) for seed in (0, 1)
    )
    wanted = norm_act(x, copy.deepcopy(norm), residual)
    saved = statistics(x, norm)
    assert torch.equal(Operand.joined(x, saved, residual).stored(), wanted)
    assert torch.equal(Operand.normalized(x, saved).stored(), apply(x, saved, None, relu=True))


def test_the_gradient_of_a_gradient_is_refused() -> None:
    x = images(torch.float32).requires_grad_()
    (gradient,) = torch.autograd.grad(made(True)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
