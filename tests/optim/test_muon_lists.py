"""Whose row is whose where lists of tensors are worked on at once, and in which memory format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optim.lars_reference import assert_near, bits_equal, fill_gradients
from optim.muon_reference import DECAY, ETA, Reference
from paceline.optim import Muon
from paceline.optim.state import same_strides

# Shapes recur within groups and across them: these are orthogonalize together.
FILTER, OTHER = (6, 5, 3, 3), (7, 11)
GROUPS = [
    ([OTHER, FILTER, OTHER], {"momentum": 0.9, "weight_decay": DECAY}),
    ([(40,), (5,)], {"orthogonal": False, "adapt": False}),
    ([FILTER, OTHER, FILTER], {"momentum": 0.5, "weight_decay": DECAY, "nesterov": False}),
]
MATRICES = [(0, 0), (1, 0), (2, 0), (5, 2), (6, 2), (7, 2)]  # parameter, group


def create(kind: torch.dtype = torch.float32) -> tuple[Muon, list[nn.Parameter]]:
    draw, groups = torch.Generator().manual_seed(0), []
    for shapes, options in GROUPS:
        drawn = [torch.randn(shape, generator=draw).to(kind) for shape in shapes]
        formats = [torch.channels_last if w.dim() == 4 else torch.contiguous_format for w in drawn]
        ps = [nn.Parameter(w.to(memory_format=f)) for w, f in zip(drawn, formats, strict=True)]
        groups.append({"params": ps, **options})
    optimizer = Muon(groups, 0.9, trust_coefficient=ETA)
    return optimizer, [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_every_matrix_has_its_own_group_momentum_and_gradient(
    kind: torch.dtype, shape: tuple[int, ...] | None
) -> None:
    gone, inactive = {(1, 1)}, {(1, 2), (2, 6)}  # step, parameter
    optimizer, ps = create(kind)
    scale = 1.0 if shape is None else 1024.0
    if shape is not None:
        optimizer.grad_scale = torch.full(shape, scale)
    references = {index: Reference(ps[index]) for index, _ in MATRICES}
    for step in range(4):
        fill_gradients(ps, step, scale)
        optimizer.active = torch.tensor([float((step, i) not in inactive) for i in range(len(ps))])
        for index, group in MATRICES:
            gradient = ps[index].grad
            assert gradient is not None
            if (step, index) in gone:
                ps[index].grad = None
            elif (step, index) not in inactive:
                momentum = float(optimizer.param_groups[group]["momentum"])
                references[index].step(gradient.double() / scale, 0.9, momentum, group == 0)
        optimizer.step()
    for index, _ in MATRICES:
        reference, state = references[index], optimizer.state[ps[index]]
        assert_near(optimizer.masters()[index], reference.weight, 2e-5)
        assert_near(state["momentum_buffer"], reference.momentum, 1e-6)


def test_what_a_step_needs_stays_where_it_is_in_the_parameter_s_format() -> None:
    """A recorded graph knows the addresses."""
    optimizer, ps = create()
    fill_gradients(ps, 0)
    optimizer.step()
    kept = {**optimizer._next}, {**optimizer._directions}
    fill_gradients(ps, 1)
    optimizer.step()
    for before, after in zip(kept, (optimizer._next, optimizer._directions), strict=True):
        assert sorted(after) == [index for index, _ in MATRICES]
        for index, tensor in after.items():
            assert tensor is before[index]
            assert same_strides(tensor, ps[index])


def test_a_step_changes_no_gradient() -> None:
    optimizer, ps = create()
    fill_gradients(ps, 0)
    optimizer.grad_scale = torch.tensor(4.0)
    before = [p.grad.clone() for p in ps if p.grad is not None]
    optimizer.step()
    assert bits_equal([p.grad for p in ps if p.grad is not None], before)


def test_no_gradient_moves_nothing_however_large_the_momentum() -> None:
    """The square of its norm is beyond fp32."""
    optimizer, ps = create()
    fill_gradients(ps, 0)
    optimizer.step()
    for index in (1, 5):
        optimizer.state[ps[index]]["momentum_buffer"].fill_(1e25)
    fill_gradients(ps, 1)
    before = [p.detach().clone() for p in ps]
    for index in (1, 5):
        gradient = ps[index].grad
        assert gradient is not None
        gradient.zero_()
    optimizer.step()
    assert optimizer.overflow == 0
    for index, _ in MATRICES:
        decayed = before[index] * (1 - 0.9 * DECAY)
        assert torch.allclose(ps[index], decayed) == (index in (1, 5))
