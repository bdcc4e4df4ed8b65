"""SVRG (Johnson & Zhang 2013), HALP (De Sa et al. 2018) and their plain low-precision relatives.

SVRG corrects each gradient by the one of the same samples at an anchor w̃ and by the full gradient there.
HALP also keeps the offset z = w − w̃ in b-bit integers whose step shrinks with the full gradient at
every centering. Who trains computes three gradients: of a batch at w, of the same batch at w̃
(`at_anchor`), and of all samples at w̃ (`center`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.base import MasterOptimizer
from paceline.optim.settings import ANCHORED, OPTIMIZERS_OF_SVRG
from paceline.optim.state import (
    Gates,
    Outcome,
    Row,
    check_finite,
    check_hyper,
    read_hyper,
    unscaled,
)

FORMS = tuple(sorted(OPTIMIZERS_OF_SVRG))
INTEGERS = {8: torch.int8, 16: torch.int16}
ANCHOR, FULL, OFFSET, STEP_SIZE = "anchor", "full_gradient", "offset", "step_size"
DRAW = "draw"


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

    BUFFERS: ClassVar[tuple[str, ...]] = ()
    NUMBERS: ClassVar[tuple[str, ...]] = (ANCHOR, FULL, OFFSET, STEP_SIZE)
    FORMATS: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)
    CHOICES: ClassVar[tuple[str, ...]] = (
        *MasterOptimizer.CHOICES, "form", "bits", "_span", "_seed",
    )  # fmt: skip
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
        self.form, self.bits, self._span, self._seed = form, bits, span, seed
        defaults = {**SvrgHyper(lr, weight_decay, mu)._asdict(), DRAW: 0}
        super().__init__(params, defaults, fused=False)

    @property
    def anchored(self) -> bool:
        """Whether steps need a gradient at the anchor, and centerings."""
        return self.form in ANCHORED

    def describe(self) -> str:
        name = {"lp_sgd": "SGD", "lp_svrg": "SVRG"}.get(self.form, self.form.upper())
        return f"{name}, foreach" if self.form == "svrg" else f"{name} in {self.bits} bits, foreach"

    @torch.no_grad()
    def _ready(self) -> Outcome:
        fresh = self._outcome is None or self._ready_for != len(self.param_groups)
        outcome = super()._ready()
        if not fresh:
            return outcome
        for p in self.parameters():
            state = self.state[p]
            if self.anchored and ANCHOR not in state:
                state[ANCHOR] = p.detach().clone(memory_format=torch.preserve_format)
                state[FULL] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if self.form != "svrg" and OFFSET not in state:
                state[OFFSET] = torch.zeros_like(
                    p, dtype=INTEGERS[self.bits], memory_format=torch.preserve_format
                )
                state[STEP_SIZE] = p.new_zeros(())
                if self.form != "halp":
                    self._to_grid(p, state)
        return outcome

    def _to_grid(self, p: Tensor, state: dict[str, Any]) -> None:
        """Gives the tensor its fixed step, and rounds it to the nearest multiple."""
        limit = 2 ** (self.bits - 1) - 1
        span = p.detach().abs().amax() * 2 if self._span == 0 else p.new_tensor(self._span)
        state[STEP_SIZE].copy_(torch.where(span > 0, span, torch.ones_like(span)) / limit)
        rounded = torch.round(p.detach() / state[STEP_SIZE]).clamp_(-limit - 1, limit)
        state[OFFSET].copy_(rounded)
        p.detach().copy_(state[OFFSET].to(p.dtype) * state[STEP_SIZE])

    @torch.no_grad()
    def reset_masters(self) -> None:
        """After weights were loaded into the model: anchors and integers begin with them."""
        self._ready()
        for p in self.parameters():
            state = self.state[p]
            if self.anchored:
                state[ANCHOR].copy_(p)
                state[FULL].zero_()
            if self.form == "halp":
                state[OFFSET].zero_()
            elif self.form != "svrg":
                self._to_grid(p, state)

    @torch.no_grad()
    def center(self) -> None:
        """w̃ ← w, with the gradients, divided by `grad_scale`, as the full gradient there; z begins again
        at 0, in a new step. After one that is not finite every `step` is skipped until the next."""
        gates = self._gates(self._ready())
        if not self.anchored:
            return
        for group in self.param_groups:
            decay = self._hyper_of(group).weight_decay
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
        if self.form == "halp":
            self._set_steps()

    def _set_steps(self) -> None:
        """‖w* − w̃‖ ≤ ‖∇f(w̃)‖ / μ bounds the offset of all tensors together, so their step is the same:
        a step per tensor would hold a tensor whose gradient is 0 at the anchor there."""
        fulls = [self.state[p][FULL] for p in self.parameters()]
        norms = [torch.linalg.vector_norm(full, dtype=torch.float64) for full in fulls]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        # If one tensor is not finite, all are skipped, also if a step does not use that tensor.
        torch._foreach_mul_(fulls, torch.where(torch.isfinite(norm), 1.0, math.nan))
        limit = 2 ** (self.bits - 1) - 1
        for group in self.param_groups:
            step = norm / (self._hyper_of(group).mu * limit)
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

    def _hyper_of(self, group: dict[str, Any]) -> SvrgHyper:
        return check_hyper(read_hyper(SvrgHyper, group))

    def _gradient(self, index: int, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """As it is, in fp64 too: there are no kernels that would read it."""
        return gradient

    def _run_foreach(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        gradients = unscaled(rows, gates.grad_scale)
        if self.anchored:
            # Before the check: a full gradient that is not finite must not reach the weights either.
            fulls = [self.state[row.parameter][FULL] for row in rows]
            gradients = list(torch._foreach_add(gradients, fulls))
        norms = list(torch._foreach_norm(gradients, 2))
        allowed = check_finite(rows, norms, gates, outcome)
        generator = self._generator(rows)
        for row, gradient, go in zip(rows, gradients, allowed.unbind(), strict=True):
            self._update(row, gradient, go, generator)
        for group in self.param_groups:
            group[DRAW] = int(group[DRAW]) + 1

    def _generator(self, rows: Sequence[Row]) -> torch.Generator:
        """Equal on all ranks, and in a run that was resumed."""
        draw = int(self.param_groups[0][DRAW])
        key = (self._seed * 0x9E3779B97F4A7C15 + draw * 0xBF58476D1CE4E5B9 + 1) % 2**63
        return torch.Generator(rows[0].parameter.device).manual_seed(key)

    def _update(self, row: Row, direction: Tensor, go: Tensor, generator: torch.Generator) -> None:
        """`direction` contains the full gradient."""
        hyper = self._hyper_of(self.param_groups[row.group])
        p, state = row.parameter, self.state[row.parameter]
        if self.anchored:
            # The full gradient contains the decay of the anchor.
            direction = direction.add(p - state[ANCHOR], alpha=hyper.weight_decay)
        elif hyper.weight_decay:
            direction = direction.add(p, alpha=hyper.weight_decay)
        if self.form == "svrg":
            torch.where(go, p - hyper.lr * direction, p, out=p)
            return
        old, step = state[OFFSET], state[STEP_SIZE]
        moved = old.to(p.dtype) * step - hyper.lr * direction
        new = quantize(moved, step, self.bits, generator)
        base = state[ANCHOR] if self.form == "halp" else 0.0
        torch.where(go, base + new.to(p.dtype) * step, p, out=p)
        torch.where(go, new, old, out=old)
