"""What `test_fused_norm.py` runs in a process of its own, where Triton interprets its kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from models.norm_reference import Wanted, as_map, assert_near, norm_for, ours, random_map
from paceline.data.normalize_kernel import normalized
from paceline.models import fused, kernels
from paceline.models.fused import can_fuse, norm_act, norm_act_pool, norm_act_twice

# Channels that nothing divides, one channel, more than one block of them, maps of one pixel.
SHAPES = [(4, 8, 5, 5), (3, 17, 4, 6), (2, 70, 3, 2), (5, 1, 7, 7), (6, 3, 1, 1), (1, 64, 5, 4)]
POOLED = [(2, 6, 8, 8), (2, 6, 7, 9), (1, 67, 3, 4), (1, 5, 1, 2), (2, 1, 2, 1)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
FULL, HALF = TOLERANCE
CASES = [(shape, FULL) for shape in SHAPES] + [(shape, HALF) for shape in SHAPES[1:3]]
POOL_CASES = [(shape, FULL) for shape in POOLED] + [(shape, HALF) for shape in POOLED[1:3]]


@pytest.fixture(autouse=True, params=["shipped", "small"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles even these maps make several programs of several tiles, the last ones ragged."""
    if request.param == "small":
        for name in ("MOMENTS", "APPLY", "SUMS", "INPUT"):
            monkeypatch.setattr(fused, name, fused.Tile(32, 3, 4))
        monkeypatch.setattr(fused, "_JOIN_PARTS", 2)
        monkeypatch.setattr(fused, "POOL", 32)
        monkeypatch.setattr(fused, "POOL_INPUT", 16)
        monkeypatch.setattr(fused, "POOL_SUMS", fused.Tile(32, 3, 4))


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=str)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_act(shape: tuple[int, ...], kind: torch.dtype, relu: bool, residual: bool) -> None:
    wanted = Wanted(shape, kind, residual=residual, relu=relu)
    found = ours(wanted, lambda x, norm, extra: (norm_act(x, norm, extra, relu=relu),))
    wanted.check(found, TOLERANCE[kind])


@pytest.mark.parametrize(("shape", "kind"), [CASES[0], CASES[2], CASES[-1]], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=["both", "first", "second"])
def test_an_output_with_two_uses(
    shape: tuple[int, ...], kind: torch.dtype, residual: bool, used: tuple[int, ...]
) -> None:
    wanted = Wanted(shape, kind, residual=residual, uses=used)
    found = ours(wanted, norm_act_twice)
    wanted.check(found, TOLERANCE[kind])


@pytest.mark.parametrize(("shape", "kind"), POOL_CASES, ids=str)
@pytest.mark.parametrize("padding", [1, 0])
@pytest.mark.parametrize("used", [(0, 1), (1,)], ids=["both", "second"])
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
def test_a_convolutions_bias_moves_the_running_mean_alone(kind: torch.dtype, pooled: bool) -> None:
    wanted = Wanted((3, 17, 5, 4), kind, pooled=pooled, padding=0, offset=True)
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
def test_a_mean_far_from_zero_costs_no_digits(mean: float, pooled: bool) -> None:
    """A variance as E[x²] − E[x]² would lose all its digits here."""
    wanted = Wanted((4, 5, 9, 9), torch.float32, mean=mean, pooled=pooled, uses=(0, 1))
    found = ours(
        wanted,
        lambda x, norm, extra: norm_act_pool(x, norm) if pooled else norm_act_twice(x, norm),
    )
    wanted.check(found, 5e-4, statistics=1e-6)


def test_a_channel_that_is_constant_gives_its_bias() -> None:
    norm = norm_for(3)
    y = norm_act(as_map(torch.full((2, 3, 4, 4), 7.0)), norm)
    assert_near(y, norm.bias.double().relu().view(1, 3, 1, 1).expand_as(y), 1e-4)
    assert norm.running_var.allclose(torch.full((3,), 0.9))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf − inf
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_over_its_channel_alone(pooled: bool, value: float) -> None:
    x = as_map(random_map((2, 3, 6, 6), torch.float32))
    x[1, 2, 3, 3] = value
    x.requires_grad_()
    norm = norm_for(3)
    y = norm_act_pool(x, norm)[0] if pooled else norm_act(x, norm)
    assert y[:, :2].isfinite().all()
    assert y[:, 2].isnan().all()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[:, :2].isfinite().all()
    assert x.grad[:, 2].isnan().all()
    assert norm.running_var.isfinite().tolist() == [True, True, False]


def test_a_residual_that_is_not_a_number_stays_where_it_is() -> None:
    residual = torch.zeros(2, 3, 4, 4)
    residual[0, 1, 2, 3] = torch.nan
    y = norm_act(as_map(random_map((2, 3, 4, 4), torch.float32)), norm_for(3), as_map(residual))
    assert torch.equal(y.isnan(), residual.isnan())


@pytest.mark.parametrize("call", [norm_act, norm_act_twice, norm_act_pool])
def test_a_single_value_raises_in_torchs_words(call) -> None:  # type: ignore[no-untyped-def]
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
        wanted = Wanted((3, 17, 5, 6), torch.float16, residual=True, uses=(0, 1))
        found = ours(wanted, norm_act_twice)
        return [*found.outputs, *found.gradients.values(), found.norm.running_var]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)


def test_frozen_parameters_and_inputs_get_no_gradient() -> None:
    norm = norm_for(3).requires_grad_(False)
    x = as_map(random_map((2, 3, 4, 4), torch.float32)).requires_grad_()
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
def test_what_the_kernels_take(change, fusible: bool) -> None:  # type: ignore[no-untyped-def]
    norm, x = norm_for(3), as_map(torch.zeros(2, 3, 4, 4))
    assert can_fuse(change(norm, x), norm) is fusible


def test_the_gradient_of_a_gradient_is_refused() -> None:
    """Ours are not differentiable; without a word a penalty on gradients would count for nothing."""
    for made in (norm_act, lambda x, norm: norm_act_pool(x, norm)[0]):
        x = random_map((2, 3, 5, 5), FULL).requires_grad_()
        (gradient,) = torch.autograd.grad(made(x, norm_for(3)).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_the_pool_keeps_a_nan_that_a_later_neighbour_follows() -> None:
    """The scale is finite here, unlike where the statistics met the NaN as well."""
    maps = as_map(torch.ones(1, 1, 3, 3))
    maps[0, 0, 0, 0] = torch.nan
    saved = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    y, winner = torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1, dtype=torch.uint8)
    kernels.pool_kernel[(1, 1)](
        maps, y, winner, saved, 1, 3, 3, 1, 1, 1, PAD=0, BLOCK_M=1, BLOCK_C=1
    )
    assert y.isnan().all()
    assert torch.nn.functional.max_pool2d(maps, 3).isnan().all()


@pytest.mark.parametrize(("channels", "extra"), [(3, 1), (1, 0), (1, 1), (3, 0)])
@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_normalisation_is_torchs_own(channels: int, extra: int, dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (3, 7, 5, channels), dtype=torch.uint8)
    scale, shift = torch.rand(1, channels, 1, 1), torch.rand(1, channels, 1, 1) - 0.5
    ours = normalized(images, scale, shift, dtype, extra)
    wanted = images.permute(0, 3, 1, 2).float() * scale + shift
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours[:, :channels].float(), wanted, rtol=2e-3, atol=1e-3)
    assert not ours[:, channels:].any()
    assert ours.shape[1] == channels + extra
