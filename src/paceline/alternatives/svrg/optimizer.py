"""SVRG (Johnson & Zhang 2013), HALP (De Sa et al. 2018) and their plain low-precision relatives.

SVRG corrects each gradient by the one of the same samples at an anchor w̃ and by the full gradient there.
HALP also keeps the offset z = w − w̃ in b-bit integers whose step shrinks with the full gradient at
every centering. Who trains computes three gradients: of a batch at w, of the same batch at w̃
(`at_anchor`), and of all samples at w̃ (`center`).
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

from paceline.alternatives.svrg.settings import DRAW
from paceline.core.settings import read_names
from paceline.optim.base import MasterOptimizer
from paceline.optim.registry import Context
from paceline.optim.rule import Gates, Outcome, Row, Rows, UpdateRule
from paceline.optim.settings import OptimSettings

FORMS = ("halp", "lp_sgd", "lp_svrg", "svrg")
INTEGERS = {8: torch.int8, 16: torch.int16}
ANCHOR, FULL, OFFSET, STEP_SIZE = "anchor", "full_gradient", "offset", "step_size"


def quantize(values: Tensor, step: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Integers n with E[n·step] = value: rounded at random to one of the two neighbours, saturated at
    [−2^(b−1), 2^(b−1) − 1]. A step of 0 gives 0."""
    scaled = torch.where(step > 0, values / step, torch.zeros_like(values))
    noise = torch.rand(values.shape, dtype=values.dtype, device=values.device, generator=generator)
    limit = 2 ** (bits - 1)
    return torch.floor(scaled + noise).clamp_(-limit, limit - 1).to(INTEGERS[bits])


class SvrgHyper(NamedTuple):
    """Hyper-parameters of one group."""

    lr: float
    weight_decay: float
    mu: float


class SvrgRule(UpdateRule):
    """w ← w − lr·(∇fᵢ(w) − ∇fᵢ(w̃) + ∇f(w̃)), and its low-precision forms; see `SVRG`."""

    Hyper: ClassVar[Any] = SvrgHyper
    numbers = (ANCHOR, FULL, OFFSET, STEP_SIZE)
    changed_numbers = (OFFSET,)
    formats = (torch.float32, torch.float64)
    draws = True

    def __init__(self, form: str, bits: int, span: float, seed: int) -> None:
        self.form, self.bits, self.span, self.seed = form, bits, span, seed
        self._generator = torch.Generator()

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if not 0 < group["mu"] < math.inf:
            raise ValueError(f"mu = {group['mu']}: must be above 0, and finite")

    @property
    def anchored(self) -> bool:
        return self.form != "lp_sgd"

    def gradients(self, rows: Sequence[Row], gradients: list[Tensor]) -> list[Tensor]:
        if not self.anchored:
            return gradients
        # Before the check: a full gradient that is not finite must not reach the weights either.
        return list(torch._foreach_add(gradients, [row.buffers[FULL] for row in rows]))

    def update(self, rows: Rows, hyper: Any) -> None:
        for row, direction in zip(rows.rows, rows.gradients, strict=True):
            w, state = row.master, row.buffers
            if self.anchored:
                # The full gradient contains the decay of the anchor.
                direction = direction.add(w - state[ANCHOR], alpha=hyper.weight_decay)
            elif hyper.weight_decay:
                direction = direction.add(w, alpha=hyper.weight_decay)
            if self.form == "svrg":
                w.sub_(hyper.lr * direction)
                continue
            offset, step = state[OFFSET], state[STEP_SIZE]
            moved = offset.to(w.dtype) * step - hyper.lr * direction
            offset.copy_(quantize(moved, step, self.bits, self._generator))
            base = state[ANCHOR] if self.form == "halp" else 0.0
            w.copy_(base + offset.to(w.dtype) * step)

    def ready(self, optimizer: MasterOptimizer) -> None:
        for p in optimizer.parameters():
            state = optimizer.state[p]
            if self.anchored and ANCHOR not in state:
                state[ANCHOR] = p.detach().clone(memory_format=torch.preserve_format)
                state[FULL] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if self.form != "svrg" and OFFSET not in state:
                state[OFFSET] = torch.zeros_like(
                    p, dtype=INTEGERS[self.bits], memory_format=torch.preserve_format
                )
                state[STEP_SIZE] = p.new_zeros(())
                if self.form != "halp":
                    self.to_grid(p, state)

    def begin(self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates) -> list[Row]:
        """Random numbers are equal on all ranks, and in a run that was resumed."""
        draw = int(optimizer.param_groups[0][DRAW])
        key = (self.seed * 0x9E3779B97F4A7C15 + draw * 0xBF58476D1CE4E5B9 + 1) % 2**63
        self._generator = torch.Generator(rows[0].parameter.device).manual_seed(key)
        return rows

    def finish(
        self, optimizer: MasterOptimizer, rows: list[Row], gates: Gates, outcome: Outcome
    ) -> None:
        for group in optimizer.param_groups:
            group[DRAW] = int(group[DRAW]) + 1

    def to_grid(self, p: Tensor, state: dict[str, Any]) -> None:
        """Gives the tensor its fixed step, and rounds it to the nearest multiple."""
        limit = 2 ** (self.bits - 1) - 1
        span = p.detach().abs().amax() * 2 if self.span == 0 else p.new_tensor(self.span)
        state[STEP_SIZE].copy_(torch.where(span > 0, span, torch.ones_like(span)) / limit)
        rounded = torch.round(p.detach() / state[STEP_SIZE]).clamp_(-limit - 1, limit)
        state[OFFSET].copy_(rounded)
        p.detach().copy_(state[OFFSET].to(p.dtype) * state[STEP_SIZE])


class SVRG(MasterOptimizer):
    """w ← w − lr·(∇fᵢ(w) − ∇fᵢ(w̃) + ∇f(w̃)), and forms of it in low precision.

    `form`:
        svrg: as above.
        halp: z ← Q(z − lr·(…)), w = w̃ + z, with z in `bits`-bit integers of step
            ‖∇f(w̃)‖ / (μ·(2^(b−1) − 1)), with the norm over all tensors.
        lp_svrg: w ← Q(w − lr·(…)), with w in integers of a fixed step `span` / (2^(b−1) − 1).
        lp_sgd: w ← Q(w − lr·∇fᵢ(w)), likewise.

    `step` expects ∇fᵢ(w) − ∇fᵢ(w̃) in the gradients (`lp_sgd`: ∇fᵢ(w)). Weight decay is part of f. A
    `span` of 0 takes twice the largest weight of each tensor. Random numbers depend on `seed` and the
    group's `draw`, which `step` counts up. Parameters are fp32 or fp64, and are their own masters.

    Example:
        optimizer = SVRG([weight], lr=0.1, form="halp", bits=8, mu=0.5)
        weight.grad = full_gradient(weight)
        optimizer.center()
        with optimizer.at_anchor():
            there = gradient(weight, batch)
        weight.grad = gradient(weight, batch) - there
        optimizer.step()
    """

    loads_into_state = True  # integers

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        weight_decay: float = 0.0,
        *,
        form: str = "svrg",
        bits: int = 8,
        mu: float = 0.1,
        span: float = 0.0,
        seed: int = 0,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form = {form!r}: must be one of {', '.join(FORMS)}")
        if bits not in INTEGERS:
            raise ValueError(f"bits = {bits}: must be 8 or 16")
        if not 0 <= span < math.inf:
            raise ValueError(f"span = {span}: must be 0 (automatic) or more")
        defaults = {**SvrgHyper(lr, weight_decay, mu)._asdict(), DRAW: 0}
        super().__init__(params, defaults, partial(SvrgRule, form, bits, span, seed))

    @property
    def anchored(self) -> bool:
        """Whether steps need a gradient at the anchor, and centerings."""
        return self.svrg.anchored

    @property
    def svrg(self) -> SvrgRule:
        assert isinstance(self.rule, SvrgRule)
        return self.rule

    def describe(self) -> str:
        form, bits = self.svrg.form, self.svrg.bits
        name = {"lp_sgd": "SGD", "lp_svrg": "SVRG"}.get(form, form.upper())
        return f"{name}, foreach" if form == "svrg" else f"{name} in {bits} bits, foreach"

    @torch.no_grad()
    def reset_masters(self) -> None:
        """After weights were loaded into the model: anchors and integers begin with them."""
        self._ready()
        for p in self.parameters():
            state = self.state[p]
            if self.anchored:
                state[ANCHOR].copy_(p)
                state[FULL].zero_()
            if self.svrg.form == "halp":
                state[OFFSET].zero_()
            elif self.svrg.form != "svrg":
                self.svrg.to_grid(p, state)

    @torch.no_grad()
    def center(self) -> None:
        """w̃ ← w, with the gradients, divided by `grad_scale`, as the full gradient there; z begins again
        at 0, in a new step. After one that is not finite every `step` is skipped until the next."""
        gates = self._gates(self._ready())
        if not self.anchored:
            return
        for group in self.param_groups:
            decay = self.svrg.hyper(group).weight_decay
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
        if self.svrg.form == "halp":
            self._set_steps()

    def _set_steps(self) -> None:
        """‖w* − w̃‖ ≤ ‖∇f(w̃)‖ / μ bounds the offset of all tensors together, so their step is the same:
        a step per tensor would hold a tensor whose gradient is 0 at the anchor there."""
        fulls = [self.state[p][FULL] for p in self.parameters()]
        norms = [torch.linalg.vector_norm(full, dtype=torch.float64) for full in fulls]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        # If one tensor is not finite, all are skipped, also if a step does not use that tensor.
        torch._foreach_mul_(fulls, torch.where(torch.isfinite(norm), 1.0, math.nan))
        limit = 2 ** (self.svrg.bits - 1) - 1
        for group in self.param_groups:
            step = norm / (self.svrg.hyper(group).mu * limit)
            for p in group["params"]:
                self.state[p][STEP_SIZE].copy_(step)
                self.state[p][OFFSET].zero_()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside the context the parameters are w̃, in the same memory."""
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
        """As it is, in fp64 too: there are no kernels that would read it."""
        return gradient


def create(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> SVRG:
    own = settings.own_optimizer
    given = {name: getattr(own, name) for name in read_names(type(own)) & {"bits", "mu"}}
    return SVRG(groups, lr, form=settings.name, seed=context.seed, **given)
