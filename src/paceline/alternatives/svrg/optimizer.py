"""SVRG (Johnson & Zhang 2013) and HALP (De Sa et al. 2018).

SVRG reduces the variance of each gradient by two gradients at an anchor w̃, an earlier value of the
weights: of the same samples, and of all samples. HALP also stores the offset z = w − w̃ in b-bit
integers. Their step size shrinks with the full gradient whenever the anchor moves (`center`). The
training computes three gradients: of a batch at w, of the same batch at w̃ (`at_anchor`), and of all
samples at w̃ (`center`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.alternatives.svrg.settings import DRAW, HalpSettings
from paceline.optim.base import MasterOptimizer
from paceline.optim.registry import Context
from paceline.optim.rule import Gates, Outcome, Row, Rows, UpdateRule
from paceline.optim.settings import OptimSettings

INTEGERS = {8: torch.int8, 16: torch.int16}
ANCHOR, FULL, OFFSET, STEP_SIZE = "anchor", "full_gradient", "offset", "step_size"


def quantize(values: Tensor, step: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Rounds values / step stochastically to integers n with the expected value E[n·step] = value.

    Args:
        values: Tensor to round.
        step: The value of the integer 1; if it is 0, all integers are 0.
        bits: 8 or 16; integers saturate at [−2^(b−1), 2^(b−1) − 1].
        generator: Random generator that decides between rounding down and up.

    Returns:
        Integers of the given number of bits.
    """
    scaled = torch.where(step > 0, values / step, torch.zeros_like(values))
    noise = torch.rand(values.shape, dtype=values.dtype, device=values.device, generator=generator)
    limit = 2 ** (bits - 1)
    return torch.floor(scaled + noise).clamp_(-limit, limit - 1).to(INTEGERS[bits])


class SvrgHyper(NamedTuple):
    """Hyper-parameters of one parameter group."""

    lr: float
    weight_decay: float
    mu: float


class SvrgRule(UpdateRule):
    """The update rule of SVRG and, if `bits` is given, of HALP; `SVRG` has the equations."""

    Hyper: ClassVar[Any] = SvrgHyper
    numbers = (ANCHOR, FULL, OFFSET, STEP_SIZE)
    changed_numbers = (OFFSET,)
    formats = (torch.float32, torch.float64)
    draws = True

    def __init__(self, bits: int | None, seed: int) -> None:
        self.bits, self.seed = bits, seed
        self._generator = torch.Generator()

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not 0 < group["mu"] < math.inf:
            raise ValueError(f"mu = {group['mu']}: must be above 0, and finite")

    def gradients(self, rows: Sequence[Row], gradients: list[Tensor]) -> list[Tensor]:
        # Adds the full gradient before the finite check, so that the check covers it, too.
        return list(torch._foreach_add(gradients, [row.buffers[FULL] for row in rows]))

    def update(self, rows: Rows, hyper: Any) -> None:
        for row, gradient in zip(rows.rows, rows.gradients, strict=True):
            w, state = row.master, row.buffers
            # The full gradient contains the decay of the anchor.
            direction = gradient.add(w - state[ANCHOR], alpha=hyper.weight_decay)
            if self.bits is None:
                w.sub_(hyper.lr * direction)
                continue
            offset, step = state[OFFSET], state[STEP_SIZE]
            moved = offset.to(w.dtype) * step - hyper.lr * direction
            offset.copy_(quantize(moved, step, self.bits, self._generator))
            w.copy_(state[ANCHOR] + offset.to(w.dtype) * step)

    def ready(self, optimizer: MasterOptimizer) -> None:
        for p in optimizer.parameters():
            state = optimizer.state[p]
            if ANCHOR not in state:
                state[ANCHOR] = p.detach().clone(memory_format=torch.preserve_format)
                state[FULL] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if self.bits is not None and OFFSET not in state:
                state[OFFSET] = torch.zeros_like(
                    p, dtype=INTEGERS[self.bits], memory_format=torch.preserve_format
                )
                state[STEP_SIZE] = p.new_zeros(())

    def begin(self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates) -> list[Row]:
        """Seeds the random numbers, which are equal on all ranks and in a resumed run."""
        draw = int(optimizer.param_groups[0][DRAW])
        key = (self.seed * 0x9E3779B97F4A7C15 + draw * 0xBF58476D1CE4E5B9 + 1) % 2**63
        self._generator = torch.Generator(rows[0].parameter.device).manual_seed(key)
        return rows

    def finish(
        self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates, outcome: Outcome
    ) -> None:
        for group in optimizer.param_groups:
            group[DRAW] = int(group[DRAW]) + 1


class SVRG(MasterOptimizer):
    """Stochastic variance-reduced gradient; HALP if `bits` is given.

    SVRG: w ← w − lr·d, where d = ∇fᵢ(w) − ∇fᵢ(w̃) + ∇f(w̃). HALP: z ← Q(z − lr·d); w = w̃ + z, where z
    consists of b-bit integers times ‖∇f(w̃)‖ / (μ·(2^(b−1) − 1)), with the norm over all tensors.

    `step` expects ∇fᵢ(w) − ∇fᵢ(w̃) in the gradients. Weight decay is part of f. Random numbers depend
    on `seed` and the group's `draw`, which `step` increments. There are no separate master weights.

    Args:
        params: Parameters or groups in fp32 or fp64.
        lr: Learning rate.
        weight_decay: Weight decay.
        bits: 8 or 16 for HALP, None for SVRG.
        mu: Strong convexity μ.
        seed: Seed of stochastic rounding.

    Example:
        >>> optimizer = SVRG([weight], lr=0.1, bits=8, mu=0.5)
        >>> weight.grad = full_gradient(weight)
        >>> optimizer.center()
        >>> with optimizer.at_anchor():
        ...     at_anchor = gradient(weight, batch)
        >>> weight.grad = gradient(weight, batch) - at_anchor
        >>> optimizer.step()
    """

    loads_into_state = True  # integers

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        weight_decay: float = 0.0,
        *,
        bits: int | None = None,
        mu: float = 0.1,
        seed: int = 0,
    ) -> None:
        if bits is not None and bits not in INTEGERS:
            raise ValueError(f"bits = {bits}: must be 8, 16 or None")
        defaults = {**SvrgHyper(lr, weight_decay, mu)._asdict(), DRAW: 0}
        super().__init__(params, defaults, partial(SvrgRule, bits, seed))

    @property
    def bits(self) -> int | None:
        """Number of bits of the offset from the anchor; None for SVRG."""
        assert isinstance(self.rule, SvrgRule)
        return self.rule.bits

    def describe(self) -> str:
        """Returns the names of the method and its implementation, for display."""
        return f"HALP in {self.bits} bits, foreach" if self.bits else "SVRG, foreach"

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Sets the anchor to the current weights, and full gradient and offset to 0."""
        self._ready()
        for p in self.parameters():
            state = self.state[p]
            state[ANCHOR].copy_(p)
            state[FULL].zero_()
            if self.bits:
                state[OFFSET].zero_()

    @torch.no_grad()
    def center(self) -> None:
        """Moves the anchor to the weights (w̃ ← w, z ← 0); stores the gradients as the full gradient.

        Divides the stored gradients by `grad_scale`. If the full gradient is not finite, every `step` is
        skipped until the next centering.
        """
        gates = self._gates(self._ready())
        for group in self.param_groups:
            decay = self.rule.hyper(group).weight_decay
            for p in group["params"]:
                state = self.state[p]
                state[ANCHOR].copy_(p)
                if p.grad is None:
                    state[FULL].zero_()
                    continue
                state[FULL].copy_(p.grad)
                if gates.grad_scale is not None:
                    state[FULL].mul_(gates.grad_scale.reshape(()).float().reciprocal())
                state[FULL].add_(p.detach(), alpha=decay)
        if self.bits:
            self._set_steps(self.bits)

    def _set_steps(self, bits: int) -> None:
        """Sets the step size of the integers, one for all tensors, from ‖w* − w̃‖ ≤ ‖∇f(w̃)‖ / μ.

        With a step size per tensor, a tensor whose gradient is 0 at the anchor could not move.
        """
        fulls = [self.state[p][FULL] for p in self.parameters()]
        norms = [torch.linalg.vector_norm(full, dtype=torch.float64) for full in fulls]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        # If one tensor is not finite, every step skips all tensors, even a step without that tensor.
        torch._foreach_mul_(fulls, torch.where(torch.isfinite(norm), 1.0, math.nan))
        for group in self.param_groups:
            step = norm / (self.rule.hyper(group).mu * (2 ** (bits - 1) - 1))
            for p in group["params"]:
                self.state[p][STEP_SIZE].copy_(step)
                self.state[p][OFFSET].zero_()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Returns a context in which the parameters have the values of the anchor w̃."""
        self._ready()
        parameters = self.parameters()
        with torch.no_grad():
            now = [p.detach().clone() for p in parameters]
            torch._foreach_copy_(parameters, [self.state[p][ANCHOR] for p in parameters])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, now)

    def _gradient(self, index: int, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient unchanged, also in fp64, because no kernel reads it."""
        return gradient


def create(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> SVRG:
    """Creates SVRG or HALP from the settings; see `OptimizerSettings.CREATE`."""
    own = settings.own_optimizer
    if isinstance(own, HalpSettings):
        return SVRG(groups, lr, bits=own.bits, mu=own.mu, seed=context.seed)
    return SVRG(groups, lr, seed=context.seed)
