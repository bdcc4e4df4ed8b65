"""PowerSGD and post-local SGD: torch's own communication hooks, run by the gradient exchange.

The hooks are those of `torch.distributed.algorithms.ddp_comm_hooks`, unchanged. DDP calls a hook with a
`GradBucket`; here `HookTransport` does, with a bucket of the fusion plan in its place. It hands over fp32
gradients without their loss scale, whatever format they are held in, so that a hook's memories keep their
meaning when the scale changes. A hook returns the mean over ranks; gradients here are shares of a mean,
so the result is multiplied by the number of ranks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from paceline.comm.group import Group
from paceline.comm.memory import Memory, Weights
from paceline.comm.settings import CommSettings
from paceline.core.errors import ConfigError

# Freeing callbacks takes microseconds; a call of the hook that failed may keep them in its traceback.
_CALLBACKS_WAIT_S = 2.0
# Start and stop of a tensor in its message, and its rows if it is a matrix, else 0.
Place = tuple[int, int, int]


class GradientBucket:
    """What the hooks use of torch's `GradBucket`."""

    def __init__(self, number: int, tensor: Tensor, places: Sequence[Place]) -> None:
        self._number, self._tensor, self._places = number, tensor, places

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._tensor

    def gradients(self) -> list[Tensor]:
        """Views; a convolution's weight is the matrix of its filters, in whichever order its elements
        lie in memory."""
        return [
            self._tensor[start:stop].view(rows, -1) if rows else self._tensor[start:stop]
            for start, stop, rows in self._places
        ]

    def is_last(self) -> bool:
        """The transport ends a step itself (`Hook.end_step`), once all buckets are through."""
        return False


class _LastBucket:
    def is_last(self) -> bool:
        return True


class Hook(Protocol):
    """One of torch's hooks with its state."""

    @property
    def memory(self) -> Memory: ...

    @property
    def is_local(self) -> bool:
        """Whether gradients of this step are not summed over all ranks."""
        ...

    def run(self, bucket: GradientBucket) -> Tensor:
        """The mean that the hook makes of a bucket."""
        ...

    def end_step(self) -> None: ...


class _PowerSgdState(powerSGD_hook.PowerSGDState):
    """Torch's state. Without `__slots__` of its own, so that it can be weakly referenced."""

    def copy(self) -> _PowerSgdState:
        """Shares the tables; torch's `__getstate__` logs a warning."""
        found = _PowerSgdState.__new__(_PowerSgdState)
        for slot in powerSGD_hook.PowerSGDState.__slots__:
            setattr(found, slot, getattr(self, slot))
        return found


class PowerSgd(Memory):
    """`powerSGD_hook`: a matrix of gradients becomes the product of two thin ones, and what that cuts off
    is added to the next step's gradients. The error is of this rank; the thin matrices are the next
    step's start."""

    kind = "PowerSGD errors"
    is_local = False

    def __init__(self, settings: CommSettings, seed: int = 0) -> None:
        super().__init__()
        self._state = _PowerSgdState(
            process_group=None,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=settings.powersgd_start_step,
            random_seed=seed,
            # A column of zeros, of a layer without gradients in this step, must not become NaN.
            orthogonalization_epsilon=1e-8,
        )
        self._before: dict[str, Any] | None = None

    @property
    def memory(self) -> Memory:
        return self

    def run(self, bucket: GradientBucket) -> Tensor:
        if self._before is None:
            self._before = self._copy()
        try:
            found: Tensor = powerSGD_hook.powerSGD_hook(self._state, bucket).wait()
        finally:
            self._await_callbacks()
        return found

    def _await_callbacks(self) -> None:
        """Waits until the backend's thread has freed the hook's callbacks, which it does some time after
        the result is there. They refer to the process group: if that is destroyed in between, theirs is
        the last reference, and a thread of Gloo that destroys its own group aborts the process."""
        used = weakref.ref(self._state)
        self._state = self._state.copy()  # the callbacks refer to the old one as well
        deadline = time.monotonic() + _CALLBACKS_WAIT_S
        while used() is not None and time.monotonic() < deadline:
            time.sleep(1e-5)

    def end_step(self) -> None:
        self._state.maybe_increase_iter(_LastBucket())  # type: ignore[no-untyped-call]

    def settle(self, discard: Tensor) -> None:
        # Waits for the device: the hook keeps its memories in Python.
        if self._before is not None and bool(discard > 0):
            self._load(self._before)
        self._before = None

    @property
    def state_bytes(self) -> int:
        state = self._state
        kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        return sum(value.nbytes for table in kept for value in table.values())

    def step_bytes(self, gradient_bytes: float) -> float:
        rate, _, _ = self._state.compression_stats()  # type: ignore[no-untyped-call]
        whole = sum(error.nbytes for error in self._state.error_dict.values())
        return whole / rate if rate else gradient_bytes  # 0 before it starts

    def _copy(self) -> dict[str, Any]:
        state = self._state
        return {
            # Torch replaces errors, and overwrites the thin matrices.
            "errors": dict(state.error_dict),
            "ps": {number: p.clone() for number, p in state.p_memory_dict.items()},
            "qs": {number: q.clone() for number, q in state.q_memory_dict.items()},
            "iter": state.iter,
            "rng": state.rng.get_state(),
        }

    def _load(self, saved: Mapping[str, Any]) -> None:
        state = self._state
        state.error_dict, state.p_memory_dict = dict(saved["errors"]), dict(saved["ps"])
        state.q_memory_dict, state.iter = dict(saved["qs"]), int(saved["iter"])
        state.rng.set_state(saved["rng"])

    def state(self) -> dict[str, Any]:
        found = self._copy()
        _, keys, position, has_gauss, gauss = found.pop("rng")
        numbers = torch.from_numpy(keys.astype(np.int64))
        for name in ("errors", "ps", "qs"):
            found[name] = {number: value.cpu() for number, value in found[name].items()}
        return {**found, "rng": [numbers, int(position), int(has_gauss), float(gauss)]}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        numbers, *rest = saved["rng"]
        rng = ("MT19937", numbers.numpy().astype(np.uint32), *rest)
        device = torch.device("cpu") if self.scale is None else self.scale.device
        moved = {
            name: {number: value.to(device) for number, value in saved[name].items()}
            for name in ("errors", "ps", "qs")
        }
        self._load({**saved, **moved, "rng": rng})
        self._before = None


class PostLocalSgd(Memory):
    """`post_localSGD_hook` and `PeriodicModelAverager`: from a step on, ranks update their own weights by
    their own gradients, and average the weights every few steps. Momenta stay each rank's own."""

    kind = "weights of each rank"
    ranks_differ = True

    def __init__(self, settings: CommSettings, group: Group) -> None:
        super().__init__()
        self._group, start = group, settings.local_start_step
        together = settings.local_group_size
        if group.world_size % together:
            raise ConfigError(
                "comm.local_group_size", together, f"does not divide {group.world_size} ranks",
                "use 1, or a divisor",
            )  # fmt: skip
        subgroup = None
        if 1 < together < group.world_size:
            subgroup, _ = dist.new_subgroups(group_size=together)  # type: ignore[no-untyped-call]
        self._state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None,
            subgroup=subgroup if together < group.world_size else dist.group.WORLD,
            start_localSGD_iter=start,
            post_local_gradient_allreduce=together > 1,
        )
        self._averager = PeriodicModelAverager(settings.local_steps, warmup_steps=start)
        self._weights: Weights | None = None

    @property
    def memory(self) -> Memory:
        return self

    @property
    def is_local(self) -> bool:
        return bool(self._state.iter >= self._state.start_localSGD_iter)

    def bind(self, weights: Weights) -> None:
        self._weights = weights

    def run(self, bucket: GradientBucket) -> Tensor:
        found: Tensor = post_localSGD_hook.post_localSGD_hook(self._state, bucket).wait()
        return found

    def end_step(self) -> None:
        """Counted in `settle`: a step that leaves no trace does not count."""

    def settle(self, discard: Tensor) -> None:
        # Waits for the device: torch counts steps in Python.
        if bool(discard > 0):
            return
        self._state.maybe_increase_iter(_LastBucket())  # type: ignore[no-untyped-call]
        assert self._weights is not None
        if self._averages_now:
            self._group.watched("the average of the ranks' weights", self._average)
        else:
            self._averager.average_parameters([])  # counts

    @property
    def _averages_now(self) -> bool:
        done = int(self._averager.step) - int(self._averager.warmup_steps)
        return done >= 0 and done % int(self._averager.period) == 0

    def _average(self) -> None:
        """Torch's averager puts new memory under parameters with a gradient; the weights here must keep
        theirs, so it gets copies."""
        assert self._weights is not None
        copies = [nn.Parameter(value) for value in self._weights.copy()]
        for copy in copies:
            copy.grad = copy.detach()
        self._averager.average_parameters(copies)
        self._weights.load([copy.detach() for copy in copies])

    def _mean(self) -> list[Tensor]:
        """The ranks' mean, in the averager's arithmetic, without counting a step."""
        assert self._weights is not None
        own = self._weights.copy()
        flat = torch.cat([value.reshape(-1) for value in own])
        flat /= self._group.world_size
        self._group.all_reduce_sum(flat)
        sizes = [value.numel() for value in own]
        parts = torch.split(flat, sizes)
        return [part.view_as(value) for part, value in zip(parts, own, strict=True)]

    def step_bytes(self, gradient_bytes: float) -> float:
        if not self.is_local:
            return gradient_bytes
        assert self._weights is not None
        weights = sum(value.nbytes for value in self._weights.masters)
        inside = 1 if self._state.post_local_gradient_allreduce else 0
        return weights * (inside + 1 / int(self._averager.period))

    @contextmanager
    def shared(self) -> Iterator[None]:
        assert self._weights is not None
        own = self._weights.copy()
        self._weights.load(self._mean())
        try:
            yield
        finally:
            self._weights.load(own)

    def conclude(self) -> None:
        assert self._weights is not None
        self._weights.load(self._mean())

    def state(self) -> dict[str, Any]:
        assert self._weights is not None
        return {
            "weights": [value.cpu() for value in self._weights.copy()],
            "momenta": self._weights.momenta(),
            "iter": int(self._state.iter),
            "step": int(self._averager.step),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        assert self._weights is not None
        self._weights.load_momenta(saved["momenta"])
        self._weights.load(saved["weights"])
        self._state.iter, self._averager.step = int(saved["iter"]), int(saved["step"])


def create_hook(settings: CommSettings, group: Group) -> Hook:
    """A collective: it may make process groups."""
    if settings.hook == "powersgd":
        return PowerSgd(settings)
    assert settings.hook == "post_local_sgd", settings.hook
    return PostLocalSgd(settings, group)


class HookReducer:
    """Sums the messages of a step by a hook. The signals, a message without tensors, end the step; they
    are always summed over all ranks."""

    def __init__(self, group: Group, hook: Hook) -> None:
        self._group, self.hook = group, hook
        self._numbers: dict[int, int] = {}
        self._work: dict[int, Tensor] = {}
        # Of this step, where ranks train apart: whether a gradient is not finite, and where to say so.
        self._bad: Tensor | None = None
        self._marks: list[tuple[Tensor, Tensor]] = []

    def run(self, tensor: Tensor, places: Sequence[Place]) -> None:
        """Replaces `tensor` by its sum over ranks, or, where ranks train apart, by this rank's gradient
        in the same unit."""
        if not places:
            self._end_step(tensor)
            return
        key = tensor.data_ptr()
        number = self._numbers.setdefault(key, len(self._numbers))
        work = self._work.get(number)
        if work is None:
            work = self._work[number] = torch.empty_like(tensor, dtype=torch.float32)
        scale = self.hook.memory.scale
        work.copy_(tensor)
        if scale is not None:
            work.div_(scale)
        mean = self._group.watched(
            "all-reduce", lambda: self.hook.run(GradientBucket(number, work, places))
        )
        mean = mean * self._group.world_size
        tensor.copy_(mean if scale is None else mean * scale)
        if self.hook.is_local:
            # As the optimizer will see it: the factor may overflow the tensor's own format.
            bad = (~torch.isfinite(tensor)).any().float()
            self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
            firsts = torch.tensor([start for start, _, _ in places], device=tensor.device)
            self._marks.append((tensor, firsts))

    def _end_step(self, signals: Tensor) -> None:
        self._group.all_reduce_sum(signals, wait=False)
        if self._bad is not None:
            # A gradient that is not finite makes every rank skip the step, also where ranks train apart.
            self._group.all_reduce_sum(self._bad, wait=False)
            for tensor, firsts in self._marks:
                tensor[firsts] = torch.where(self._bad > 0, torch.nan, tensor[firsts])
        self._bad, self._marks = None, []
        self.hook.end_step()
