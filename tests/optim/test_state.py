"""The state of optimizers: formats, checkpoints, groups, and its bytes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optim.reference import KINDS, bits_equal, everything, fill_gradients, parameters, run
from paceline.optim import LAMB, LARS, SGD, OptimSettings, create_optimizer


def test_state_is_fp32_and_survives_a_checkpoint_exactly() -> None:
    ps = parameters(*KINDS)
    optimizer = LARS(ps, 0.5, weight_decay=0.1)
    run(optimizer, ps, range(3))
    with torch.no_grad():
        optimizer.state[ps[1]]["master"].view(-1)[0] = 1.0001  # 1.0 in fp16
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in ps]
    resumed = LARS(others, 9.0)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert resumed.param_groups[0]["lr"] == 0.5
    assert resumed.state[others[1]]["master"].view(-1)[0] == torch.tensor(1.0001)
    assert {t.dtype for p in others for t in resumed.state[p].values()} == {torch.float32}
    assert bits_equal(everything(resumed), everything(optimizer))
    run(optimizer, ps, range(3, 6))
    run(resumed, others, range(3, 6))
    assert bits_equal(everything(resumed), everything(optimizer))


def test_loading_keeps_the_memory_that_captured_graphs_read() -> None:
    ps = parameters(*KINDS)
    optimizer = LARS(ps, 0.5)
    run(optimizer, ps, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    addresses = [t.data_ptr() for p in ps for t in optimizer.state[p].values()]
    run(optimizer, ps, range(1, 3))
    optimizer.load_state_dict(saved)
    assert [t.data_ptr() for p in ps for t in optimizer.state[p].values()] == addresses
    for p, state in zip(ps, saved["state"].values(), strict=True):
        assert bits_equal(list(optimizer.state[p].values()), list(state.values()))


def test_loading_calls_the_users_hooks() -> None:
    ps = parameters(torch.float16)
    optimizer = LARS(ps, 0.5)
    run(optimizer, ps, range(1))
    saved = optimizer.state_dict()

    def doubled(_: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:
        held = copy.deepcopy(state)
        held["state"][0]["momentum_buffer"].mul_(2)  # type: ignore[index]
        return held

    fresh = LARS(parameters(torch.float16), 0.5)
    fresh.register_load_state_dict_pre_hook(doubled)
    fresh.load_state_dict(saved)
    (loaded,) = fresh.state.values()
    assert torch.equal(loaded["momentum_buffer"], 2 * saved["state"][0]["momentum_buffer"])


def test_state_of_torch_sgd_can_be_loaded() -> None:
    ps, others = parameters(torch.float32), parameters(torch.float32)
    theirs = torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01)
    ours = SGD(others, 0.7, momentum=0.5)
    fill_gradients(ps, 0)
    theirs.step()
    with torch.no_grad():
        others[0].copy_(ps[0])
    ours.load_state_dict(theirs.state_dict())
    fill_gradients(ps, 1)
    theirs.step()
    run(ours, others, [1])
    torch.testing.assert_close(others[0], ps[0], rtol=1e-6, atol=1e-7)


def test_state_moves_between_half_and_full_parameters() -> None:
    halves, full = parameters(torch.float16), parameters(torch.float32)
    half, whole = LARS(halves, 0.5), LARS(full, 0.5)
    run(half, halves, range(2))
    run(whole, full, range(2))
    master = half.masters()[0]
    with torch.no_grad():
        master.fill_(1.0001)  # rounded in the half weights
    saved_whole, saved_half = copy.deepcopy(whole.state_dict()), copy.deepcopy(half.state_dict())
    half.load_state_dict(saved_whole)
    assert half.masters()[0].data_ptr() == master.data_ptr()
    assert torch.equal(master, torch.full(master.shape, 1.0001)), "fp32 runs have no master to give"
    whole.load_state_dict(saved_half)
    assert set(whole.state[full[0]]) == {"momentum_buffer"}
    run(half, halves, range(2, 3))
    run(whole, full, range(2, 3))
    assert half.state[halves[0]]["master"].dtype == torch.float32


@pytest.mark.parametrize("how", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_copies_continue_like_the_original(how: Callable[[SGD], SGD]) -> None:
    ps = parameters(*KINDS)
    optimizer = SGD(ps, 0.5, fused=False)
    run(optimizer, ps, range(2))
    copied = how(optimizer)
    assert (copied.fused, type(copied)) == (False, SGD)
    run(optimizer, ps, range(2, 4))
    run(copied, copied.param_groups[0]["params"], range(2, 4))
    assert bits_equal(everything(copied), everything(optimizer))


def test_copies_keep_what_the_constructor_was_given() -> None:
    role = {"params": parameters(torch.float32), "role": "bias_norm"}
    for create in (LARS, LAMB):
        for adapts in (False, True):
            copied = copy.deepcopy(create(parameters(torch.float32), 0.5, adapt_bias_norm=adapts))
            copied.add_param_group(dict(role))
            assert copied.param_groups[-1]["adapt"] is adapts


def test_a_group_can_join_between_steps() -> None:
    ps = parameters(*KINDS)
    optimizer = LARS(ps[:2], 0.5)
    run(optimizer, ps[:2], range(1))
    momentum = optimizer.state[ps[0]]["momentum_buffer"]
    before = everything(optimizer)
    optimizer.add_param_group({"params": ps[2:], "adapt": False})
    assert bits_equal(everything(optimizer)[: len(before)], before)
    run(optimizer, ps, range(1, 2))
    assert optimizer.state[ps[0]]["momentum_buffer"] is momentum
    assert len(optimizer.trust_ratios()) == 3
    with pytest.raises(ValueError, match="momentum = 2"):
        optimizer.add_param_group({"params": parameters(torch.float32), "momentum": 2.0})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": ps[:1]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("gradient_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last(kind: torch.dtype, gradient_format: torch.memory_format) -> None:
    plain = nn.Parameter(torch.randn(4, 6, 3, 3).to(kind))
    nhwc = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    optimizers = [LARS([plain], 0.5, weight_decay=0.1), LARS([nhwc], 0.5, weight_decay=0.1)]
    for _ in range(2):
        plain.grad = torch.randn(4, 6, 3, 3).to(kind)
        nhwc.grad = plain.grad.clone(memory_format=gradient_format)
        for optimizer in optimizers:
            optimizer.step()
    for tensor in (nhwc, *optimizers[1].state[nhwc].values()):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(*(everything(optimizer) for optimizer in optimizers), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_prepare_creates_the_state_and_masters_can_be_reset() -> None:
    ps = parameters(*KINDS)
    optimizer = LARS(ps, 0.5)
    optimizer.prepare()
    assert [sorted(optimizer.state[p]) for p in ps] == [
        ["momentum_buffer"],
        ["master", "momentum_buffer"],
        ["master", "momentum_buffer"],
    ]
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in ps)
    with torch.no_grad():
        ps[1].fill_(0.5)
    optimizer.reset_masters()
    assert torch.equal(optimizer.masters()[1], torch.full(ps[1].shape, 0.5))
    assert optimizer.masters()[0] is ps[0]


SIZE = 4096


@pytest.mark.parametrize(
    ("values", "dtype", "wanted"),
    [
        ({"name": "sgd"}, torch.float32, 4),
        ({"name": "sgd"}, torch.bfloat16, 8),  # and a master
        ({"name": "lars"}, torch.float32, 4),
        ({"name": "adamw"}, torch.float32, 8),
        ({"name": "adamw"}, torch.float16, 12),
        ({"name": "lamb"}, torch.float32, 8),
        ({"name": "rmsprop_warmup"}, torch.float32, 8),
        ({"name": "svrg", "momentum": 0.0}, torch.float32, 8),
        ({"name": "halp", "momentum": 0.0, "bits": 8}, torch.float32, 9),
        ({"name": "halp", "momentum": 0.0, "bits": 16}, torch.float32, 10),
        ({"name": "torch.optim:RAdam", "lr": 0.1}, torch.float32, 8),
        ({"name": "torch.optim:RAdam", "lr": 0.1}, torch.bfloat16, 12),
    ],
)
def test_bytes_per_parameter(values: dict[str, Any], dtype: torch.dtype, wanted: int) -> None:
    weight = nn.Parameter(torch.ones(SIZE, dtype=dtype))
    optimizer = create_optimizer(OptimSettings.gather(**values), [{"params": [weight]}], 0.1)
    weight.grad = torch.ones(SIZE, dtype=dtype)
    optimizer.step()
    # Counters and steps of a tensor are a few bytes.
    assert optimizer.state_bytes() / SIZE == pytest.approx(wanted, abs=0.01)
