"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024), along LARS's trust ratio.

Second order at about the cost of Muon: per filter one covariance of its smaller side, whose basis is
followed by orthogonal iteration every few steps. Ranks share the decompositions out as they do Muon's
products. Masters, kernels, device switches and checkpoints are those of LARS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.core.errors import RunError
from paceline.optim.muon import Muon
from paceline.optim.orthogonal import as_matrix, like_tensor, share_out
from paceline.optim.state import MOMENTUM, Gates, Outcome, Row, capturing, check_range

SECOND = "second_buffer"
COVARIANCE, BASIS, STEPS = "covariance", "basis", "steps"
# Early on the covariance changes with every step.
_FIRST_STEPS = 10
# Where no gradient has come yet, the square is 0 and so is the average.
_TINY = 1e-20


class SOAP(Muon):
    """R = QᵀG; V ← β₂V + (1−β₂)R²; U = Q·(QᵀM / √V)·c; w ← w − lr·λ·(U + βw); L ← β₂L + (1−β₂)GGᵀ.

    G is the gradient of a filter as a matrix whose rows are its smaller side, M its average as in Muon,
    c gives U the norm of M, and λ is the trust ratio of LARS. Every `interval` steps, and in each of the
    first ten, Q becomes the orthogonal factor of L·Q, which converges to the eigenvectors of L. Adam's
    bias corrections cancel in the trust ratio. Groups, momentum and η are those of Muon. A step is not
    captured in a CUDA graph, because not all steps do the same work.

    Example:
        optimizer = SOAP(parameter_groups(model, 5e-5), lr=4.0)
    """

    BUFFERS: ClassVar[tuple[str, ...]] = (MOMENTUM, SECOND)
    NUMBERS: ClassVar[tuple[str, ...]] = (*Muon.NUMBERS, COVARIANCE, BASIS, STEPS)
    CHOICES: ClassVar[tuple[str, ...]] = (*Muon.CHOICES, "_beta2", "_interval")
    capturable = False
    directions_in_kernels = False
    loads_into_state = True  # counts of steps, integers on the host

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        beta2: float = 0.95,
        interval: int = 10,
        **options: Any,
    ) -> None:
        check_range("beta2", beta2)
        if interval < 1:
            raise ValueError(f"interval = {interval}: must be at least 1; try 10")
        self._beta2, self._interval = beta2, interval
        super().__init__(params, lr, momentum, weight_decay, **options)

    def _set_up(self) -> None:
        super()._set_up()
        self._pending: dict[int, dict[str, Tensor]] = {}

    def describe(self) -> str:
        return f"{super().describe()}, basis every {self._interval} steps, update not captured"

    @torch.no_grad()
    def _ready(self) -> Outcome:
        outcome = super()._ready()
        for group in self.param_groups:
            for p in group["params"] if group["orthogonal"] else ():
                state = self.state[p]
                if state.get(BASIS) is None:
                    side = min(len(p), p[0].numel())
                    state[COVARIANCE] = torch.zeros(side, side, device=p.device)
                    state[BASIS] = torch.eye(side, device=p.device)
                if state.get(STEPS) is None:
                    # Steps so far, also skipped ones; on the host, which decides by it.
                    state[STEPS] = torch.zeros((), dtype=torch.int32, device="cpu")
        return outcome

    def _directed(
        self, rows: Sequence[Row], averages: list[Tensor], still: Sequence[Tensor], gates: Gates
    ) -> list[Tensor]:
        if capturing(rows[0].parameter.device):
            raise RunError("SOAP cannot be captured in a CUDA graph", "step outside of the graph")
        gradients = [row.gradient.float() for row in rows]
        if gates.grad_scale is not None:
            scale = gates.grad_scale.reshape(()).float()
            gradients = list(torch._foreach_div(gradients, scale))
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        alike: dict[tuple[int, int], list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault((len(row.parameter), row.parameter[0].numel()), []).append(place)
        moved: list[Tensor] = [torch.empty(0)] * len(rows)
        for places in alike.values():
            own = [rows[i] for i in places]
            basis, covariance = (
                torch.stack([self.state[row.parameter][name] for row in own])
                for name in (BASIS, COVARIANCE)
            )
            g = _stacked([gradients[i] for i in places])
            m = _stacked([averages[i] for i in places])
            v = _stacked([row.second for row in own if row.second is not None])
            rotated = basis.mT @ g
            v = self._beta2 * v + (1 - self._beta2) * rotated.square()
            covariance = self._beta2 * covariance + (1 - self._beta2) * (g @ g.mT)
            u = basis @ ((basis.mT @ m) / v.sqrt().clamp(min=_TINY))
            norms = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (m, u)]
            u = u * (norms[0] / norms[1].clamp(min=_TINY))
            # A square that overflowed must skip the step: the averages would stay infinite.
            sound = torch.isfinite(v.sum((1, 2)) + covariance.sum((1, 2)))[:, None, None]
            u = torch.where(sound, u, torch.nan)
            u = torch.where(torch.stack([still[i] for i in places])[:, None, None], 0.0, u)
            for i, row, *made in zip(places, own, u, v, covariance, strict=True):
                found[i] = _unstacked(made[0], row.parameter)
                second = _unstacked(made[1], row.parameter)
                self._pending[row.index] = {SECOND: second, COVARIANCE: made[2]}
                moved[i] = made[2] @ self.state[row.parameter][BASIS]
        due = [i for i, row in enumerate(rows) if self._is_due(row)]
        for i, basis in zip(due, self._orthogonal([moved[i] for i in due]), strict=True):
            self._pending[rows[i].index][BASIS] = basis
        return found

    def _is_due(self, row: Row) -> bool:
        steps = int(self.state[row.parameter][STEPS])
        return steps < _FIRST_STEPS or steps % self._interval == 0

    def _orthogonal(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonal factors; each rank computes its share."""
        shared = self.shared
        if shared is None or shared.ranks == 1 or not matrices:
            return [torch.linalg.qr(matrix).Q for matrix in matrices]
        owners = share_out([(len(matrix), len(matrix)) for matrix in matrices], shared.ranks)
        sizes = [matrix.numel() for matrix in matrices]
        lengths = [
            sum(size for size, owner in zip(sizes, owners, strict=True) if owner == r)
            for r in range(shared.ranks)
        ]
        rows = shared.rows(max(lengths), matrices[0])
        starts, views = [0] * shared.ranks, []
        for matrix, owner in zip(matrices, owners, strict=True):
            stop = starts[owner] + matrix.numel()
            views.append(rows[owner, starts[owner] : stop].view(matrix.shape))
            starts[owner] = stop
            if owner == shared.rank:
                views[-1].copy_(torch.linalg.qr(matrix).Q)
        shared.gather(rows, lengths)
        return [view.clone() for view in views]

    def _finish(self, rows: list[Row], gates: Gates, outcome: Outcome) -> None:
        """Stores averages, covariances and bases unless the step was skipped."""
        super()._finish(rows, gates, outcome)
        flags = self._allowed(rows, gates, outcome)
        for row in rows:
            state = self.state[row.parameter]
            for name, value in self._pending.pop(row.index, {}).items():
                torch.where(flags[row.index], value, state[name], out=state[name])
            if STEPS in state:
                state[STEPS] += 1


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices whose rows are the smaller side."""
    made = torch.stack([as_matrix(tensor) for tensor in tensors])
    return made.mT if made.shape[1] > made.shape[2] else made


def _unstacked(matrix: Tensor, parameter: Tensor) -> Tensor:
    turned = len(parameter) > parameter[0].numel()
    return like_tensor((matrix.mT if turned else matrix).contiguous(), parameter)
