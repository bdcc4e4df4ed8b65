"""Implements the strategy `asynchronous`: SGD with bounded staleness on parameter servers.

`Asynchronous` pulls the weights before a step and pushes this rank's gradient after the backward pass.
The servers apply the gradient with the optimizer of the run. Ranks synchronize only at evaluations and
checkpoints (`pause`). Between these points the fastest rank is at most `run.asynchronous.staleness` steps
ahead of the slowest rank.

A push is the mean gradient of this rank's part of the global batch, applied at 1/p of the learning
rate for p ranks. Therefore p pushes, one per rank, move the weights as far as one synchronous step,
even with weight decay and layer-wise rates.
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
from paceline.optim.state import MASTER
from paceline.train.exchange_plan import ExchangeParts
from paceline.train.micro_step import MicroStep
from paceline.train.step_parts import StepParts, create_master_optimizer
from paceline.train.strategy import EXTRAS, Pending, Strategy, parameter_names

MakeOptimizer = Callable[[nn.Module], MasterOptimizer]


class LocalTransport(Transport):
    """Sends nothing, because asynchronous ranks send gradients to parameter servers instead."""

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        begun()
        ended()
        return lambda: None


class Asynchronous(Strategy):
    """Trains asynchronously: pulls weights, pushes gradients, and bounds the staleness.

    The run's own optimizer makes no steps. `pause` copies the servers' state into this optimizer.
    """

    name = "asynchronous"
    several_ranks = True
    same_weights = False
    stops_within_step = False
    one_batch = "run.strategy = 'asynchronous' needs a constant batch"
    fixed_ranks = "each rank has weights of its own"
    equal_parts = "each rank pushes a gradient of its own in each step"
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
        """Creates the parameter server and the clock. All ranks call this."""
        group = self.group
        self._names = parameter_names(parts.exchange, parts.optimizer)
        self._exchange, self._batch_norm = parts.exchange, parts.batch_norm
        self._optimizer = parts.optimizer
        self._parameters = parts.optimizer.parameters()
        sizes = [p.numel() for p in self._parameters]
        shards = cut_shards(sizes, group.world_size, self._settings.servers)
        self._server = group.watched(
            "the creation of process groups", lambda: ParameterServer(group, shards)
        )
        self._clock = group.watched("the creation of process groups", Clock)
        # Offset of each tensor in the flat weights, in which the tensors of a shard are adjacent.
        self._starts = [0] * len(sizes)
        start = 0
        for shard in shards:
            for number in shard.tensors:
                self._starts[number] = start
                start += sizes[number]
        self._flat = torch.zeros(start)
        self._gradient = torch.zeros(start)
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
        _load_weights(self._optimizer, self._views(self._flat))
        self._exposed_s = time.perf_counter() - started

    def finish(self, rate: float, hyperparameters: Mapping[str, float] | None) -> Pending:
        """Pushes this rank's gradient to the servers, unless this rank has failed.

        Servers receive the learning rate with each push, but no other scheduled values.
        """
        if hyperparameters:
            raise RunError(
                f"asynchronous training does not support {', '.join(hyperparameters)} of the schedule",
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
        exposed_s, signals = self._exposed_s, len(SIGNALS)
        row = torch.zeros(signals + len(EXTRAS) + len(self._names))
        row[signals + EXTRAS.index("scale")] = 1.0
        arrived = self._clock.tick(sums)
        fields: dict[str, Any] = {}

        def wait() -> None:
            arrived()  # `sums` now contains the sums over ranks
            row[:signals] = sums[:signals]
            row[signals + EXTRAS.index("overflow")] = sums[signals]
            fields["staleness"] = counts_of(sums[signals + 1 :])

        return Pending(row=row, wait=wait, exposed=lambda: exposed_s, fields=fields)

    @property
    def state_bytes(self) -> int:
        """Host memory in bytes: pulled weights, pushed gradient, and the server's weights and state."""
        mirror = self._mirror.state_of(tuple(range(len(self._parameters))))
        held = sum(tensor.nbytes for tensor in mirror)
        return held + 2 * self._flat.nbytes + self._gradient.nbytes

    def step_bytes(self, gradient_bytes: float) -> float:
        """Returns the bytes that a step transfers: pulled weights and pushed gradients in fp32."""
        return float(self._flat.nbytes + self._gradient.nbytes)

    def pause(self) -> None:
        """Copies the servers' weights and state to the model and the optimizer of every rank.

        The caller ensures that all ranks have finished the same steps, so all ranks get equal values.
        """
        if not self._started:
            return
        self.group.watched("a pull of weights", lambda: self._server.pull(self._flat))
        self.group.watched("the servers' state", self._gather_momenta)
        _copy_state(self._mirror.optimizer, self._optimizer)
        _load_weights(self._optimizer, self._views(self._flat))

    def conclude(self) -> None:
        """Stops the servers at the end of the run. All ranks call this."""
        if self._started and not self._closed:
            self._closed = True
            self.group.watched("the end of the servers", self._server.close)

    def release(self) -> None:
        """Stops the servers after an error, without waiting for lost ranks."""
        if self._started and not self._closed:
            self._closed = True
            self._server.leave()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(self._starts, self._parameters, strict=True)
        ]

    def _start(self) -> None:
        """Starts this rank's server, with new weights and state or those of a checkpoint."""
        self._started = True
        masters = self._optimizer.masters()
        for view, master in zip(self._views(self._flat), masters, strict=True):
            view.copy_(master.detach())
        _copy_state(self._optimizer, self._mirror.optimizer)
        _load_weights(self._mirror.optimizer, masters)
        if self._own is None:
            return
        weights = self._flat[self._own.start : self._own.stop].clone()
        places = [self._starts[number] - self._own.start for number in self._own.tensors]
        self._mirror.take(self._own.tensors, weights, places)
        self._server.serve(weights, self._mirror.apply)

    def _gather_momenta(self) -> None:
        """Broadcasts the optimizer state of each server to all ranks, in one message per server."""
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
    """The servers' fp32 copy of the model on the CPU, with a copy of the run's optimizer.

    Only the tensors that this rank serves receive gradients.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        copied = copy.deepcopy(model).to("cpu", torch.float32)
        # Contiguous, like the shards of the flat weights.
        copied = copied.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(copied)
        self.optimizer.prepare()
        self._parameters = self.optimizer.parameters()
        self._own: list[tuple[Any, slice]] = []

    def take(self, numbers: tuple[int, ...], weights: Tensor, places: list[int]) -> None:
        """Makes the parameters with the indices `numbers` views of `weights`, at the offsets `places`."""
        for number, place in zip(numbers, places, strict=True):
            parameter = self._parameters[number]
            span = slice(place, place + parameter.numel())
            parameter.data = weights[span].view(parameter.shape)
            self._own.append((parameter, span))

    def apply(self, gradient: Tensor, rate: float) -> bool:
        """Updates this rank's shard with a gradient. Returns False if the gradient was not finite."""
        for parameter, span in self._own:
            parameter.grad = gradient[span].view(parameter.shape)
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        return not bool(self.optimizer.overflow > 0)

    def state_of(self, numbers: tuple[int, ...]) -> list[Tensor]:
        """Returns the state tensors of the parameters with the indices `numbers`, in a fixed order."""
        tensors = []
        for number in numbers:
            state = self.optimizer.state[self._parameters[number]]
            tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        return tensors


@torch.no_grad()
def _load_weights(optimizer: MasterOptimizer, values: Sequence[Tensor]) -> None:
    """Copies weights to an optimizer's fp32 masters, and to parameters that are not their own masters."""
    parameters = optimizer.parameters()
    for master, parameter, value in zip(optimizer.masters(), parameters, values, strict=True):
        master.copy_(value)
        if parameter is not master:
            parameter.copy_(value)


def _copy_state(source: MasterOptimizer, target: MasterOptimizer) -> None:
    """Copies the state of one optimizer to another, except master weights and hyper-parameters."""
    state = {
        number: {key: value for key, value in entry.items() if key != MASTER}
        for number, entry in source.state_dict()["state"].items()
    }
    groups = target.state_dict()["param_groups"]
    target.load_state_dict({"state": state, "param_groups": groups})
