"""Asynchronous SGD with bounded staleness: a step on a parameter server.

Before a step `Asynchronous` pulls the weights, after the backward pass it pushes this rank's gradient,
and the servers apply it by the run's own optimizer. Ranks meet at an evaluation and at a checkpoint only
(`pause`); in between they drift apart by `run.asynchronous.staleness` steps at most.

A push is the mean gradient of this rank's part of the global batch, applied at 1/p of the learning rate:
p pushes move the weights as far as one synchronous step, also with weight decay and layer-wise rates.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.alternatives.asynchronous.parameter_server import (
    Clock,
    ParameterServer,
    Pushed,
    counts_of,
    cut_shards,
    histogram_row,
)
from paceline.alternatives.asynchronous.settings import AsynchronousSettings
from paceline.comm.exchange import SIGNALS, GradientExchange
from paceline.comm.group import Group
from paceline.comm.transport import Notify, Piece, Transport, Wait
from paceline.config import RunConfig
from paceline.core.errors import RunError
from paceline.data import BatchPlan
from paceline.optim.base import MasterOptimizer
from paceline.optim.schedules import set_rate
from paceline.train.exchange_plan import ExchangeParts
from paceline.train.micro_step import MicroStep
from paceline.train.step_parts import StepParts, create_master_optimizer
from paceline.train.strategy import EXTRAS, Pending, Strategy, parameter_names

MakeOptimizer = Callable[[nn.Module], MasterOptimizer]


class LocalTransport(Transport):
    """Sends nothing: every rank keeps its own gradients and signals."""

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        begun()
        ended()
        return lambda: None


class Asynchronous(Strategy):
    """The run's optimizer never steps here, but holds the state of the servers after `pause`."""

    name = "asynchronous"
    several_ranks = True
    same_weights = False
    stops_within_step = False
    one_batch = "run.strategy = 'asynchronous' has one"
    counts = {"staleness": ("Staleness", "updates by other ranks", "pushes")}  # noqa: RUF012

    def __init__(self, config: RunConfig, group: Group) -> None:
        super().__init__(config, group)
        self._settings = config.run.of(self.name, AsynchronousSettings)
        self.lag = self._settings.staleness
        self._started = self._closed = False

    @classmethod
    def outline(cls, config: RunConfig, ranks: int) -> dict[str, str]:
        settings = config.run.of(cls.name, AsynchronousSettings)
        servers = min(settings.servers or ranks, ranks)
        return {
            "exchange": f"asynchronous, {servers} parameter server(s), staleness of "
            f"{settings.staleness} steps"
        }

    def create_exchange(
        self, planned: ExchangeParts, *, accumulate: bool, graphs: bool, squares: bool
    ) -> GradientExchange:
        return planned.create(
            self.group, accumulate=accumulate, graphs=graphs, squares=squares,
            transport=LocalTransport(),
        )  # fmt: skip

    def attach(self, parts: StepParts, micro: MicroStep) -> None:
        """A collective: it makes process groups."""
        group = self.group
        self._names = parameter_names(parts.exchange, parts.optimizer)
        self._exchange, self._batch_norm = parts.exchange, parts.batch_norm
        self._weights = Weights(parts.optimizer)
        self._parameters = parts.optimizer.parameters()
        sizes = [p.numel() for p in self._parameters]
        shards = cut_shards(sizes, group.world_size, self._settings.servers)
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
        full = replace(parts.policy, dtype=torch.float32)
        settings = replace(self.config.optim, fused="auto")
        self._mirror = _Mirror(
            parts.model, lambda model: create_master_optimizer(settings, model, full, 0.1)
        )
        self._own = next((shard for shard in shards if shard.rank == group.rank), None)
        self._exposed_s = 0.0

    def begin(self, step: int, plan: BatchPlan) -> None:
        """Pulls the weights before a step."""
        if not self._started:
            self._start()
        started = time.perf_counter()
        self.group.watched("a pull of weights", lambda: self._server.pull(self._flat))
        self._weights.load(self._views(self._flat))
        self._exposed_s = time.perf_counter() - started

    def finish(self, rate: float, hyperparameters: Mapping[str, float] | None) -> Pending:
        """Pushes the gradient that `GradientExchange.reduce` has left, unless this rank has failed.
        Servers take the rate of a push, and no other values of the schedule."""
        if hyperparameters:
            raise RunError(
                f"parameter servers accept the rate only, not {', '.join(hyperparameters)}",
                "use another optim.schedule or optim.name",
            )
        tail = self._exchange.tail.detach().cpu()
        pushed: Pushed | None = None
        started = time.perf_counter()
        failed = bool(tail[SIGNALS.index("fault")]) or bool(tail[SIGNALS.index("abandon")])
        if not failed and bool(self._exchange.uses.sum() > 0):
            ranks = self.group.world_size
            for view, parameter in zip(self._views(self._gradient), self._parameters, strict=True):
                assert parameter.grad is not None
                view.copy_(parameter.grad)
            self._gradient.mul_(ranks)
            pushed = self.group.watched(
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
        return self._pending(sums, self._exposed_s)

    def _pending(self, sums: Tensor, exposed_s: float) -> Pending:
        """The outcome of a step, once all ranks have done it and `sums` are of all of them."""
        signals = len(SIGNALS)
        row = torch.zeros(signals + len(EXTRAS) + len(self._names))
        row[signals + EXTRAS.index("scale")] = 1.0
        arrived = self._clock.tick(sums)
        fields: dict[str, Any] = {}

        def wait() -> None:
            arrived()
            row[:signals] = sums[:signals]
            row[signals + EXTRAS.index("overflow")] = sums[signals]
            fields["staleness"] = counts_of(sums[signals + 1 :])

        return Pending(row=row, wait=wait, exposed=lambda: exposed_s, fields=fields)

    @property
    def state_bytes(self) -> int:
        """Of host memory: pulled weights, pushed gradient, and the server's weights and momenta."""
        mirror = self._mirror.state_of(tuple(range(len(self._parameters))))
        held = sum(tensor.nbytes for tensor in mirror)
        return held + 2 * self._flat.nbytes + self._gradient.nbytes

    def step_bytes(self, gradient_bytes: float) -> float:
        """Weights are pulled and gradients pushed, in fp32."""
        return float(self._flat.nbytes + self._gradient.nbytes)

    def pause(self) -> None:
        """When all ranks have done the same steps: the model and its optimizer get the weights and the
        state of the servers, equal on all ranks."""
        if not self._started:
            return
        self.group.watched("a pull of weights", lambda: self._server.pull(self._flat))
        self.group.watched("the servers' state", self._gather_momenta)
        self._weights.load_momenta(Weights(self._mirror.optimizer).momenta())
        self._weights.load(self._views(self._flat))

    def conclude(self) -> None:
        """Servers stop."""
        if self._started and not self._closed:
            self._closed = True
            self.group.watched("the end of the servers", self._server.close)

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
