"""8-bit wire formats: the all-reduce and its error feedback against their definition in plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import CPU, joined
from paceline.alternatives.eight_bit.all_reduce import FORMATS
from paceline.alternatives.eight_bit.wires import ALL_TO_ALL, EIGHT_BIT, EightBitSettings
from paceline.comm.exchange import GradientExchange, Signals, tensor_spec
from paceline.comm.plan_choice import PlanChoice
from paceline.comm.settings import CommSettings
from paceline.comm.transport import create_transport
from paceline.config import load_config
from paceline.core.errors import ConfigError
from paceline.plan import ClusterFacts, FusionPlan, ModelFacts, PlanFile
from paceline.plan.fusion_plan import FusionBucket
from ranks import run_ranks
from refusals import refused

BLOCK = 256
STEPS = 3
SCALES = (64.0, 8.0, 16.0)
CASES = [(wire, feedback) for wire in EIGHT_BIT for feedback in (True, False)]


# The reference: no code of the package.


def fp8_numbers(exponent_bits: int, mantissa_bits: int, *, ieee: bool) -> np.ndarray:
    """Returns all finite numbers of a format. e4m3 of Micikevicius et al. (2022) has no infinity
    and one NaN, e5m2 is as in IEEE 754."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            last = exponent == 2**exponent_bits - 1
            if last and (ieee or mantissa == 2**mantissa_bits - 1):
                continue
            part = mantissa / 2**mantissa_bits
            value = (
                part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias)
            )
            found.append(value)
    return np.array(sorted(found))


def rounded(x: np.ndarray, wire: str) -> np.ndarray:
    """Rounds to the nearest number of the format, ties to even."""
    if wire == "int8":
        return np.clip(np.rint(x), -127, 127)
    table = fp8_numbers(4, 3, ieee=False) if wire == "float8_e4m3" else fp8_numbers(5, 2, ieee=True)
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    # Numbers alternate between even and odd mantissas, from 0 on, which is even.
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.where(np.signbit(x), -1, 1) * np.where(up, high, low)


def quantized(x: np.ndarray, wire: str) -> np.ndarray:
    """Returns the decoded numbers."""
    largest = {"int8": 127.0, "float8_e4m3": 448.0, "float8_e5m2": 57344.0}[wire]
    rows = x.reshape(-1, BLOCK)
    scale = (np.abs(rows).max(axis=1, keepdims=True) / np.float32(largest)).astype(np.float32)
    unit = np.where(scale == 0, np.float32(1), scale)
    return (rounded(rows / unit, wire).astype(np.float32) * scale).reshape(-1)


class Reference:
    """The all-reduce of all ranks in one process."""

    def __init__(self, ranks: int, wire: str, feedback: bool) -> None:
        self.ranks, self.wire, self.feedback = ranks, wire, feedback
        self.worker: list[Any] = [0.0] * ranks
        self.owner: list[Any] = [0.0] * ranks

    def all_reduce(self, buffers: list[np.ndarray]) -> np.ndarray:
        length = len(buffers[0])
        chunk = -(-length // (self.ranks * BLOCK)) * BLOCK
        sent = []
        for rank, buffer in enumerate(buffers):
            corrected = np.zeros(chunk * self.ranks, np.float32)
            corrected[:length] = buffer
            corrected = corrected + np.float32(1) * self.worker[rank]
            sent.append(quantized(corrected, self.wire))
            if self.feedback:
                self.worker[rank] = corrected - sent[rank]
        parts = []
        for owner in range(self.ranks):
            span = slice(owner * chunk, (owner + 1) * chunk)
            total = sent[0][span].copy()
            for other in sent[1:]:
                total = total + other[span]
            total = total + self.owner[owner]
            parts.append(quantized(total.astype(np.float32), self.wire))
            if self.feedback:
                self.owner[owner] = total - parts[-1]
        return np.concatenate(parts)[:length]


def gradients(rank: int, step: int, length: int) -> np.ndarray:
    draw = np.random.default_rng(1000 * step + rank)
    values = draw.standard_normal(length).astype(np.float32)
    values[: length // 2] *= np.float32(1e-4)
    values[10:600] = 0  # a whole block of zeros among them
    return values


def _all_reduce(rank: int, lengths: tuple[int, ...]) -> dict[tuple[str, bool], list[Any]]:
    """Returns the sums of every format, with and without feedback, of some steps over messages of several
    lengths. Each step has a loss scale of its own, which the sums are divided by; with powers of two that
    rounds nothing."""
    found: dict[tuple[str, bool], list[Any]] = {}
    with joined() as group:
        for wire, feedback in CASES:
            plan = FusionPlan((FusionBucket(("a",), ALL_TO_ALL, wire, "native"),))
            settings = CommSettings(wire=wire, owned={"eight_bit": EightBitSettings(feedback)})
            transport = create_transport(group, settings, plan)
            assert (transport.memory is not None) == feedback
            buffers = {length: torch.zeros(length) for length in lengths}
            sums = found[wire, feedback] = []
            for step, scale in enumerate(SCALES):
                if transport.memory is not None:
                    transport.memory.scale = torch.tensor(scale)
                for length, buffer in buffers.items():
                    buffer.copy_(torch.from_numpy(gradients(rank, step, length)) * scale)
                    transport.planned.carry(buffer, ALL_TO_ALL, wire)  # type: ignore[attr-defined]
                    sums.append(buffer.numpy() / np.float32(scale))
                if transport.memory is not None:
                    transport.memory.commit(torch.zeros(()))
            transport.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_the_definition(ranks: int) -> None:
    lengths = (1, 700, 5000)
    found = run_ranks(ranks, _all_reduce, lengths)
    for wire, feedback in CASES:
        references = {length: Reference(ranks, wire, feedback) for length in lengths}
        sums = iter(zip(*(theirs[wire, feedback] for theirs in found), strict=True))
        for step in range(STEPS):
            for length, reference in references.items():
                expected = reference.all_reduce([gradients(r, step, length) for r in range(ranks)])
                first, *others = next(sums)
                for other in others:
                    np.testing.assert_array_equal(first, other)
                # The device may fuse a product and a sum: a last bit, which one rounding to 8 bits in
                # some thousand amplifies to a step of the format.
                close = np.isclose(first, expected, rtol=1e-6, atol=1e-9)
                assert close.mean() >= 0.998, (wire, feedback, length, step)


def _repeated(rank: int, feedback: bool) -> np.ndarray:
    """The mean over many steps of one and the same gradient."""
    steps, mean = 64, np.zeros(1024)
    with joined() as group:
        plan = FusionPlan((FusionBucket(("a",), ALL_TO_ALL, "int8", "native"),))
        settings = CommSettings(wire="int8", owned={"eight_bit": EightBitSettings(feedback)})
        transport = create_transport(group, settings, plan)
        buffer = torch.zeros(1024)
        for _ in range(steps):
            buffer.copy_(torch.from_numpy(gradients(rank, 7, 1024)))
            transport.planned.carry(buffer, ALL_TO_ALL, "int8")  # type: ignore[attr-defined]
            mean += buffer.double().numpy() / steps
            if transport.memory is not None:
                transport.memory.commit(torch.zeros(()))
        transport.close()
    return mean


def test_feedback_takes_the_bias_away() -> None:
    """Rounding errs alike on equal gradients, and the mean over steps keeps its error; with feedback the
    sum over all steps is short of the residuals of the last one only, so that the error of the mean falls
    with the steps."""
    exact = sum(gradients(r, 7, 1024).astype(np.float64) for r in range(2))
    with_feedback, without = (
        np.abs(run_ranks(2, _repeated, feedback)[0] - exact).max() for feedback in (True, False)
    )
    assert with_feedback < without / 8


def decoded(values: Tensor, wire: str) -> Tensor:
    packed = torch.empty(FORMATS[wire].packed_bytes(len(values)), dtype=torch.uint8)
    assert packed.numel() == len(values) + 4 * len(values) // BLOCK
    FORMATS[wire].encode(values, packed)
    out = torch.empty(len(values))
    FORMATS[wire].decode(packed, out)
    return out


@pytest.mark.parametrize("wire", EIGHT_BIT)
def test_rounding_is_that_of_the_format(wire: str) -> None:
    values = torch.from_numpy(gradients(0, 0, 4096))
    np.testing.assert_array_equal(decoded(values, wire).numpy(), quantized(values.numpy(), wire))


@pytest.mark.parametrize("wire", EIGHT_BIT)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_arrives_as_such(wire: str, bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    out = decoded(values, wire)
    assert not torch.isfinite(out[3])
    torch.testing.assert_close(out[BLOCK:], torch.ones(BLOCK))


def _exchange(rank: int, discard: bool) -> tuple[list[Tensor], Tensor, list[str], int]:
    """The exchange of a net in two formats; a first step of other numbers leaves residuals, or none."""
    with joined() as group:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
        model[1].weight.data = model[1].weight.data.bfloat16()
        settings = CommSettings(wire="int8", fusion_mib=0.001)
        tensors = [tensor_spec(name, p) for name, p in model.named_parameters()]
        choice = PlanChoice.read(settings, tensors, ClusterFacts(2, 1))
        plan = choice.plan([spec.name for spec in reversed(tensors)])
        transport = create_transport(group, settings, plan)
        exchange = GradientExchange(model.named_parameters(), group, plan, transport=transport)
        exchange.memory.scale = torch.tensor(4.0)
        for step in range(2):
            exchange.begin(step)
            for number, p in enumerate(model.parameters()):
                draw = torch.Generator(CPU).manual_seed(10 * rank + number + 100 * step * rank)
                p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
            exchange.gather()
            exchange.reduce(torch.tensor(0.5), Signals(corrupt=1.0))
            exchange.memory.commit(torch.tensor(float(discard and step == 0)))
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        wires = [message.wire for messages in exchange.messages for message in messages]
        tail, sizes = exchange.tail.clone(), [info.bytes for info in exchange.bucket_info()]
        transport.close()
    return found, tail, wires, sum(sizes)


def test_the_exchange_sends_8_bits_and_signals_in_full() -> None:
    (first, tail, wires, size), (second, *_) = run_ranks(2, _exchange, False)
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert float(tail[0]) == 1.0
    assert float(tail[1]) == 2.0
    assert wires[-1] == "float32"
    assert set(wires[:-1]) == {"int8"}
    assert size < 0.4 * 4 * (40 * 30 + 30 + 30 * 20 + 20)


def test_a_step_that_leaves_no_trace_leaves_no_residual() -> None:
    with_trace = run_ranks(2, _exchange, False)[0][0]
    without = run_ranks(2, _exchange, True)[0][0]
    assert any(not torch.equal(a, b) for a, b in zip(with_trace, without, strict=True))


@pytest.mark.parametrize("wire", EIGHT_BIT)
def test_an_algorithm_that_cannot_sum_8_bits_is_refused(wire: str) -> None:
    for algorithm in ("native", "ring", "hierarchical"):
        with refused("comm.algorithm"):
            CommSettings(wire=wire, algorithm=algorithm)
    with refused("comm.eight_bit.error_feedback"):
        load_config(None, {"comm.wire": "float16", "comm.eight_bit.error_feedback": False})


def test_a_plan_whose_algorithm_cannot_sum_8_bits_is_refused(tmp_path: Path) -> None:
    tensors = [tensor_spec("w", torch.zeros(1000))]
    facts = ModelFacts.of([("w", 1000)])
    path = tmp_path / "plan.toml"
    plan = FusionPlan((FusionBucket(("w",), "ring", "int8"),))
    PlanFile(plan, facts, ClusterFacts(2, 1)).write(path)
    with pytest.raises(ConfigError, match="cannot sum int8"):
        PlanChoice.read(CommSettings(plan=str(path)), tensors, ClusterFacts(2, 1))
    plan = FusionPlan((FusionBucket(("w",), ALL_TO_ALL, "int8", "native"),))
    PlanFile(plan, facts, ClusterFacts(2, 1)).write(path)
    chosen = PlanChoice.read(CommSettings(plan=str(path)), tensors, ClusterFacts(2, 1))
    assert chosen.fixed == plan
