"""Recomputed outputs of fused bottlenecks, in Triton's interpreter; `test_fused.py` runs this file."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpreted  # noqa: F401  (before any kernel)
from accel.cudnn_cases import form  # noqa: F401  (a fixture)
from accel.forms import Chain, store_outputs, use_forms
from accel.live_bytes import LiveBytes
from accel.norm_reference import channels_last, norm_for, random_map
from accel.product_cases import (
    SMALL,
    assert_same,
    away,
    initialized,
    prefer,
    run,
    small_tiles,  # noqa: F401  (a fixture)
)
from paceline.accel import operands
from paceline.accel.fused import statistics
from paceline.accel.fused_blocks import DeferredOutput
from paceline.accel.fused_convolutions import forward_convolution
from paceline.accel.implementation_choice import CUDNN, SEPARATE, Choices
from paceline.accel.operands import Operand
from paceline.accel.recompute import RecomputedActivation
from paceline.models.resnet import BasicBlock, Bottleneck

FULL, HALF = torch.float32, torch.float16
# Of `Chain`, by the block that computes them.
LEFT_OUT = [False, True, False, True, False]


def chain() -> nn.Module:
    """Outputs of the blocks 1 and 3 can be left out. That of block 3 has three readers: the convolutions
    of the branch and of the shortcut of block 4, and the ReLU before them."""
    return Chain(
        Bottleneck(12, 6, 2), *(Bottleneck(24, 6) for _ in range(3)), Bottleneck(24, 8, 2),
        Bottleneck(32, 8),
    )  # fmt: skip


def identities() -> nn.Module:
    """The first block has the input of the net as its shortcut. The second output is stored, as the first
    is not, and read by a block that is not fused, whose output is left out by the other rule."""
    return Chain(
        Bottleneck(24, 6),
        Bottleneck(24, 6),
        BasicBlock(24, 24),
        Bottleneck(24, 6),
        Bottleneck(24, 6),
    )


def stem() -> nn.Module:
    """The first block takes a map that is not stored."""
    first = nn.Conv2d(24, 24, 1, bias=False), nn.BatchNorm2d(24)
    return Chain(*(Bottleneck(24, 6) for _ in range(3)), stem=first)


def made(
    make: Callable[[], nn.Module], recompute: bool = True, kind: torch.dtype = FULL, *,
    choices: Choices | None = None,
) -> Any:  # fmt: skip
    torch.manual_seed(0)
    net = initialized(make(), kind)
    use_forms(net, fused=True, recompute=recompute, choices=choices or Choices("auto"))
    return net


def images(kind: torch.dtype = FULL, channels: int = 24) -> Tensor:
    return channels_last(random_map((2, channels, 7, 5), kind, 0.3, 1))


def inputs_of(make: Callable[[], nn.Module], kind: torch.dtype = FULL) -> Tensor:
    return images(kind, 12 if make is chain else 24)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function after whose call blocks store all of their outputs."""
    return lambda: store_outputs(monkeypatch)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("how", "tile", "kind"),
    [(SEPARATE, 0, FULL), (SEPARATE, 0, HALF), ("fused", 0, HALF), ("fused", 2, FULL), ("both", 2, HALF)],
    ids=str,
)  # fmt: skip
def test_bits_are_those_of_stored_outputs(
    how: str, tile: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch,
    stored: Callable[[], None],
) -> None:  # fmt: skip
    prefer(how, tile, monkeypatch)
    again = run(made(chain, kind=kind), inputs_of(chain, kind))
    neither = run(made(chain, False, kind), inputs_of(chain, kind))
    stored()
    assert_same(run(made(chain, kind=kind), inputs_of(chain, kind)), again)
    assert_same(neither, again)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("make", [identities, stem])
def test_other_blocks_around_them(
    make: Callable[[], nn.Module], stored: Callable[[], None]
) -> None:
    again = run(made(make), inputs_of(make))
    assert_same(run(made(make, False), inputs_of(make)), again)
    stored()
    assert_same(run(made(make), inputs_of(make)), again)


def test_every_second_block_of_a_stage_leaves_its_output_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks with a stored shortcut do; the last output is computed because no fused block follows."""
    found: list[bool] = []
    reduced = DeferredOutput.reduced

    def noted(pending: DeferredOutput, *given: Any) -> Any:
        result = reduced(pending, *given)
        found.append(isinstance(result[1], RecomputedActivation))
        return result

    monkeypatch.setattr(DeferredOutput, "reduced", noted)

    def of(net: nn.Module, x: Tensor) -> list[bool]:
        found.clear()
        net(x)
        return list(found)

    assert of(made(chain), inputs_of(chain)) == LEFT_OUT
    assert of(made(chain, False), inputs_of(chain)) == [False] * 5
    assert of(made(identities), images()) == [True, False]
    assert of(made(stem), images()) == [False, True]
    with torch.no_grad():
        assert of(made(chain), inputs_of(chain)) == [False] * 5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mode", ["auto", CUDNN])
def test_each_is_computed_once_and_freed_after_its_last_reader(
    mode: str, monkeypatch: pytest.MonkeyPatch, stored: Callable[[], None]
) -> None:
    """cuDNN's implementations also read shortcuts in the backward pass."""
    prefer("fused", 0, monkeypatch)
    made_again: list[weakref.ref[Tensor]] = []
    apply = operands.apply

    def noted(x: Tensor, saved: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
        y = apply(x, saved, residual, relu)
        if residual is not None:
            assert all(earlier() is None for earlier in made_again)
            made_again.append(weakref.ref(y))
        return y

    monkeypatch.setattr(operands, "apply", noted)

    def measured() -> tuple[int, int, int]:
        """Bytes behind forward, the most of backward, and outputs of blocks that it computes."""
        net = made(chain, choices=Choices(mode))
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as live:
            y = net(inputs_of(chain))
            gradient = torch.ones_like(y)
            kept, live.most = live.now, live.now
            made_again.clear()
            y.backward(gradient)
        assert all(each() is None for each in made_again)
        return kept, live.most, len(made_again)

    kept, most, computed = measured()
    stored()
    kept_before, most_before, none = measured()
    assert (computed, none) == (sum(LEFT_OUT), 0)
    # Two maps of 24 channels of 2 · 4 · 3 pixels.
    assert kept_before - kept == 2 * 24 * 24 * 4
    assert most < most_before


@pytest.mark.usefixtures("small_tiles")
def test_frozen_weights(stored: Callable[[], None]) -> None:
    """Includes weights of the readers of a recomputed output."""

    def gradients() -> dict[str, Tensor]:
        net = made(chain)
        frozen = [net.blocks[n].conv1 for n in (2, 4)] + [net.blocks[4].downsample[0]]
        for convolution in frozen:
            convolution.weight.requires_grad_(False)
        net(inputs_of(chain)).square().sum().backward()
        assert all(convolution.weight.grad is None for convolution in frozen)
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    again = gradients()
    stored()
    assert_same(gradients(), again)


@pytest.mark.usefixtures("small_tiles")
def test_a_convolution_of_the_shortcut_that_is_not_fused(stored: Callable[[], None]) -> None:
    """Its norm's output is stored by no one else, and the block's is."""

    def net() -> Any:
        made_net = made(chain)
        made_net.blocks[4].downsample[1].eval()
        return made_net

    again = run(net(), inputs_of(chain))
    stored()
    assert_same(run(net(), inputs_of(chain)), again)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", [FULL, HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("projected", [False, True], ids=["joined", "projected"])
def test_every_form_keeps_the_bits_of_the_stored_operand(
    kind: torch.dtype, projected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, residual = (channels_last(random_map((2, 24, 5, 4), kind, 0.3, seed)) for seed in (0, 1))
    saved = statistics(x, norm_for(24))
    other = statistics(residual, norm_for(24)) if projected else None
    operand = Operand.joined(x, saved, residual, other)
    wanted, weight = operand.stored(), torch.randn(6, 24, 1, 1).to(kind)
    assert 0 < int((wanted == 0).sum()) < wanted.numel()
    for how, tile in ((SEPARATE, 0), *(("fused", n) for n in range(len(SMALL)))):
        prefer(how, tile, monkeypatch)
        _, _, y = forward_convolution(Choices("auto"), operand, weight, norm_for(6), keep=True)
        assert torch.equal(y, wanted), (how, tile)


def test_forms_of_cudnn_agree_within_rounding(
    form: str,  # noqa: F811  (the fixture)
    stored: Callable[[], None],
) -> None:
    """Implementations that compute the output read the norm's scale in fp16."""
    of_cudnn = Choices(CUDNN, open=True)
    again = run(made(chain, choices=of_cudnn), inputs_of(chain))
    stored()
    once = run(made(chain, choices=of_cudnn), inputs_of(chain))
    for name, value in once.items():
        assert away(again[name], value) < (1e-6 if form == "cudnn statistics" else 1e-2), name
