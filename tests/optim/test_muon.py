from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from optim.lars_reference import assert_near, bits_equal, everything, fill_gradients
from optim.muon_reference import DECAY, ETA, Reference
from optim.protocol_checks import check_bad_gradient, check_switch
from paceline.core.errors import PacelineError, RunError
from paceline.optim import LARS, Muon, lars_foreach, lars_fused
from paceline.optim.state import Gates

SHAPES = [(6, 5, 3, 3), (7, 11), (12, 3), (40,), (5,)]
MATRICES = 3
KINDS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True, params=["in place", "by select"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the list operations: the CPU's, and the GPU's, which never reads a flag."""
    if request.param == "by select":
        monkeypatch.setattr(lars_foreach, "on_host", lambda device: False)


def create(
    kind: torch.dtype = torch.float32, kinds: tuple[type[LARS], ...] = (Muon,), **options: Any
) -> tuple[LARS, list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    ps = [nn.Parameter(torch.randn(shape, generator=draw).to(kind)) for shape in SHAPES]
    groups = [
        {"params": ps[:MATRICES], "weight_decay": DECAY},
        {"params": ps[MATRICES:], "adapt": False, "lr": 0.2},
    ]
    if kinds == (Muon,):
        groups[1]["orthogonal"] = False
    return kinds[0](groups, 0.9, trust_coefficient=ETA, **options), ps


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.6, True), (0.0, False)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_matrices_follow_the_equation(
    nesterov: bool, momentum: float, kind: torch.dtype, scale: float | None
) -> None:
    optimizer, ps = create(kind, momentum=momentum, nesterov=nesterov)
    references = [Reference(p) for p in ps[:MATRICES]]
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    for step, lr in enumerate((0.9, 0.1, 0.4, 0.4)):
        optimizer.param_groups[0]["lr"] = lr
        fill_gradients(ps, step, scale or 1.0)
        optimizer.step()
        for p, reference in zip(ps, references, strict=False):
            assert p.grad is not None
            reference.step(p.grad.double() / (scale or 1.0), lr, momentum, nesterov)
    assert optimizer.overflow == 0
    for p, master, reference in zip(ps, optimizer.masters(), references, strict=False):
        assert_near(master, reference.weight, 2e-5)
        assert_near(optimizer.state[p]["momentum_buffer"], reference.momentum, 1e-6)
        assert torch.equal(p, master.to(p.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_are_updated_as_by_lars_to_the_bit(kind: torch.dtype) -> None:
    muon, ps = create(kind)
    lars, qs = create(kind, kinds=(LARS,), nesterov=True)
    for step in range(3):
        for optimizer, own in ((muon, ps), (lars, qs)):
            fill_gradients(own, step)
            optimizer.step()
    for p, q in zip(ps[MATRICES:], qs[MATRICES:], strict=True):
        assert bits_equal([p.detach()], [q.detach()])
        assert bits_equal([muon.state[p]["momentum_buffer"]], [lars.state[q]["momentum_buffer"]])
    assert not torch.equal(ps[0], qs[0])


def stepped() -> tuple[list[nn.Parameter], LARS]:
    """An optimizer in the midst of a run."""
    optimizer, ps = create(torch.float16)
    fill_gradients(ps, 0)
    optimizer.step()
    fill_gradients(ps, 1)
    return ps, optimizer


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_one_bad_gradient_changes_no_bit_and_is_named(which: int, poison: float) -> None:
    ps, optimizer = stepped()
    check_bad_gradient(ps, optimizer, which, poison)


@pytest.mark.parametrize("switch", ["hold", "found_inf"])
def test_hold_and_found_inf_change_no_bit(switch: str) -> None:
    _, optimizer = stepped()
    check_switch(optimizer, switch)


def test_an_inactive_matrix_is_untouched_and_unchecked() -> None:
    ps, optimizer = stepped()
    _, other = stepped()
    optimizer.active = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    assert ps[1].grad is not None
    ps[1].grad[0] = float("nan")
    before, held = everything(optimizer), len(optimizer.state[ps[0]]) + 1
    optimizer.step()
    other.step()
    after, expected = everything(optimizer), everything(other)
    assert optimizer.overflow == 0
    assert bits_equal(after[held : 2 * held], before[held : 2 * held])
    assert bits_equal(after[:held] + after[2 * held :], expected[:held] + expected[2 * held :])


def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    ps, optimizer = stepped()
    before = [t.clone() for t in (ps[1].detach(), *optimizer.state[ps[1]].values())]
    ps[1].grad = None
    optimizer.step()
    assert bits_equal([ps[1].detach(), *optimizer.state[ps[1]].values()], before)


def test_a_gradient_of_zeros_and_a_weight_of_zeros_are_safe() -> None:
    ps, optimizer = stepped()
    with torch.no_grad():
        ps[0].zero_()
        optimizer.masters()[0].zero_()
    for p in ps:
        assert p.grad is not None
        p.grad.zero_()
    for _ in range(2):
        optimizer.step()
    assert all(torch.isfinite(tensor).all() for tensor in everything(optimizer))


def test_a_gradient_that_stays_0_leaves_only_the_decay_as_in_lars() -> None:
    """What is left of the momentum would be made as long as a real step, for hundreds of steps."""
    optimizer, ps = create(momentum=0.9)
    fill_gradients(ps, 0)
    optimizer.step()
    before = ps[0].detach().clone()
    assert ps[0].grad is not None
    ps[0].grad.zero_()
    for step in range(1, 601):
        optimizer.step()
        assert optimizer.overflow == 0  # also where the momentum has become tiny
        assert optimizer.trust_ratios()[0] == 1.0
        if step < 5:
            torch.testing.assert_close(ps[0].detach(), before * (1 - 0.9 * DECAY) ** step)
    momentum = optimizer.state[ps[0]]["momentum_buffer"]
    assert momentum.abs().max() < 1e-20


def test_momentum_may_change_between_steps() -> None:
    """A recorded graph reads it on the device, so it must not be frozen anywhere."""
    optimizer, ps = create(momentum=0.5)
    reference = Reference(ps[0])
    for step, momentum in enumerate((0.5, 0.9, 0.2)):
        optimizer.param_groups[0]["momentum"] = momentum
        fill_gradients(ps, step)
        optimizer.step()
        assert ps[0].grad is not None
        reference.step(ps[0].grad, 0.9, momentum, True)
    assert_near(ps[0], reference.weight, 2e-5)


def test_a_checkpoint_goes_on_to_the_bit() -> None:
    ps, optimizer = stepped()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed, qs = create(torch.float16)
    with torch.no_grad():
        for p, q in zip(ps, qs, strict=True):
            q.copy_(p)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    for step in range(2, 5):
        for own, one in ((ps, optimizer), (qs, resumed)):
            fill_gradients(own, step)
            one.step()
    assert bits_equal(everything(resumed), everything(optimizer))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_goes_on_by_itself(how: Any) -> None:
    _, optimizer = stepped()
    copied = how(optimizer)
    qs = [p for group in copied.param_groups for p in group["params"]]
    before = everything(optimizer)
    fill_gradients(qs, 1)
    copied.step()
    assert bits_equal(everything(optimizer), before)
    optimizer.step()
    assert bits_equal(everything(copied), everything(optimizer))


def test_a_group_may_join_after_a_step() -> None:
    """With a momentum of its own, which must not be another group's."""
    optimizer, ps = create(momentum=0.5)
    fill_gradients(ps, 0)
    optimizer.step()
    late = nn.Parameter(torch.randn(9, 4, generator=torch.Generator().manual_seed(5)))
    optimizer.add_param_group({"params": [late], "momentum": 0.8, "weight_decay": DECAY})
    reference = Reference(late)
    for step in range(1, 4):
        fill_gradients([*ps, late], step)
        optimizer.step()
        assert late.grad is not None
        reference.step(late.grad, 0.9, 0.8, True)
    assert_near(late, reference.weight, 2e-5)


def test_a_step_gone_wrong_is_forgotten_with_a_checkpoint() -> None:
    ps, optimizer = stepped()
    twins, twin = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    kept = [p.detach().clone() for p in ps]
    for group in optimizer.param_groups:
        group["lr"] = float("inf")
    optimizer.step()
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, weights in zip(ps, kept, strict=True):
            p.copy_(weights)
    fill_gradients(ps, 1)
    fill_gradients(twins, 1)
    optimizer.step()
    twin.step()
    assert bits_equal(everything(optimizer), everything(twin))


def test_groups_of_another_optimizer_stay_what_they_are_here() -> None:
    lars, qs = create(kinds=(LARS,))
    fill_gradients(qs, 0)
    lars.step()
    optimizer, ps = create()
    optimizer.load_state_dict(lars.state_dict())
    assert [group["orthogonal"] for group in optimizer.param_groups] == [True, False]
    fill_gradients(ps, 1)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][1]["orthogonal"] = True
    with pytest.raises(PacelineError, match="put it into a group with orthogonal=False"):
        optimizer.load_state_dict(saved)


def test_a_capture_without_preparation_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, ps = create()
    fill_gradients(ps, 0)
    monkeypatch.setattr("paceline.optim.lars.capturing", lambda device: True)
    with pytest.raises(RunError, match="would freeze the learning rate"):
        optimizer.step()
    optimizer._engine = lars_fused.FusedStep()
    with pytest.raises(RunError, match="call prepare"):
        optimizer.step()


def test_a_recording_keeps_the_table_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, ps = create()
    fill_gradients(ps, 0)
    optimizer.step()
    assert isinstance(optimizer, Muon)
    monkeypatch.setattr("paceline.optim.muon.capturing", lambda device: True)
    optimizer._transform(optimizer._rows(), Gates())
    recorded = weakref.ref(optimizer._own)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    optimizer.upload()
    gc.collect()
    assert recorded() is not None
    assert recorded() is not optimizer._own


def test_a_state_dict_of_torchs_muon_is_loaded() -> None:
    """It has no word of who is orthogonal."""
    draw = torch.Generator().manual_seed(0)
    theirs = nn.Parameter(torch.randn(6, 4, generator=draw))
    other = torch.optim.Muon([theirs], lr=0.1, momentum=0.9)
    theirs.grad = torch.randn(6, 4, generator=draw)
    other.step()
    ours = nn.Parameter(theirs.detach().clone())
    optimizer = Muon([ours], 0.1)
    optimizer.load_state_dict(other.state_dict())
    assert torch.equal(
        optimizer.state[ours]["momentum_buffer"], other.state[theirs]["momentum_buffer"]
    )
    assert optimizer.param_groups[0]["orthogonal"] is True
    ours.grad = theirs.grad
    optimizer.step()


@pytest.mark.parametrize("shape", [(8,), (1, 8), (8, 1), ()])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(2, 3))], 0.1)
    odd = nn.Parameter(torch.ones(shape))
    with pytest.raises(PacelineError, match="put it into a group with orthogonal=False"):
        optimizer.add_param_group({"params": [odd]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [odd], "orthogonal": False})
    odd.grad = torch.ones(shape)
    optimizer.step()


def test_a_gradient_of_other_strides_and_a_sparse_one() -> None:
    optimizer, ps = create()
    twin, qs = create()
    for own in (ps, qs):
        fill_gradients(own, 0)
    assert ps[0].grad is not None
    ps[0].grad = ps[0].grad.contiguous(memory_format=torch.channels_last)
    optimizer.step()
    twin.step()
    assert bits_equal(everything(optimizer), everything(twin))
    ps[1].grad = ps[1].grad.to_sparse() if ps[1].grad is not None else None
    with pytest.raises(PacelineError, match="sparse gradient"):
        optimizer.step()


def test_few_steps_take_an_ill_conditioned_layer_further_than_lars() -> None:
    """What it is for: inputs whose directions differ a hundredfold, and thirty steps."""

    def distance_after(kind: type[LARS], eta: float) -> float:
        draw = torch.Generator().manual_seed(3)
        inputs = torch.randn(256, 16, generator=draw) * torch.logspace(0, -2, 16)
        target = torch.randn(16, 8, generator=draw) / 4
        weight = nn.Parameter(torch.randn(16, 8, generator=draw) / 4)
        optimizer = kind([weight], 1.0, 0.9, trust_coefficient=eta, nesterov=True)
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 1 - step / 30
            optimizer.zero_grad()
            loss = (inputs @ (weight - target)).square().mean()
            loss.backward()
            optimizer.step()
        # Of the weights, not of the loss, to which weak directions hardly count.
        return float((weight.detach() - target).square().mean())

    etas = (0.003, 0.01, 0.03, 0.1, 0.3)
    muon = min(distance_after(Muon, eta) for eta in etas)
    lars = min(distance_after(LARS, eta) for eta in etas)
    assert muon < 0.7 * lars, (muon, lars)
