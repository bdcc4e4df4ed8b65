"""Cases of Muon's kernels that `test_fused.py` runs in its own process, where Triton interprets them.

There the products are in fp32, so that results can be compared to the last digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from triton.runtime import interpreter

import interpreted  # noqa: F401  (before any kernel)
from optim.reference import (
    ETA,
    assert_near,
    bits_equal,
    check_bad_gradient,
    check_switches,
    everything,
    fill_gradients,
    grad_of,
)
from paceline.core.errors import PacelineError, RunError
from paceline.optim import Muon, SharedProducts, fused_muon, orthogonal
from paceline.optim import fused as fused_steps
from paceline.optim.fused_muon import MuonStep, Tiling

# Wide, tall and square, with and without padding to multiples of 16; one has several tiles of 32. Then
# parameters that are not orthogonalized.
MATRICES = [(6, 5, 3, 3), (40, 36), (40, 5, 2, 2), (16, 16)]
OTHERS = [(40,), (7, 11)]
KINDS = [torch.float16, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16]
# NumPy warns where a kernel computes with NaN or overflows, as it must here.
poisoned = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile and iteration for each matrix, and no checks for integer overflow, because the
    interpreter is slow."""
    builder = interpreter.interpreter_builder
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", unchecked)
    monkeypatch.setattr(fused_steps, "CHUNK", 1024)
    monkeypatch.setattr(fused_steps, "BLOCK", 512)
    monkeypatch.setattr(fused_steps, "WIDTH", 4)
    monkeypatch.setattr(fused_muon, "TILING", Tiling(64, 64, 64, 16))
    iterate(1, monkeypatch)


def iterate(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_muon, orthogonal):
        monkeypatch.setattr(module, "ITERATIONS", times)


def create(fused: bool, **options: Any) -> tuple[Muon, list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    ps = [
        nn.Parameter(torch.randn(shape, generator=draw).to(kind))
        for shape, kind in zip([*MATRICES, *OTHERS], KINDS, strict=True)
    ]
    ps[2].data = ps[2].data.to(memory_format=torch.channels_last)
    groups = [
        {"params": ps[:2], "weight_decay": 0.1, "orthogonal": True},
        {"params": ps[2:4], "momentum": 0.5, "nesterov": False, "orthogonal": True},
        {"params": ps[4:], "lr": 0.2, "adapt": False, "orthogonal": False},
    ]
    optimizer = Muon(groups, 0.9, trust_coefficient=ETA, fused=fused, **options)
    return optimizer, ps


def pair() -> list[tuple[Muon, list[nn.Parameter]]]:
    made = [create(fused) for fused in (True, False)]
    assert [optimizer.path for optimizer, _ in made] == ["triton", "foreach"]
    return made


def assert_alike(made: Sequence[tuple[Muon, list[nn.Parameter]]]) -> None:
    (kernel, ps), (foreach, qs) = made
    assert kernel.overflow == foreach.overflow == 0
    assert kernel.trust_ratios() == pytest.approx(foreach.trust_ratios(), rel=1e-5)
    for ours, theirs in zip(kernel.masters(), foreach.masters(), strict=True):
        assert_near(ours, theirs, 5e-6)
    for p, q in zip(ps, qs, strict=True):
        momenta = (o.state[x]["momentum_buffer"] for o, x in ((kernel, p), (foreach, q)))
        assert_near(*momenta)


def engine_of(optimizer: Muon) -> MuonStep:
    assert isinstance(optimizer.engine, MuonStep)
    return optimizer.engine


def test_kernels_equal_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses several chunks and tiles, and iterations in both directions between the buffers."""
    monkeypatch.setattr(fused_steps, "CHUNK", 512)
    monkeypatch.setattr(fused_steps, "BLOCK", 256)
    monkeypatch.setattr(fused_muon, "TILING", Tiling(32, 16, 64, 16))
    made = pair()
    for optimizer, ps in made:
        optimizer.grad_scale = torch.tensor(256.0)
        optimizer.param_groups[0] |= {"lr": 0.4, "momentum": 0.6}
        optimizer.masters()  # creates the state
        draw = torch.Generator().manual_seed(5)
        for p in ps:
            momentum = optimizer.state[p]["momentum_buffer"]
            momentum.copy_(torch.randn(p.shape, generator=draw))
        fill_gradients(ps, 0, 256.0)
        before = everything(optimizer)
        optimizer.prepare()
        assert bits_equal(everything(optimizer), before)
    iterate(3, monkeypatch)
    for optimizer, _ in made:
        optimizer.step()
    assert_alike(made)
    kernel, ps = made[0]
    for p, master in zip(ps, kernel.masters(), strict=True):
        assert_near(p, master, 2**-7 if p.dtype == torch.bfloat16 else 2**-10)
    iterate(1, monkeypatch)
    for module in ("base", "fused", "fused_muon"):
        monkeypatch.setattr(f"paceline.optim.{module}.capturing", lambda device: True)
    kernel.step()  # would be refused if an address had changed
    engine_of(kernel)._matrices = None
    with pytest.raises(RunError, match=r"prepare\(\) before the capture"):
        kernel.step()


def test_steps_of_fixed_length_take_their_directions_from_torch() -> None:
    """The update runs in the kernels of LARS."""
    made = pair()
    for optimizer, ps in made:
        for group in optimizer.param_groups[:2]:
            group |= {"fixed_steps": True, "weight_decay": 0.0}
        for step in range(2):
            before = [master.detach().clone() for master in optimizer.masters()[:4]]
            fill_gradients(ps, step)
            optimizer.step()
            for master, then, p in zip(optimizer.masters(), before, ps, strict=False):
                length = float((master.detach() - then).norm())
                wanted = 0.9 * ETA * float(optimizer.state[p]["reference_norm"])
                assert length == pytest.approx(wanted, rel=1e-4)
    assert "directions by torch" in made[0][0].describe()
    assert_alike(made)


def test_a_group_with_fixed_steps_may_join_and_come_with_a_state() -> None:
    (kernel, _), (foreach, _) = made = pair()
    fixed = {"fixed_steps": True, "orthogonal": True}
    joined = []
    for optimizer, own in made:
        fill_gradients(own, 0)
        optimizer.step()
        draw = torch.Generator().manual_seed(7)
        new = nn.Parameter(torch.randn(16, 16, generator=draw))
        optimizer.add_param_group({"params": [new], **fixed})
        own.append(new)
        fill_gradients(own, 1)
        optimizer.step()
        joined.append(new)
    assert_alike(made)
    assert torch.allclose(*(new.detach() for new in joined), atol=1e-5)
    other, rs = create(True)
    fill_gradients(rs, 0)
    other.step()
    state = foreach.state_dict()
    other.add_param_group(
        {"params": [nn.Parameter(joined[1].detach().clone())], "orthogonal": True}
    )
    assert isinstance(other.engine, MuonStep)
    other.load_state_dict(state)
    other.upload()
    assert not isinstance(other.engine, MuonStep)
    assert not isinstance(kernel.engine, MuonStep)


@poisoned
@pytest.mark.parametrize(("which", "poison"), [(0, float("nan")), (5, float("inf"))])
def test_a_bad_gradient_changes_no_bit_and_leaves_no_trace(
    which: int, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding stays clean too: the next steps have the bits of an optimizer that
    has not seen it."""
    iterate(3, monkeypatch)  # the second writes the matrices that the first starts from
    (kernel, ps), (twin, qs) = create(True), create(True)
    for optimizer, own in ((kernel, ps), (twin, qs)):
        optimizer.masters()  # creates the state
        fill_gradients(own, 0)
    check_bad_gradient(ps, kernel, which, poison)
    grad_of(qs[which]).view(-1)[-1] = 0.25
    twin.step()
    assert bits_equal(everything(kernel), everything(twin))


@poisoned
def test_an_average_whose_norm_overflows_skips_the_step_unless_its_gradient_is_zero() -> None:
    kernel, ps = create(True)
    fill_gradients(ps, 0)
    kernel.step()
    kernel.state[ps[1]]["momentum_buffer"].fill_(1e25)
    before = everything(kernel)
    kernel.step()
    assert (int(kernel.overflow), kernel.nonfinite()) == (1, [1])
    assert bits_equal(everything(kernel), before)
    for p in ps[:4]:
        grad_of(p).zero_()
    weight = ps[1].detach().clone()
    kernel.step()
    assert kernel.overflow == 0
    assert kernel.trust_ratios()[:4] == [1.0] * 4
    torch.testing.assert_close(ps[1].detach(), weight * (1 - 0.9 * 0.1))
    torch.testing.assert_close(
        kernel.state[ps[1]]["momentum_buffer"], torch.full(ps[1].shape, 0.9e25)
    )


@poisoned
def test_switches_act_as_in_foreach() -> None:
    made = pair()
    for optimizer, ps in made:
        optimizer.active = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
        fill_gradients(ps, 0)
        grad_of(ps[1])[0] = float("nan")  # inactive: not checked
        optimizer.step()
    assert_alike(made)
    check_switches(made[0][0])


def test_tables_follow_gradients_that_come_and_go() -> None:
    made = pair()
    for missing in ((0, 3), range(4), range(4, 6), ()):
        for optimizer, ps in made:
            fill_gradients(ps, len(missing))
            for index in missing:
                ps[index].grad = None
            optimizer.step()
        assert_alike(made)


@poisoned
def test_a_flag_does_not_outlive_the_gradients_that_set_it() -> None:
    kernel, ps = create(True)
    for gone, bad in ((range(4), 0), (range(4, 6), 5)):
        fill_gradients(ps, 0)
        grad_of(ps[bad]).view(-1)[0] = float("nan")
        kernel.step()
        assert kernel.overflow == 1
        for index in gone:
            ps[index].grad = None
        kernel.step()
        assert (int(kernel.overflow), kernel.nonfinite()) == (0, [])


@pytest.mark.parametrize("turned", [(1, 0), (3, 2, 0, 1)])
def test_matrices_whose_rows_are_not_outermost_get_their_directions_from_torch(
    turned: tuple[int, ...],
) -> None:
    made = []
    for fused in (True, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn([5, 3, 4, 8][-len(turned) :]).permute(turned))
        optimizer = Muon([{"params": [p], "orthogonal": True}], 0.9, fused=fused)
        fill_gradients([p], 0)
        optimizer.step()
        made.append((optimizer, [p]))
    linear = ", linear layers orthogonalized too" if len(turned) == 2 else ""
    assert made[0][0].describe() == f"muon, triton{linear}, directions by torch"
    assert_near(made[0][1][0], made[1][1][0].detach(), 1e-5)


def test_products_by_torch_on_request_and_where_ranks_share_them() -> None:
    assert "by torch" in create(True, products="torch")[0].describe()
    optimizer, _ = create(True)
    assert "by torch" not in optimizer.describe()
    optimizer.shared = SharedProducts(0, 2, lambda rows, lengths: None)
    assert "by torch" in optimizer.describe()
    with pytest.raises(ValueError, match="products = 'cuda'"):
        create(True, products="cuda")


def test_a_matrix_beyond_32_bit_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_muon, "_MOST_ELEMENTS", 48 * 48 - 1)
    kernel, ps = create(True)
    fill_gradients(ps, 0)
    with pytest.raises(PacelineError, match=r"\(40, 36\) is too large"):
        kernel.step()
