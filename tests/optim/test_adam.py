"""AdamW and LAMB: their equations, masters, switches and state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from optim.reference import (
    KINDS,
    AdamReference,
    assert_near,
    bits_equal,
    check_bad_gradient,
    check_switches,
    everything,
    fill_gradients,
    grad_of,
    parameters,
    run,
)
from paceline.models import parameter_groups
from paceline.optim import LAMB, LARS, AdamW, MasterOptimizer, Muon

both = pytest.mark.parametrize("of", [AdamW, LAMB])
BETAS = (0.9, 0.999)


def create(of: type[AdamW], *kinds: torch.dtype, **options: Any) -> tuple[AdamW, Any]:
    """Two groups: decayed and adapted, and neither."""
    ps = parameters(*(kinds or KINDS))
    rest = {"weight_decay": 0.0, "lr": 0.05} | ({"adapt": False} if of is LAMB else {})
    groups = [{"params": ps[:2]}, {"params": ps[2:], **rest}]
    return of(groups, 0.1, BETAS, 1e-8, 0.1, **options), ps


@both
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.usefixtures("both_ways")
def test_a_step_follows_the_equation(of: type[AdamW], clip: bool) -> None:
    options = {"clip": clip} if of is LAMB else {}
    optimizer, ps = create(of, **options)
    optimizer.grad_scale = torch.tensor(64.0)
    references = [AdamReference(p) for p in ps]
    for step, lr in enumerate((0.1, 0.02, 0.05, 0.05)):
        optimizer.param_groups[0]["lr"] = lr
        fill_gradients(ps, step, 64.0)
        optimizer.step()
        for index, (p, reference) in enumerate(zip(ps, references, strict=True)):
            own = (lr, BETAS, 1e-8, 0.1) if index < 2 else (0.05, BETAS, 1e-8, 0.0)
            adapts = of is LAMB and index < 2
            reference.step(grad_of(p).double() / 64.0, *own, adapts=adapts, clip=clip)
    assert optimizer.trust_ratios() == pytest.approx([r.ratio for r in references], rel=2e-6)
    for p, master, reference in zip(ps, optimizer.masters(), references, strict=True):
        assert_near(master, torch.tensor(reference.weight))
        assert_near(optimizer.state[p]["exp_avg_sq"], torch.tensor(reference.second))
        assert int(optimizer.state[p]["step"]) == 4
        assert torch.equal(p, master.to(p.dtype))


def test_adamw_is_torchs_and_loads_its_state() -> None:
    ps, others = parameters(*[torch.float32] * 4), parameters(*[torch.float32] * 4)
    theirs = torch.optim.AdamW(ps, 0.1, BETAS, 1e-8, 0.1)
    ours: AdamW = AdamW(others, 0.1, BETAS, 1e-8, 0.1)
    for step in range(3):
        fill_gradients(ps, step)
        theirs.step()
        run(ours, others, [step])
    for p, q in zip(ps, others, strict=True):
        assert_near(q, p)
    loaded = AdamW([nn.Parameter(p.detach().clone()) for p in ps], 9.0)
    loaded.load_state_dict(theirs.state_dict())
    fill_gradients(ps, 3)
    theirs.step()
    run(loaded, loaded.param_groups[0]["params"], [3])
    for p, q in zip(ps, loaded.param_groups[0]["params"], strict=True):
        assert_near(q, p)


def test_a_state_without_entries_starts_the_counts_again() -> None:
    ps, fresh = parameters(*[torch.float32] * 4), parameters(*[torch.float32] * 4)
    used, new = AdamW(ps, 0.1), AdamW(fresh, 0.1)
    run(used, ps, range(3))
    with torch.no_grad():
        for p, q in zip(ps, fresh, strict=True):
            q.copy_(p)
    used.load_state_dict(torch.optim.AdamW(parameters(*[torch.float32] * 4), 0.1).state_dict())
    for optimizer, own in ((used, ps), (new, fresh)):
        run(optimizer, own, [3])
        assert [int(optimizer.state[p]["step"]) for p in own] == [1] * 4
    for p, q in zip(ps, fresh, strict=True):
        assert_near(p, q)


@both
@pytest.mark.usefixtures("both_ways")
def test_a_skipped_step_leaves_no_trace(of: type[AdamW]) -> None:
    """The count of steps does not change either."""
    optimizer, ps = create(of)
    fill_gradients(ps, 0)
    optimizer.step()
    for which, poison in ((0, float("nan")), (1, float("inf"))):
        check_bad_gradient(ps, optimizer, which, poison)
    check_switches(optimizer)
    plain, qs = create(of)
    skipped, rs = create(of)
    for step in range(4):
        fill_gradients(rs, step)
        if step == 2:
            grad_of(rs[2]).view(-1)[0] = float("nan")
        skipped.step()
    run(plain, qs, (0, 1, 3))
    assert bits_equal(everything(plain), everything(skipped))


@both
def test_state_survives_a_checkpoint_and_copies_exactly(of: type[AdamW]) -> None:
    optimizer, ps = create(of)
    run(optimizer, ps, range(3))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed, others = create(of)
    with torch.no_grad():
        for p, q in zip(ps, others, strict=True):
            q.copy_(p)
    fill_gradients(others, 0)
    resumed.prepare()
    addresses = [t.data_ptr() for p in others for t in resumed.state[p].values()]
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert [t.data_ptr() for p in others for t in resumed.state[p].values()] == addresses
    copied = copy.deepcopy(optimizer)
    pickled = pickle.loads(pickle.dumps(optimizer))
    run(optimizer, ps, range(3, 5))
    for twin in (resumed, copied, pickled):
        own = [p for group in twin.param_groups for p in group["params"]]
        run(twin, own, range(3, 5))
        assert bits_equal(everything(twin), everything(optimizer))


def test_a_group_can_join_and_starts_its_own_count() -> None:
    ps = parameters(*KINDS)
    optimizer = AdamW(ps[:1], 0.1)
    run(optimizer, ps[:1], range(2))
    optimizer.add_param_group({"params": ps[1:], "betas": (0.5, 0.9)})
    run(optimizer, ps, [2])
    assert [int(optimizer.state[p]["step"]) for p in ps] == [3, 1, 1]
    with pytest.raises(ValueError, match="beta2 = 1"):
        AdamW(parameters(torch.float32), betas=(0.9, 1.0))


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


def test_groups_of_a_model_leave_biases_and_norms_unadapted() -> None:
    def adapted(optimizer: MasterOptimizer) -> list[bool]:
        return [group["adapt"] for group in optimizer.param_groups]

    groups = parameter_groups(net(), 0.1)
    for of in (LARS, LAMB):
        assert adapted(of(groups, 1.0)) == [True, False]
        assert adapted(of(groups, 1.0, adapt_bias_norm=True)) == [True, True]
        own = [group | {"adapt": True} for group in groups]
        assert adapted(of(own, 1.0)) == [True, True]
    muon = Muon(groups, 1.0, momentum=0.5, trust_coefficient=0.2)
    found = [
        (g["orthogonal"], g["adapt"], g["trust_coefficient"], len(g["params"]))
        for g in muon.parts()
    ]
    # The filter, the linear layer as by LARS at an equal step, and everything else.
    assert found == [(True, True, 0.2, 1), (False, True, 0.1, 1), (False, False, 0.1, 4)]
