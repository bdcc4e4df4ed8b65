"""Cases of the fused kernels that `test_fused.py` runs in its own process, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from accel.forms import Chain, use_forms
from accel.norm_reference import Wanted, assert_near, channels_last, norm_for, ours, random_map
from paceline.accel import fused, kernels
from paceline.accel.fused import can_fuse, norm_act, norm_act_pool, norm_act_twice
from paceline.data.device.kernels import normalized
from paceline.models.resnet import BasicBlock, Bottleneck

FULL, HALF = torch.float32, torch.float16
TOLERANCE = {FULL: 1e-5, HALF: 2e-3}
# Channels that nothing divides, one channel, more than one block of them, maps of one pixel. Tiles as
# shipped hold 64 channels, and each of these maps in one or two tiles; small ones hold 32 elements, and
# the interpreter takes its time for each.
CASES = {
    "shipped": [
        ((4, 8, 5, 5), FULL), ((3, 17, 4, 6), FULL), ((2, 70, 3, 2), FULL), ((5, 1, 7, 7), FULL),
        ((6, 3, 1, 1), FULL), ((1, 64, 5, 4), FULL), ((3, 17, 4, 6), HALF), ((2, 70, 3, 2), HALF),
    ],
    "small": [
        ((3, 9, 2, 3), FULL), ((2, 35, 3, 1), FULL), ((4, 1, 5, 5), FULL), ((6, 3, 1, 1), FULL),
        ((3, 9, 2, 3), HALF), ((2, 35, 3, 1), HALF),
    ],
}  # fmt: skip
POOLED = {
    "shipped": [
        ((2, 6, 4, 6), FULL), ((2, 3, 5, 7), FULL), ((1, 67, 3, 4), FULL), ((1, 5, 1, 2), FULL),
        ((2, 1, 2, 1), FULL), ((2, 3, 5, 7), HALF),
    ],
    "small": [
        ((2, 3, 3, 5), FULL), ((1, 35, 2, 2), FULL), ((1, 5, 1, 2), FULL), ((2, 1, 2, 1), FULL),
        ((2, 3, 3, 5), HALF),
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses small tiles, so that there are several programs of several tiles, the last ones partial.

    `shipped` keeps the tiles of the package.
    """
    if getattr(request, "param", "small") == "small":
        for name in ("MOMENTS", "APPLY", "SUMS", "INPUT", "POOL_SUMS"):
            monkeypatch.setattr(fused, name, fused.Tile(32, 3, 4))
        monkeypatch.setattr(fused, "_JOIN_PARTS", 2)
        monkeypatch.setattr(fused, "POOL", 32)
        monkeypatch.setattr(fused, "POOL_INPUT", 16)


# ReLU and residual: all with the shapes of odd channels, the shortest form with the others.
ACTS = [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize(
    ("tiles", "shape", "kind", "relu", "residual"),
    [
        (tiles, shape, kind, relu, residual)
        for tiles, cases in CASES.items()
        for shape, kind in cases
        for relu, residual in (ACTS if shape[1] in (9, 17) else ACTS[:1])
    ],
    ids=str,
    indirect=["tiles"],
)
def test_norm_act(shape: tuple[int, ...], kind: torch.dtype, relu: bool, residual: bool) -> None:
    wanted = Wanted(shape, kind, residual=residual, relu=relu)
    found = ours(wanted, lambda x, norm, extra: (norm_act(x, norm, extra, relu=relu),))
    wanted.check(found, TOLERANCE[kind])


@pytest.mark.parametrize(("shape", "kind"), [CASES["small"][1], CASES["small"][-1]], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=["both", "first", "second"])
def test_an_output_with_two_uses(
    shape: tuple[int, ...], kind: torch.dtype, residual: bool, used: tuple[int, ...]
) -> None:
    wanted = Wanted(shape, kind, residual=residual, uses=used)
    wanted.check(ours(wanted, norm_act_twice), TOLERANCE[kind])


@pytest.mark.parametrize(
    ("tiles", "shape", "kind"),
    [(tiles, *case) for tiles, cases in POOLED.items() for case in cases],
    ids=str,
    indirect=["tiles"],
)
@pytest.mark.parametrize(("padding", "used"), [(1, (0, 1)), (0, (1,))], ids=str)
def test_norm_relu_and_pool(
    shape: tuple[int, ...], kind: torch.dtype, padding: int, used: tuple[int, ...]
) -> None:
    if padding == 0:
        shape = (*shape[:2], shape[2] + 2, shape[3] + 2)  # a window needs three rows
    wanted = Wanted(shape, kind, pooled=True, padding=padding, uses=used)
    found = ours(wanted, lambda x, norm, extra: norm_act_pool(x, norm, padding=padding))
    wanted.check(found, TOLERANCE[kind])


@pytest.mark.parametrize("kind", [FULL, HALF], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_a_convolution_bias_affects_the_running_mean_only(kind: torch.dtype, pooled: bool) -> None:
    wanted = Wanted((2, 5, 5, 4), kind, pooled=pooled, padding=0, offset=True)
    bias = wanted.offset
    found = ours(
        wanted,
        lambda x, norm, extra: (
            norm_act_pool(x, norm, padding=0, bias=bias)
            if pooled
            else (norm_act(x, norm, bias=bias),)
        ),
    )
    wanted.check(found, TOLERANCE[kind])


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("mean", [1000.0, -1000.0])
def test_precision_with_a_mean_far_from_zero(mean: float, pooled: bool) -> None:
    """A variance computed as E[x²] − E[x]² would have no correct digit here."""
    wanted = Wanted((3, 2, 5, 5), torch.float32, mean=mean, pooled=pooled, uses=(0, 1))
    found = ours(
        wanted,
        lambda x, norm, extra: norm_act_pool(x, norm) if pooled else norm_act_twice(x, norm),
    )
    wanted.check(found, 5e-4, statistics=1e-6)


def test_a_channel_that_is_constant_gives_its_bias() -> None:
    norm = norm_for(3)
    y = norm_act(channels_last(torch.full((2, 3, 4, 4), 7.0)), norm)
    assert_near(y, norm.bias.double().relu().view(1, 3, 1, 1).expand_as(y), 1e-4)
    assert norm.running_var.allclose(torch.full((3,), 0.9))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf − inf
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_spread_over_their_channel_only(pooled: bool, value: float) -> None:
    x = channels_last(random_map((2, 3, 4, 4), torch.float32))
    x[1, 2, 3, 3] = value
    x.requires_grad_()
    norm = norm_for(3)
    y = norm_act_pool(x, norm)[0] if pooled else norm_act(x, norm)
    assert y[:, :2].isfinite().all()
    assert y[:, 2].isnan().all()
    y.sum().backward()
    assert x.grad[:, :2].isfinite().all()
    assert x.grad[:, 2].isnan().all()
    assert norm.running_var.isfinite().tolist() == [True, True, False]


def test_nan_in_a_residual_stays_in_place() -> None:
    residual = torch.zeros(2, 3, 4, 4)
    residual[0, 1, 2, 3] = torch.nan
    y = norm_act(
        channels_last(random_map((2, 3, 4, 4), torch.float32)), norm_for(3), channels_last(residual)
    )
    assert torch.equal(y.isnan(), residual.isnan())


@pytest.mark.parametrize("call", [norm_act, norm_act_twice, norm_act_pool])
def test_a_single_value_raises_the_error_of_torch(call) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(1, 4, 1, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel") as torchs:
        nn.BatchNorm2d(4)(x)
    norm = norm_for(4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as own:
        call(x, norm)
    assert str(own.value) == str(torchs.value)
    assert norm.num_batches_tracked == 0


def test_repetitions_are_bit_identical() -> None:
    def once() -> list[Tensor]:
        wanted = Wanted((3, 5, 2, 3), torch.float16, residual=True, uses=(0, 1))
        found = ours(wanted, norm_act_twice)
        return [*found.outputs, *found.gradients.values(), found.norm.running_var]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)


def test_frozen_parameters_and_inputs_get_no_gradient() -> None:
    norm = norm_for(3).requires_grad_(False)
    x = channels_last(random_map((2, 3, 4, 4), torch.float32)).requires_grad_()
    norm_act(x, norm).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is None


@pytest.mark.parametrize(
    ("change", "fusible"),
    [
        (lambda norm, x: x, True),
        (lambda norm, x: norm.eval() and x, False),
        (lambda norm, x: x.contiguous(), False),
        (lambda norm, x: setattr(norm, "momentum", None) or x, False),
        (lambda norm, x: setattr(norm, "track_running_stats", False) or x, False),
        (lambda norm, x: setattr(norm, "affine", False) or x, False),
    ],
    ids=["plain", "eval", "nchw", "cumulative", "untracked", "plain-scale"],
)
def test_what_the_kernels_accept(change, fusible: bool) -> None:  # type: ignore[no-untyped-def]
    norm, x = norm_for(3), channels_last(torch.zeros(2, 3, 4, 4))
    assert can_fuse(change(norm, x), norm) is fusible


def test_the_gradient_of_a_gradient_is_refused() -> None:
    """Ours are not differentiable: a penalty on gradients would silently have no effect."""
    for made in (norm_act, lambda x, norm: norm_act_pool(x, norm)[0]):
        x = random_map((2, 3, 3, 3), FULL).requires_grad_()
        (gradient,) = torch.autograd.grad(made(x, norm_for(3)).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_the_pool_propagates_nan() -> None:
    """The scale is finite: the statistics do not contain the NaN."""
    maps = channels_last(torch.ones(1, 1, 3, 3))
    maps[0, 0, 0, 0] = torch.nan
    saved = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    y, winner = torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1, dtype=torch.uint8)
    kernels.pool_kernel[(1, 1)](
        maps, y, winner, saved, 1, 3, 3, 1, 1, 1, PAD=0, BLOCK_M=1, BLOCK_C=1
    )
    assert y.isnan().all()
    assert torch.nn.functional.max_pool2d(maps, 3).isnan().all()


def blocks() -> Chain:
    """A map that is computed again, as input of a block, of its shortcut and of a convolution there."""
    return Chain(
        BasicBlock(4, 4), BasicBlock(4, 4), BasicBlock(4, 6, 2), Bottleneck(6, 2),
        stem=(nn.Conv2d(3, 4, 3, bias=False), norm_for(4)),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [FULL, HALF])
@pytest.mark.parametrize("tiles", ["shipped"], indirect=True)
def test_recomputed_norms_have_the_bits_of_stored_ones(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is computed once for all of its readers."""
    applied: list[Tensor] = []

    def counted(*given: Any) -> Tensor:
        applied.append(apply(*given))
        return applied[-1]

    apply = fused.apply
    monkeypatch.setattr(fused, "apply", counted)
    found, counts = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = blocks().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                module.to(kind)
        use_forms(net, fused=True, recompute=recompute)
        x = channels_last(random_map((2, 3, 5, 5), kind))
        y = net(x)
        applied.clear()
        y.backward(random_map(tuple(y.shape), kind))
        counts.append(len(applied))
        gradients = {name: p.grad for name, p in net.named_parameters()}
        found.append({"y": y.detach(), **gradients, **dict(net.named_buffers())})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    # The stem, the first norms of four blocks and the second one of the bottleneck, the second block.
    assert counts == [0, 1 + 4 + 1 + 1]


@pytest.mark.parametrize(("channels", "extra"), [(3, 1), (1, 0), (1, 1), (3, 0)])
@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_normalization_equals_torch(channels: int, extra: int, dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (3, 7, 5, channels), dtype=torch.uint8)
    scale, shift = torch.rand(1, channels, 1, 1), torch.rand(1, channels, 1, 1) - 0.5
    ours = normalized(images, scale, shift, dtype, extra)
    wanted = images.permute(0, 3, 1, 2).float() * scale + shift
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours[:, :channels].float(), wanted, rtol=2e-3, atol=1e-3)
    assert not ours[:, channels:].any()
    assert ours.shape[1] == channels + extra
