"""Muon: orthogonalization, the equation, groups and lists, device switches, checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.reference import (
    DECAY,
    ETA,
    KINDS,
    MuonReference,
    assert_near,
    bits_equal,
    check_bad_gradient,
    check_switches,
    everything,
    fill_gradients,
    grad_of,
    orthogonal_reference,
    run,
)
from paceline.core.errors import PacelineError, RunError
from paceline.optim import LARS, Muon, fused, is_matrix, orthogonalize

SHAPES = [(16, 8, 3, 3), (64, 16, 1, 1), (10, 48), (48, 10), (7, 7), (6, 4, 5), (2, 2)]


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_about_equal_and_the_norm_stays(shape: tuple[int, ...]) -> None:
    tensor = drawn(shape)
    (found,) = orthogonalize([tensor])
    torch.testing.assert_close(found.norm(), tensor.norm())
    values = torch.linalg.svdvals(found.flatten(1).double())
    assert values.max() / values.min() < 1.2 / 0.6, values
    expected = orthogonal_reference(tensor)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_formats_and_batches_do_not_matter() -> None:
    tensors = [drawn(shape, seed) for seed, shape in enumerate([*SHAPES, *SHAPES])]
    for together, tensor in zip(orthogonalize(tensors), tensors, strict=True):
        torch.testing.assert_close(together, orthogonalize([tensor])[0], rtol=1e-4, atol=1e-5)
    for shape in ((16, 8, 3, 3), (16, 8, 1, 1), (16, 1, 3, 3)):
        plain = drawn(shape)
        nhwc = plain.contiguous(memory_format=torch.channels_last)
        (found,), (expected,) = orthogonalize([nhwc]), orthogonalize([plain])
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    half = drawn((12, 20)).mul(1e-3).half()
    (small,) = orthogonalize([half])
    assert small.dtype == torch.float32
    torch.testing.assert_close(small, orthogonalize([half.float()])[0])


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-18, 1e-22, 1e-24, 1e-27, 1e-30, 1e-38])
def test_tiny_gradients_stay_tiny_and_finite(size: float) -> None:
    """Their squares underflow in fp32, so that the norm is too small, or 0."""
    tensor = drawn((16, 48)) * size
    rank_1 = torch.outer(drawn((16,)), drawn((48,), 1)) * size
    for made, wanted in zip(orthogonalize([tensor, rank_1]), (tensor, rank_1), strict=True):
        assert torch.isfinite(made).all()
        assert made.norm() <= 1.01 * wanted.double().norm()
    if size >= 1e-12:
        (found,), (expected,) = orthogonalize([tensor]), orthogonalize([tensor / size])
        torch.testing.assert_close(found / size, expected, rtol=1e-3, atol=1e-3)


def test_zeros_non_finite_values_and_flags() -> None:
    bad = [drawn((4, 6)) for _ in range(3)]
    for tensor, value in zip(bad, (float("nan"), float("inf"), 3e38), strict=True):
        tensor[:, 2] = value  # the square of the last overflows
    zero, *found, good = orthogonalize([torch.zeros(4, 6), *bad, drawn((4, 6))])
    assert torch.equal(zero, torch.zeros(4, 6))
    assert not any(torch.isfinite(tensor).all() for tensor in found)
    assert torch.isfinite(good).all(), "though it shares their batch"
    shapes = [(4, 6), (6, 4), (4, 6), (3, 3, 2, 2), (6, 4), (4, 6)]
    for which, value in ((0, 0.5), (2, float("nan")), (3, 3e38), (5, float("nan"))):
        tensors = [drawn(shape, seed) for seed, shape in enumerate(shapes)]
        expected = orthogonalize(tensors)
        expected[which] = torch.zeros(shapes[which])
        tensors[which].fill_(value)
        flags = [torch.tensor(place == which) for place in range(len(shapes))]
        for made, wanted in zip(orthogonalize(tensors, flags), expected, strict=True):
            assert torch.equal(made, wanted)
    with pytest.raises(ValueError, match="2 flags for 1 tensors"):
        orthogonalize([drawn((4, 6))], [torch.tensor(False)] * 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3,), False), ((), False), ((1, 8), False), ((8, 1), False), ((8, 1, 1, 1), False),
     ((2, 2), True), ((8, 1, 3, 3), True)],
)  # fmt: skip
def test_only_matrices_can_be_orthogonal(shape: tuple[int, ...], expected: bool) -> None:
    odd = nn.Parameter(torch.ones(shape))
    assert is_matrix(odd) == expected
    optimizer = Muon([nn.Parameter(torch.ones(2, 3))], 0.1)
    if not expected:
        with pytest.raises(PacelineError, match="orthogonal=False"):
            optimizer.add_param_group({"params": [odd], "orthogonal": True})
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [odd]})
    assert optimizer.parts()[1]["orthogonal"] == expected
    odd.grad = torch.ones(shape)
    optimizer.step()


# --- the step ----------------------------------------------------------------------------------

# Shapes recur within groups and across them: these are orthogonalized together.
FILTER, OTHER = (6, 5, 3, 3), (7, 11)
GROUPS: list[tuple[list[tuple[int, ...]], dict[str, Any]]] = [
    ([OTHER, FILTER, OTHER], {"momentum": 0.9, "weight_decay": DECAY}),
    ([(40,), (5,)], {"orthogonal": False, "adapt": False, "lr": 0.2}),
    ([FILTER, OTHER, FILTER], {"momentum": 0.5, "weight_decay": DECAY, "nesterov": False}),
]
MATRICES = [(0, 0), (1, 0), (2, 0), (5, 2), (6, 2), (7, 2)]  # parameter, group
OTHERS = (3, 4)


def create(
    kind: torch.dtype = torch.float32, of: type[LARS] = Muon
) -> tuple[LARS, list[nn.Parameter]]:
    draw, groups = torch.Generator().manual_seed(0), []
    for shapes, options in GROUPS:
        weights = [torch.randn(shape, generator=draw).to(kind) for shape in shapes]
        nhwc = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
        own = options if of is Muon else {k: v for k, v in options.items() if k != "orthogonal"}
        groups.append({"params": [nn.Parameter(w) for w in nhwc], **own})
    optimizer = of(groups, 0.9, trust_coefficient=ETA, nesterov=True)
    return optimizer, [p for group in optimizer.param_groups for p in group["params"]]


def stepped() -> tuple[list[nn.Parameter], LARS]:
    """An optimizer during a run."""
    optimizer, ps = create(torch.float16)
    run(optimizer, ps, [0])
    fill_gradients(ps, 1)
    return ps, optimizer


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("scale_shape", [None, (), (1,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_follows_the_equation_with_its_own_group(
    kind: torch.dtype, scale_shape: tuple[int, ...] | None
) -> None:
    gone, inactive = {(1, 1)}, {(1, 2), (2, 6)}  # step, parameter
    optimizer, ps = create(kind)
    scale = 1.0 if scale_shape is None else 1024.0
    if scale_shape is not None:
        optimizer.grad_scale = torch.full(scale_shape, scale)
    references = {index: MuonReference(ps[index]) for index, _ in MATRICES}
    for step, (lr, momentum) in enumerate(((0.9, 0.9), (0.1, 0.9), (0.4, 0.6), (0.4, 0.2))):
        optimizer.param_groups[0] |= {"lr": lr, "momentum": momentum}
        fill_gradients(ps, step, scale)
        optimizer.active = torch.tensor([float((step, i) not in inactive) for i in range(len(ps))])
        for index, number in MATRICES:
            gradient, group = grad_of(ps[index]), optimizer.param_groups[number]
            if (step, index) in gone:
                ps[index].grad = None
            elif (step, index) not in inactive:
                own = gradient.double() / scale
                references[index].step(own, group["lr"], group["momentum"], group["nesterov"])
        before = [p.grad.clone() for p in ps if p.grad is not None]
        optimizer.step()
        assert bits_equal([p.grad for p in ps if p.grad is not None], before)
    assert optimizer.overflow == 0
    for index, reference in references.items():
        master = optimizer.masters()[index]
        assert_near(master, reference.weight, 2e-5)
        assert_near(optimizer.state[ps[index]]["momentum_buffer"], reference.momentum, 1e-6)
        assert torch.equal(ps[index], master.to(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_are_updated_as_by_lars_to_the_bit(kind: torch.dtype) -> None:
    (muon, ps), (lars, qs) = create(kind), create(kind, LARS)
    run(muon, ps, range(3))
    run(lars, qs, range(3))
    for index in OTHERS:
        for ours, theirs in ((ps[index], qs[index]),):
            assert bits_equal([ours.detach()], [theirs.detach()])
            states = [muon.state[ours]["momentum_buffer"]], [lars.state[theirs]["momentum_buffer"]]
            assert bits_equal(*states)
    assert not torch.equal(ps[0], qs[0])


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 3, 7])
def test_one_bad_gradient_changes_no_bit_and_is_named(which: int, poison: float) -> None:
    check_bad_gradient(*stepped(), which, poison)


@pytest.mark.usefixtures("both_ways")
def test_bad_and_zero_gradients_make_no_fixed_step() -> None:
    optimizer, ps = fixed(torch.float16)
    run(optimizer, ps, [0])
    fill_gradients(ps, 1)
    check_bad_gradient(ps, optimizer, 1, float("nan"))
    before = [p.detach().clone() for p in ps]
    for p in ps:
        grad_of(p).zero_()
    optimizer.step()
    assert bits_equal([p.detach() for p in ps], before)


@pytest.mark.usefixtures("both_ways")
def test_switches_and_gradients_of_other_strides() -> None:
    check_switches(stepped()[1])
    (ps, optimizer), (_, other) = stepped(), stepped()
    optimizer.active = torch.tensor([1.0, 0.0] + [1.0] * 6)
    grad_of(ps[1]).view(-1)[0] = float("nan")  # inactive: not checked
    ps[5].grad = grad_of(ps[5]).contiguous(memory_format=torch.channels_last)
    before, held = everything(optimizer), len(optimizer.state[ps[0]]) + 1
    optimizer.step()
    other.step()
    after, expected = everything(optimizer), everything(other)
    assert optimizer.overflow == 0
    assert bits_equal(after[held : 2 * held], before[held : 2 * held])
    assert bits_equal(after[:held] + after[2 * held :], expected[:held] + expected[2 * held :])
    ps[0].grad = grad_of(ps[0]).to_sparse()
    with pytest.raises(PacelineError, match="sparse gradient"):
        optimizer.step()


def test_zero_gradients_leave_only_the_decay() -> None:
    """The rest of the momentum would be scaled to a full step, for hundreds of steps."""
    optimizer, ps = create()
    run(optimizer, ps, [0])
    optimizer.state[ps[1]]["momentum_buffer"].fill_(1e25)  # its squared norm overflows
    with torch.no_grad():
        ps[2].zero_()
    before = [p.detach().clone() for p in ps]
    for p in ps:
        grad_of(p).zero_()
    for step in range(1, 601):
        optimizer.step()
        assert optimizer.overflow == 0  # also when the momentum has become tiny
        assert optimizer.trust_ratios()[0] == 1.0
        if step < 5:
            for index in (0, 1, 2):
                decayed = before[index] * (1 - 0.9 * DECAY) ** step
                torch.testing.assert_close(ps[index].detach(), decayed)
    assert optimizer.state[ps[0]]["momentum_buffer"].abs().max() < 1e-20
    assert all(torch.isfinite(tensor).all() for tensor in everything(optimizer))


# --- steps of fixed length -----------------------------------------------------------------------


def fixed(kind: torch.dtype = torch.float32) -> tuple[Muon, list[nn.Parameter]]:
    """Long steps, in one group of fixed length and in one relative to the weights."""
    draw = torch.Generator().manual_seed(5)
    shapes = [FILTER, OTHER, (12, 8), OTHER]
    drawn = [torch.randn(shape, generator=draw) for shape in shapes]
    drawn[2] *= 1e-3  # below torch's default
    ps = [nn.Parameter(w.to(kind)) for w in drawn]
    groups = [
        {"params": ps[:3], "orthogonal": True, "fixed_steps": True},
        {"params": ps[3:], "orthogonal": True},
    ]
    return Muon(groups, 0.9, trust_coefficient=0.3), ps


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_steps_keep_their_length_while_weights_grow(kind: torch.dtype) -> None:
    optimizer, ps = fixed(kind)
    optimizer.grad_scale = torch.tensor(64.0)
    masters = [master.detach() for master in optimizer.masters()]
    begun = [float(m.norm()) for m in masters]
    references = [begun[0], begun[1], 2.0, None]  # √(12 / 3)
    for step in range(30):
        before = [m.clone() for m in masters]
        fill_gradients(ps, step, 64.0)
        optimizer.step()
        for master, then, reference in zip(masters, before, references, strict=True):
            length = 0.9 * 0.3 * (float(then.norm()) if reference is None else reference)
            assert float((master - then).norm()) == pytest.approx(length, rel=1e-3)
    assert float(masters[3].norm()) > 3 * float(masters[1].norm()), "relative steps: exponential"
    for p, master in zip(ps, masters, strict=True):
        assert torch.equal(p.detach(), master.to(kind))
    assert "steps of fixed length" in optimizer.describe()
    assert "fixed" not in create()[0].describe()


def test_decay_is_no_step_of_its_own_where_steps_are_fixed() -> None:
    """With a trust ratio, a small gradient would make the decay a full step."""
    norms = {}
    for name in ("fixed", "relative"):
        weight = nn.Parameter(torch.eye(6))
        group = {"params": [weight], "orthogonal": True, "fixed_steps": name == "fixed"}
        optimizer = Muon([group], 0.1, trust_coefficient=0.5, weight_decay=0.01)
        for step in range(20):
            weight.grad = 1e-9 * torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        norms[name] = float(weight.detach().norm())
    assert norms["relative"] < 0.5 * 6**0.5 < norms["fixed"]


@pytest.mark.parametrize("size", [1e-18, 1e-21, 1e-22, 5.6e-23, 1e-25, 1e-38])
def test_vanishing_gradients_do_not_make_fixed_steps_longer(size: float) -> None:
    """Their squares underflow, and a norm of 0 would make the factor huge."""
    draw = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(64, 72, generator=draw))
    group = {"params": [weight], "orthogonal": True, "fixed_steps": True}
    optimizer = Muon([group], 0.1, trust_coefficient=0.5)
    before, wanted = weight.detach().clone(), 0.05 * float(weight.detach().norm())
    weight.grad = size * torch.randn(64, 72, generator=draw)
    optimizer.step()
    assert float((weight.detach() - before).norm()) < 1.5 * wanted


def test_reference_norms_are_saved_and_follow_weights_that_are_loaded() -> None:
    optimizer, ps = fixed(torch.float16)
    run(optimizer, ps, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, qs = fixed(torch.float16)
    with torch.no_grad():
        for p, q in zip(ps, qs, strict=True):
            q.copy_(2 * p)  # references come from the state, not from these
    resumed.load_state_dict(saved)
    run(optimizer, ps, range(3, 6))
    run(resumed, qs, range(3, 6))
    assert bits_equal(everything(resumed), everything(optimizer))
    with torch.no_grad():
        qs[0].mul_(4)
    resumed.reset_masters()
    run(resumed, qs, [6])
    wanted = 4 * float(optimizer.masters()[0].detach().norm())
    assert float(resumed.state[qs[0]]["reference_norm"]) == pytest.approx(wanted, rel=1e-3)


def test_references_keep_their_memory_and_are_measured_before_the_first_update() -> None:
    """Captured graphs read them; a state may be saved, or an optimizer copied, before it has stepped."""
    optimizer, ps = fixed()
    optimizer.prepare()
    saved = copy.deepcopy(optimizer.state_dict())
    addresses = [optimizer.state[p]["reference_norm"].data_ptr() for p in ps[:3]]
    copied = copy.deepcopy(optimizer)
    for own in (optimizer, copied):
        run(own, [p for group in own.param_groups for p in group["params"]], range(3))
    assert bits_equal(everything(copied), everything(optimizer))
    optimizer.load_state_dict(saved)
    optimizer.upload()
    assert [optimizer.state[p]["reference_norm"].data_ptr() for p in ps[:3]] == addresses
    assert min(float(optimizer.state[p]["reference_norm"]) for p in ps[:3]) > 0


# --- state -------------------------------------------------------------------------------------


def test_a_checkpoint_is_resumed_to_the_bit_even_after_a_bad_step() -> None:
    ps, optimizer = stepped()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed, qs = create(torch.float16)
    for group in resumed.param_groups:
        group["lr"] = float("inf")
    run(resumed, qs, [0])
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    with torch.no_grad():
        for p, q in zip(ps, qs, strict=True):
            q.copy_(p)
    run(optimizer, ps, range(2, 5))
    run(resumed, qs, range(2, 5))
    assert bits_equal(everything(resumed), everything(optimizer))


def test_groups_of_other_optimizers_keep_their_own_kind() -> None:
    lars, qs = create(of=LARS)
    run(lars, qs, [0])
    optimizer, ps = create()
    optimizer.load_state_dict(lars.state_dict())
    assert [part["orthogonal"] for part in optimizer.parts()] == [True, False, True]
    run(optimizer, ps, [1])
    saved = optimizer.state_dict()
    saved["param_groups"][1]["orthogonal"] = True
    with pytest.raises(PacelineError, match="orthogonal=False"):
        optimizer.load_state_dict(saved)
    theirs = nn.Parameter(drawn((6, 4)))
    other = torch.optim.Muon([theirs], lr=0.1, momentum=0.9)
    theirs.grad = drawn((6, 4), 1)
    other.step()
    ours = nn.Parameter(theirs.detach().clone())
    loaded = Muon([ours], 0.1)
    loaded.load_state_dict(other.state_dict())
    momenta = [o.state[p]["momentum_buffer"] for o, p in ((loaded, ours), (other, theirs))]
    assert torch.equal(*momenta)
    assert loaded.parts()[0]["orthogonal"] is True


def test_a_capture_without_preparation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, ps = create()
    fill_gradients(ps, 0)
    monkeypatch.setattr("paceline.optim.base.capturing", lambda device: True)
    with pytest.raises(RunError, match="would freeze the learning rate"):
        optimizer.step()
    optimizer.engine = fused.LarsStep()
    with pytest.raises(RunError, match=r"prepare\(\) before the capture"):
        optimizer.step()
