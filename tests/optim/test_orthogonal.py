from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.optim.muon import is_matrix, orthogonalize
from paceline.optim.state import same_strides

SHAPES = [(16, 8, 3, 3), (64, 16, 1, 1), (10, 48), (48, 10), (7, 7), (6, 4, 5), (2, 2)]


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_about_equal_and_the_norm_stays(shape: tuple[int, ...]) -> None:
    tensor = drawn(shape)
    (found,) = orthogonalize([tensor])
    assert found.shape == tensor.shape
    torch.testing.assert_close(found.norm(), tensor.norm())
    values = torch.linalg.svdvals(found.flatten(1).double())
    assert values.max() / values.min() < 1.2 / 0.6, values


def test_bases_stay_and_only_the_values_change() -> None:
    """U·S·Vᵀ becomes U·p(S)·Vᵀ, whose p is the iteration on numbers."""
    tensor = drawn((6, 9))
    u, s, v = torch.linalg.svd(tensor.double(), full_matrices=False)
    values = s / s.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = (u * values) @ v
    expected *= s.norm() / expected.norm()
    (found,) = orthogonalize([tensor])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_many_at_once_are_as_one_at_a_time() -> None:
    tensors = [drawn(shape, seed) for seed, shape in enumerate([*SHAPES, *SHAPES])]
    for together, tensor in zip(orthogonalize(tensors), tensors, strict=True):
        torch.testing.assert_close(together, orthogonalize([tensor])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (16, 8, 1, 1), (16, 1, 3, 3)])
def test_the_memory_format_changes_strides_only(shape: tuple[int, ...]) -> None:
    plain = drawn(shape)
    last = plain.contiguous(memory_format=torch.channels_last)
    (found,) = orthogonalize([last])
    (expected,) = orthogonalize([plain])
    assert same_strides(found, last)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_half_gradient_far_below_1_is_no_matter() -> None:
    tensor = drawn((12, 20)).mul(1e-3)
    (small,) = orthogonalize([tensor.half()])
    assert small.dtype == torch.float32
    torch.testing.assert_close(small, orthogonalize([tensor.half().float()])[0])


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-18, 1e-22, 1e-24, 1e-27, 1e-30, 1e-38])
def test_tiny_gradients_stay_tiny_and_finite(size: float) -> None:
    """Their squares leave fp32's range, so that the norm is too small, or 0."""
    tensor = drawn((16, 48)) * size
    first = torch.outer(drawn((16,)), drawn((48,), 1)) * size  # of rank 1: one large singular value
    for made, wanted in zip(orthogonalize([tensor, first]), (tensor, first), strict=True):
        assert torch.isfinite(made).all()
        assert made.norm() <= 1.01 * wanted.double().norm()
    if size >= 1e-12:
        (found,) = orthogonalize([tensor])
        (expected,) = orthogonalize([tensor / size])
        torch.testing.assert_close(found / size, expected, rtol=1e-3, atol=1e-3)


def test_nothing_stays_nothing_and_what_is_not_finite_shows() -> None:
    bad = [drawn((4, 6)) for _ in range(3)]
    for tensor, value in zip(bad, (float("nan"), float("inf"), 3e38), strict=True):
        tensor[:, 2] = value  # the last is finite, but not its square
    zero, *found, good = orthogonalize([torch.zeros(4, 6), *bad, drawn((4, 6))])
    assert torch.equal(zero, torch.zeros(4, 6))
    for tensor in found:
        assert not torch.isfinite(tensor).all()
    assert torch.isfinite(good).all()  # though it shares their batch


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("value", [0.5, float("nan"), 3e38])
def test_a_flag_makes_zeros_of_its_tensor_and_of_no_other(which: int, value: float) -> None:
    shapes = [(4, 6), (6, 4), (4, 6), (3, 3, 2, 2), (6, 4), (4, 6)]
    tensors = [drawn(shape, seed) for seed, shape in enumerate(shapes)]
    expected = orthogonalize(tensors)
    expected[which] = torch.zeros(shapes[which])
    tensors[which].fill_(value)
    flags = [torch.tensor(place == which) for place in range(len(shapes))]
    for found, wanted in zip(orthogonalize(tensors, flags), expected, strict=True):
        assert torch.equal(found, wanted)


def test_flags_are_as_many_as_tensors() -> None:
    with pytest.raises(ValueError, match="2 flags for 1 tensors"):
        orthogonalize([drawn((4, 6))], [torch.tensor(False)] * 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3,), False), ((), False), ((1, 8), False), ((8, 1), False), ((8, 1, 1, 1), False),
     ((2, 2), True), ((8, 1, 3, 3), True)],
)  # fmt: skip
def test_what_counts_as_a_matrix(shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(torch.zeros(shape)) == expected
