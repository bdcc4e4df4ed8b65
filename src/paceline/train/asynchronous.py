"""Asynchronous SGD with bounded staleness: the update of a step, on a parameter server.

`AsynchronousUpdate` stands in for `Update`. Before a step it pulls the weights, after the backward pass
it pushes this rank's gradient, and the servers apply it by the run's own optimizer. Ranks meet at an
evaluation and at a checkpoint only (`settle`); in between they drift apart by `comm.staleness` steps at
most.

A push is the mean gradient of this rank's part of the global batch, applied at 1/p of the learning rate:
p pushes move the weights as far as one synchronous step, also with weight decay and layer-wise rates.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.exchange import SIGNALS, GradientExchange
from paceline.comm.group import Group
from paceline.comm.parameter_server import (
    Clock,
    ParameterServer,
    Pushed,
    counts_of,
    cut_shards,
    histogram_row,
)
from paceline.comm.settings import CommSettings
from paceline.optim.base import MasterOptimizer
from paceline.optim.schedule import set_rate
from paceline.train.batch_norm import BatchNormState
from paceline.train.update import EXTRAS, parameter_names

MakeOptimizer = Callable[[nn.Module], MasterOptimizer]


@dataclass
class Outcome:
    """The outcome of a step, once all ranks have done it; `synchronize` waits for them."""

    row: Tensor
    wait: Callable[[], None]
    sums: Tensor
    staleness: dict[str, int] = field(default_factory=dict)

    def synchronize(self) -> None:
        self.wait()
        signals = len(SIGNALS)
        self.row[:signals] = self.sums[:signals]
        self.row[signals + EXTRAS.index("overflow")] = self.sums[signals]
        self.staleness = counts_of(self.sums[signals + 1 :])


class AsynchronousUpdate:
    """`optimizer` belongs to the model of this rank; it never steps, but holds the state of the servers
    after `settle`."""

    asynchronous = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: MasterOptimizer,
        exchange: GradientExchange,
        batch_norm: BatchNormState,
        group: Group,
        settings: CommSettings,
        make_optimizer: MakeOptimizer,
    ) -> None:
        """A collective. `make_optimizer` makes one like `optimizer` for the servers' copy of a model."""
        self.optimizer = optimizer
        self.names = parameter_names(exchange, optimizer)
        self._exchange, self._batch_norm, self._group = exchange, batch_norm, group
        self._weights = Weights(optimizer)
        self._parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self.lag = settings.staleness
        sizes = [p.numel() for p in self._parameters]
        shards = cut_shards(sizes, group.world_size, settings.servers)
        self._server = group.watched(
            "the creation of process groups", lambda: ParameterServer(group, shards)
        )
        self._clock = group.watched("the creation of process groups", lambda: Clock(group))
        # Where each tensor lies in the flat weights: those of a shard lie side by side.
        self._starts = [0] * len(sizes)
        at = 0
        for shard in shards:
            for number in shard.tensors:
                self._starts[number] = at
                at += sizes[number]
        self._flat = torch.zeros(at)
        self._gradient = torch.zeros(at)
        self._mirror = _Mirror(model, make_optimizer)
        self._own = next((shard for shard in shards if shard.rank == group.rank), None)
        self._started = self._closed = False
        self._exposed_s = 0.0
        self._latest: Outcome | None = None

    def begin(self, step: int) -> None:
        """Pulls the weights before a step."""
        if not self._started:
            self._start()
        started = time.perf_counter()
        self._group.watched("a pull of weights", lambda: self._server.pull(self._flat))
        self._weights.load(self._views(self._flat))
        self._exposed_s = time.perf_counter() - started

    def run(self, rate: float, others: Mapping[str, float] | None = None) -> None:
        """Pushes the gradient that `GradientExchange.reduce` has left, unless this rank has failed.
        Servers take the rate of a push, and no `others` of the schedule's values."""
        assert not others, "refused by RunConfig"
        tail = self._exchange.tail.detach().cpu()
        pushed: Pushed | None = None
        started = time.perf_counter()
        failed = bool(tail[SIGNALS.index("fault")]) or bool(tail[SIGNALS.index("abandon")])
        if not failed and bool(self._exchange.uses.sum() > 0):
            ranks = self._group.world_size
            for view, parameter in zip(self._views(self._gradient), self._parameters, strict=True):
                assert parameter.grad is not None
                view.copy_(parameter.grad)
            self._gradient.mul_(ranks)
            pushed = self._group.watched(
                "a push of gradients", lambda: self._server.push(self._gradient, rate / ranks)
            )
        self._exposed_s += time.perf_counter() - started
        refused = pushed is not None and pushed.refused
        self._batch_norm.discard_if(
            torch.tensor(float(refused), device=self._batch_norm.flat.device)
        )
        sums = torch.cat(
            [
                tail[: len(SIGNALS)],
                torch.tensor([float(refused)]),
                histogram_row(None if pushed is None else pushed.staleness),
            ]
        )
        row = torch.zeros(len(SIGNALS) + len(EXTRAS) + len(self.names))
        row[len(SIGNALS) + EXTRAS.index("scale")] = 1.0
        self._latest = Outcome(row, self._clock.tick(sums), sums)

    def outcome(self) -> Outcome:
        """Of the step that `run` has just ended."""
        assert self._latest is not None
        return self._latest

    @property
    def exposed(self) -> Callable[[], float]:
        """How long the latest step waited for servers."""
        waited = self._exposed_s
        return lambda: waited

    @property
    def state_bytes(self) -> int:
        """Of host memory: pulled weights, pushed gradient, and the server's weights and momenta."""
        mirror = self._mirror.state_of(tuple(range(len(self._parameters))))
        held = sum(tensor.nbytes for tensor in mirror)
        return held + 2 * self._flat.nbytes + self._gradient.nbytes

    def step_bytes(self, gradient_bytes: float) -> float:
        """Weights are pulled and gradients pushed, in fp32."""
        return float(self._flat.nbytes + self._gradient.nbytes)

    def settle(self) -> None:
        """At a pause, when all ranks have done the same steps: the model and its optimizer get the
        weights and the state of the servers, equal on all ranks. A collective."""
        if not self._started:
            return
        self._group.watched("a pull of weights", lambda: self._server.pull(self._flat))
        self._group.watched("the servers' state", self._gather_momenta)
        self._weights.load_momenta(Weights(self._mirror.optimizer).momenta())
        self._weights.load(self._views(self._flat))

    def conclude(self) -> None:
        """At the end of the run: servers stop."""
        if self._started and not self._closed:
            self._closed = True
            self._group.watched("the end of the servers", self._server.close)

    def release(self) -> None:
        """Lets the servers end, also after an error. Holds no CUDA graph."""
        if self._started and not self._closed:
            self._closed = True
            self._server.leave()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(self._starts, self._parameters, strict=True)
        ]

    def _start(self) -> None:
        """From the weights and the optimizer's state of this rank, new or of a checkpoint."""
        self._started = True
        for view, master in zip(self._views(self._flat), self._weights.masters, strict=True):
            view.copy_(master.detach())
        self._mirror.load(self._weights)
        if self._own is None:
            return
        weights = self._flat[self._own.start : self._own.stop].clone()
        places = [self._starts[number] - self._own.start for number in self._own.tensors]
        self._mirror.take(self._own.tensors, weights, places)
        self._server.serve(weights, self._mirror.apply)

    def _gather_momenta(self) -> None:
        """Each server's state of its tensors, on all ranks; in one message for each server."""
        for shard in self._server.shards:
            tensors = self._mirror.state_of(shard.tensors)
            if not tensors:
                continue
            row = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
            dist.broadcast(row, src=shard.rank, group=self._server.process_group)
            if shard is self._own:
                continue
            parts = torch.split(row, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


class _Mirror:
    """The servers' copy of the model on the CPU in fp32, with an optimizer like the run's. A gradient is
    given to this rank's tensors only; the others stay as they are."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        copied = copy.deepcopy(model).to("cpu", torch.float32)
        # Contiguous: a shard of the flat weights has no other order.
        copied = copied.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(copied)
        self.optimizer.prepare()
        self._parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self._own: list[tuple[Any, slice]] = []

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        Weights(self.optimizer).load_momenta(weights.momenta())
        Weights(self.optimizer).load([master.cpu() for master in weights.masters])

    def take(self, numbers: tuple[int, ...], weights: Tensor, places: list[int]) -> None:
        """The tensors `numbers` become views of `weights`."""
        for number, place in zip(numbers, places, strict=True):
            parameter = self._parameters[number]
            where = slice(place, place + parameter.numel())
            parameter.data = weights[where].view(parameter.shape)
            self._own.append((parameter, where))

    def apply(self, gradient: Tensor, rate: float) -> bool:
        for parameter, where in self._own:
            parameter.grad = gradient[where].view(parameter.shape)
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        return not bool(self.optimizer.overflow > 0)

    def state_of(self, numbers: tuple[int, ...]) -> list[Tensor]:
        found = []
        for number in numbers:
            state = self.optimizer.state[self._parameters[number]]
            found += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        return found


class Weights:
    """The trained weights of this rank: fp32 masters, and the parameters that the model computes with,
    which may be rounded or the masters themselves."""

    def __init__(self, optimizer: Any) -> None:
        """Of a `paceline.optim.MasterOptimizer`."""
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        found: list[Tensor] = self._optimizer.masters()
        return found

    @torch.no_grad()
    def copy(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for master, parameter, value in zip(self.masters, parameters, values, strict=True):
            master.copy_(value)
            if parameter is not master:
                parameter.copy_(value)

    def momenta(self) -> dict[Any, dict[str, Any]]:
        """The optimizer's own state, by the number of the parameter, without masters."""
        found: dict[Any, dict[str, Any]] = self._optimizer.state_dict()["state"]
        return {
            number: {key: value for key, value in entry.items() if key != "master"}
            for number, entry in found.items()
        }

    def load_momenta(self, saved: Mapping[Any, dict[str, Any]]) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": dict(saved), "param_groups": groups})
