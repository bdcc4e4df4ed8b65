"""Optimizers of others with their documented defaults, as factories for `pl.Trainer(optimizer=...)`.

Biases and norms have no weight decay, as with Paceline's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]
Factory = Callable[[Groups], torch.optim.Optimizer]
ADAMW_RATE, ADAMW_DECAY = 1e-3, 1e-2
SGD_RATE, SGD_MOMENTUM, SGD_DECAY = 0.1, 0.9, 5e-4
MUON_RATE, MUON_DECAY = 1e-3, 0.1
SCHEDULE_FREE_RATE, PRODIGY_RATE = 2.5e-3, 1.0
# Peak rate and schedule of each peer.
RATES = {
    "torch-adamw": ADAMW_RATE, "torch-sgd": SGD_RATE, "torch-muon": MUON_RATE,
    "schedule-free": SCHEDULE_FREE_RATE, "prodigy": PRODIGY_RATE,
}  # fmt: skip
SCHEDULES = {name: "constant" if name == "schedule-free" else "cosine" for name in RATES}


def _with_decay(groups: Groups, decay: float) -> Groups:
    """Returns the groups with `decay` instead of the weight decay of the settings."""
    return [group | {"weight_decay": decay if group["weight_decay"] else 0.0} for group in groups]


def _as_matrix(tensor: Tensor) -> Tensor:
    """Returns a convolution filter as a matrix with one row per output channel."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.reshape(len(tensor), -1)


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for hidden matrices and filters, `torch.optim.AdamW` for all others.

    The first layer counts as hidden; the last linear layer does not. Rates of Muon are adjusted with
    `match_rms_adamw`, which PyTorch documents for using AdamW's rate.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": MUON_RATE})
        tensors = [p for group in self.param_groups for p in group["params"]]
        matrices = [p for p in tensors if p.dim() in (2, 4)]
        last = [p for p in matrices if p.dim() == 2][-1:]
        hidden = [p for p in matrices if not any(p is other for other in last)]
        self.views = [(p, nn.Parameter(_as_matrix(p.detach()))) for p in hidden]
        assert all(p.data_ptr() == view.data_ptr() for p, view in self.views)
        ids = {id(p) for p in hidden}
        rest = [
            {"params": [p], "weight_decay": ADAMW_DECAY if group["weight_decay"] else 0.0}
            for group in self.param_groups for p in group["params"] if id(p) not in ids
        ]  # fmt: skip
        self.muon = torch.optim.Muon(
            [view for _, view in self.views], lr=MUON_RATE, weight_decay=MUON_DECAY,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self.adamw = torch.optim.AdamW(rest, lr=ADAMW_RATE)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes one update of both parts at the rate of the first group."""
        for p, view in self.views:
            view.grad = None if p.grad is None else _as_matrix(p.grad)
        for inner in (self.muon, self.adamw):
            for group in inner.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            inner.step()  # type: ignore[no-untyped-call,unused-ignore]


def _schedule_free(groups: Groups, total_steps: int) -> torch.optim.Optimizer:
    """Creates Schedule-Free AdamW, which switches to its average after the last step."""
    from schedulefree import AdamWScheduleFree

    class ScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
        def __init__(self, groups: Groups) -> None:
            super().__init__(groups, lr=SCHEDULE_FREE_RATE)
            self.steps_left = total_steps
            self.train()

        def step(self, closure: Any = None) -> None:
            super().step()
            self.steps_left -= 1
            if self.steps_left == 0:
                self.eval()

    created: torch.optim.Optimizer = ScheduleFree(groups)
    return created


def _prodigy(groups: Groups) -> torch.optim.Optimizer:
    """Creates Prodigy as its README advises for training with a warm-up."""
    from prodigyopt import Prodigy

    created: torch.optim.Optimizer = Prodigy(groups, lr=PRODIGY_RATE, safeguard_warmup=True)
    return created


def factory(name: str, total_steps: int) -> Factory:
    """Returns the factory of a peer for a run of `total_steps`."""

    def create(groups: Groups) -> torch.optim.Optimizer:
        if name == "torch-adamw":
            return torch.optim.AdamW(_with_decay(groups, ADAMW_DECAY), lr=ADAMW_RATE)
        if name == "torch-sgd":
            own = _with_decay(groups, SGD_DECAY)
            return torch.optim.SGD(own, lr=SGD_RATE, momentum=SGD_MOMENTUM)
        if name == "torch-muon":
            return MuonWithAdamW(groups)
        if name == "schedule-free":
            return _schedule_free(_with_decay(groups, 0.0), total_steps)
        return _prodigy(_with_decay(groups, 0.0))

    return create
