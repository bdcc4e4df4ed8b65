"""`TrainStep`: one training step, from the batches to the update of the weights.

`launch` queues a step and returns, so that a GPU always has a next step to run. `collect` waits for
the oldest step and reads the outcome, which is equal on all ranks. Errors and signals of one rank are
sent with the gradients, so that all ranks skip, stop or fail at the same step. A rank that has failed
still takes part in the all-reduces, with zeros, until all ranks have read the reason.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.exchange import GradientExchange, Signals
from paceline.comm.group import Group
from paceline.comm.peer_errors import LostMemberError
from paceline.comm.tracing import Timeline
from paceline.core.errors import PacelineError, RunError
from paceline.core.imports import first_line
from paceline.data import Batch, BatchPlan, CorruptSample, Normalizer, TrainBatches
from paceline.optim.base import MasterOptimizer
from paceline.precision.policy import LossScale, Policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.loss import Mixing
from paceline.train.machine import explain_out_of_memory, out_of_memory, seed_micro_batch
from paceline.train.micro_step import WARM_CALLS, GradientSource, MicroStep
from paceline.train.model_checks import check_parameters, step_error
from paceline.train.observers import InputWait
from paceline.train.stop_signals import STOP_FIELDS, StopSignals, agreed_stop
from paceline.train.strategy import Pending, Strategy, parameter_names, row_values


@dataclass(frozen=True)
class StepOutcome:
    """The results of one training step.

    All values are equal on all ranks, except those whose description mentions "this rank".

    Attributes:
        number: Number of the step, from 0.
        rate: Learning rate of the step.
        done: False if a stop signal ended the step early. Such a step has changed nothing.
        skipped: True if the update was skipped because a gradient was not finite.
        bad: Names of the parameters whose gradients were not finite.
        stop: The signal that stops the run, if any.
        save: True if a rank was asked to save and continue.
        requested: True if a callback asked to stop.
        loss: Mean training loss.
        loss_scale: Loss scale of the step.
        corrupt_count: Number of corrupt samples on all ranks.
        corrupt_here: The corrupt samples that this rank has read.
        step_s: Time of the step on this rank, in seconds.
        data_s: Time that this rank waited for batches, in seconds.
        exposed_comm_s: Seconds that this rank waited for the gradient all-reduces after its own
            backward pass.
        stall: Seconds that the device of this rank was idle for lack of a batch, by cause.
        grad_norm: Norm of all gradients before clipping; 0 without clipping.
        whole_squared: Squared norm of the gradient of the whole step; 0 if not measured.
        parts_squared: Sum of the squared norms of the micro-steps' gradients; 0 if not measured.
        fields: Fields that the strategy adds to the record of the step.
    """

    number: int
    rate: float
    done: bool
    skipped: bool
    bad: tuple[str, ...]
    stop: signal.Signals | None
    save: bool
    requested: bool
    loss: float
    loss_scale: float
    corrupt_count: int
    corrupt_here: tuple[CorruptSample, ...]
    step_s: float
    data_s: float
    exposed_comm_s: float
    stall: dict[str, float]
    grad_norm: float = 0.0
    whole_squared: float = 0.0
    parts_squared: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Launched:
    number: int
    rate: float
    corrupt: tuple[CorruptSample, ...]
    started: float
    data_s: float
    stall: Callable[[], dict[str, float]]
    pending: Pending = field(init=False)


@dataclass
class _Computed:
    """What this rank's forward and backward passes of one step have yielded."""

    wait: InputWait
    corrupt: list[CorruptSample] = field(default_factory=list)
    data_s: float = 0.0
    # True after an error, which `TrainStep.fault` holds.
    failed: bool = False
    abandoned: bool = False
    # True while model and loss run, which may be a user's code.
    in_model: bool = False


@dataclass(kw_only=True)
class TrainStep:
    """Runs training steps: computes gradients, sums them over ranks, and updates the weights.

    Attributes:
        foreign: True if the model is a user's, whose exceptions become errors of one line.
        checks_parameters: True if a user's code could replace the model's parameters during the run.
        fault: An error of this rank, which the next all-reduce reports to all ranks.
        faulted: True after any rank has failed. All ranks learn of the failure in the same step. This
            step and later steps change nothing.
        given_up: True if this rank computes no more micro-batches.
        names: Names of the trained parameters in the optimizer's order.
    """

    model: nn.Module
    micro: MicroStep
    strategy: Strategy
    optimizer: MasterOptimizer
    exchange: GradientExchange
    batch_norm: BatchNormState
    loader: TrainBatches
    normalize: Normalizer
    policy: Policy
    plan: BatchPlan
    group: Group
    stop: StopSignals
    scale: LossScale
    seed: int
    mixing: Mixing | None = None
    foreign: bool = False
    checks_parameters: bool = False
    fault: PacelineError | None = None
    faulted: bool = False
    source: GradientSource = field(default_factory=GradientSource)
    spans: Timeline = field(default_factory=lambda: Timeline(1, 0, torch.device("cpu")))
    _under_way: deque[_Launched] = field(default_factory=deque)
    given_up: bool = False
    # Outcome of the latest completed step, as in `Pending.row`.
    last_row: Tensor | None = None
    _unfinished: bool = False
    # While the exchange of a step is under way, or after it has failed.
    _exchanging: _Launched | None = None
    _launches: int = 0
    names: list[str] = field(init=False)
    # Exchanged and frozen parameters by name, each with the address of its data.
    _parameters: dict[str, tuple[nn.Parameter, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = parameter_names(self.exchange, self.optimizer)
        if self.checks_parameters:
            frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
            held = {**frozen, **self.exchange.parameters}
            self._parameters = {name: (p, p.data_ptr()) for name, p in held.items()}

    @property
    def lag(self) -> int:
        """Number of launched but unfinished steps that are allowed while the next step is prepared."""
        if self.strategy.lag is not None:
            return self.strategy.lag
        return 1 if self.policy.device.type == "cuda" else 0

    @property
    def under_way(self) -> int:
        """Number of steps that were launched but not collected."""
        return len(self._under_way)

    def run(self, step: int, rate: float) -> StepOutcome:
        """Runs one step to its end: launches it and collects its outcome."""
        self.launch(step, rate)
        return self.collect()

    def launch(
        self, step: int, rate: float, hyperparameters: Mapping[str, float] | None = None
    ) -> None:
        """Queues a step: computes gradients, sums them over ranks, and updates the weights.

        Args:
            step: Number of the step.
            rate: Learning rate.
            hyperparameters: Values of the schedule besides the learning rate, by name.
        """
        started = time.perf_counter()
        first, last = self.plan.step_range(step)
        self._agree_on_graphs()
        begun = self.source.begin(self, step)
        self.fault = begun.fault or self.fault
        self.given_up |= begun.abandoned
        self.strategy.begin(step, self.plan)
        self.exchange.begin(step)
        computed = _Computed(InputWait(self.policy.device))
        self.batch_norm.remember()
        self._unfinished = True
        self.micro.begin(last - first, self.plan.batch_at(step))
        self._compute(step, computed)
        signals = Signals(
            corrupt=float(len(computed.corrupt)),
            fault=float(computed.failed),
            abandon=float(computed.abandoned),
            save=float(self.stop.take_save_request()),
            request=float(self.stop.requested),
            **self.stop.stop_flags(),
        )
        launched = self._exchanging = _Launched(
            number=step,
            rate=rate,
            corrupt=tuple(computed.corrupt),
            started=started,
            data_s=computed.data_s,
            stall=computed.wait.stall,
        )
        with self.spans.span("exposed exchange"):
            try:
                self.reduce(signals)
            except LostMemberError:
                self.stop.save_requested |= bool(signals.save)  # the request was not sent
                raise
        with self.spans.span("update"):
            launched.pending = self._update(step, rate, hyperparameters)
        self._unfinished, self._exchanging = False, None
        self._under_way.append(launched)

    def _compute(self, step: int, computed: _Computed) -> None:
        """Runs this rank's micro-batches, until an error or a request to stop."""
        try:
            if self.fault is not None:
                raise self.fault
            if self.checks_parameters:
                check_parameters(self.model, self._parameters, self.exchange.parameters)
            for part in self.strategy.micro_batches(step, self.plan):
                if self.given_up or (self.strategy.stops_within_step and self.asked_to_stop()):
                    computed.abandoned = self.given_up = True
                    break
                batch = self._next_batch(computed)
                seed_micro_batch(self.seed, step, part.number)
                with self.spans.span("forward and backward"):
                    mix = self._mix(step, part.number, len(batch.labels))
                    computed.in_model = True
                    self.source.add(self, step, batch, part, mix)
                    computed.in_model = False
        except Exception as error:  # a defect of the program is raised again
            foreign = self.foreign and computed.in_model
            fault = step_error(
                error, step, self.plan.micro_batch, foreign=foreign, advise=self.micro.advise
            )
            if fault is None:
                raise
            if fault is not error:
                fault.__cause__ = error
            self.fault, computed.failed = fault, True
            self.group.post_fault(fault)

    def _next_batch(self, computed: _Computed) -> Batch:
        waiting = time.perf_counter()
        with self.spans.span("data", host=True), computed.wait:
            batch = next(self.loader)
        computed.wait.attribute(batch.spent, batch.begun)
        computed.data_s += time.perf_counter() - waiting
        computed.corrupt += batch.corrupt
        return batch

    def _agree_on_graphs(self) -> None:
        """Stops the use of CUDA graphs on all ranks if the capture failed on any rank.

        Does this once, after each rank has captured its graphs. All ranks launch the same steps, so
        they communicate at the same step.
        """
        self._launches += 1
        if not self.micro.may_fall_back or self._launches != WARM_CALLS + 2:
            return
        failed = torch.tensor(float(bool(self.micro.uncaptured)), device=self.group.device)
        self.group.all_reduce_sum(failed)
        if failed > 0:
            self.micro.fall_back("another rank could not capture the step as a CUDA graph")

    def drop_graphs(self) -> None:
        """Destroys the CUDA graphs of this rank, because later micro-batches have a different size.

        All ranks call this between the same steps. After the next captures, the ranks agree again
        whether to use graphs, because NCCL requires that either all ranks replay graphs or none.
        """
        self.micro.drop_graphs()
        self._launches = 0

    def _mix(self, step: int, number: int, samples: int) -> Tensor | None:
        if self.mixing is None:
            return None
        table = self.mixing.table(step, number, samples)
        return table.pin_memory() if self.policy.device.type == "cuda" else table

    def reduce(self, signals: Signals) -> None:
        """Sums gradients and signals over all ranks."""
        remedy = "free memory, or lower comm.fusion_mib, which makes buckets smaller"
        with explain_out_of_memory("in the exchange of gradients", remedy):
            self.exchange.reduce(self.micro.loss, signals)

    def _update(
        self, step: int, rate: float, hyperparameters: Mapping[str, float] | None
    ) -> Pending:
        remedy = "free memory, or use a smaller --batch-size"
        with explain_out_of_memory("in the update", remedy):
            try:
                return self.strategy.finish(rate, hyperparameters)
            except Exception as error:  # a defect of the program is raised again
                # torch's optimizers and the user's may raise any exception in any step.
                own = isinstance(error, PacelineError | torch.AcceleratorError | MemoryError)
                if own or self.optimizer.path != "torch" or out_of_memory(error, "", ""):
                    raise
                raise RunError(
                    f"the optimizer failed in step {step + 1}: {first_line(error)}",
                    "fix it, or choose another --opt; continue with --resume auto",
                ) from error

    def collect(self) -> StepOutcome:
        """Waits for the oldest launched step and returns its outcome.

        Returns:
            The results of this step.

        Raises:
            PacelineError: If any rank has failed.
        """
        launched = self._under_way.popleft()
        pending = launched.pending
        if pending.wait is not None:
            # If the device runs the exchange, a rank waits for the other ranks here.
            self.group.watched(f"step {launched.number + 1} on the device", pending.wait)
        self.last_row = pending.row
        row, bad = row_values(pending.row)
        if row["fault"]:
            self.faulted = True
            raise self.group.fault()
        # A step lasts until the next launch, because several steps may be collected at the same time.
        ended = self._under_way[0].started if self._under_way else time.perf_counter()
        done = not row["halted"]
        return StepOutcome(
            number=launched.number,
            rate=launched.rate,
            done=done,
            skipped=done and bool(row["overflow"]),
            bad=tuple(self.names[index] for index in bad),
            stop=agreed_stop([row[name] for name in STOP_FIELDS]),
            save=bool(row["save"]),
            requested=bool(row["request"]),
            loss=row["loss"],
            loss_scale=row["scale"],
            corrupt_count=round(row["corrupt"]),
            corrupt_here=launched.corrupt,
            step_s=ended - launched.started,
            data_s=launched.data_s,
            exposed_comm_s=pending.exposed(),
            stall=launched.stall(),
            grad_norm=row["grad_norm"],
            whole_squared=row["whole_squared"],
            parts_squared=row["parts_squared"],
            fields=pending.fields,
        )

    def state_bytes_per_parameter(self) -> tuple[float, float]:
        """Returns the bytes of optimizer state (with masters) and of strategy state per parameter."""
        trained = max(sum(p.numel() for p in self.optimizer.parameters()), 1)
        return self.optimizer.state_bytes() / trained, self.strategy.state_bytes / trained

    def exchange_bytes(self) -> float:
        """Returns the mean number of bytes of gradients that each rank exchanges in a step."""
        plain = sum(bucket.bytes for bucket in self.exchange.bucket_info())
        return self.strategy.step_bytes(plain) * self.source.exchanges

    def release(self) -> None:
        """Destroys all CUDA graphs. Must be called before the process groups are destroyed.

        Does not wait for the device, which may hang in a collective after a failure.
        """
        self.micro.release()
        self.strategy.release()
        self.group.released(self.release)

    def roll_back(self) -> None:
        """Restores the batch-norm statistics after a step that failed before its update."""
        if self._unfinished:
            self.batch_norm.roll_back()
            self._unfinished = False
        self._exchanging = None

    @property
    def is_unfinished(self) -> bool:
        """True if a step has begun and was neither completed nor rolled back."""
        return self._unfinished

    def complete(self, row: Tensor) -> None:
        """Completes a step whose all-reduces have failed on this rank but not on another one.

        The caller has restored the weights of the other rank. This rank's batch-norm statistics stay,
        as they are those after the step, unless all ranks have discarded the step.

        Args:
            row: The results on the other rank, its `last_row`.
        """
        launched = self._exchanging
        assert launched is not None
        values, _ = row_values(row)
        if values["overflow"] or values["halted"]:
            self.roll_back()
        self._unfinished, self._exchanging = False, None
        launched.pending = Pending(row=row, wait=None, exposed=lambda: 0.0)
        self._under_way.append(launched)

    def asked_to_stop(self) -> bool:
        """Returns True after a stop signal on any rank. The rank with the signal tells all others."""
        if self.stop.received is not None:
            self.group.announce_stop()
            return True
        return self.group.stop_announced()
