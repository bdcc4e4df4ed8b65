"""`Strategy`: how a step turns the micro-batches of all ranks into new weights.

`run.strategy` names the strategy of a run. `Synchronous`, the default, sums the gradients of all ranks
and updates all weights with the sum. All other strategies are extensions: subclasses that a package
lists in `PROVIDES` or a program registers with `register_strategy`. A strategy can have settings in
the table `[run.NAME]`. Their dataclass also declares which other settings cannot be combined with the
strategy.

Each rank has one strategy from the start to the end of a run, whose methods are called in this order:

- build: `check`, `check_model`, `load`, `prepare`, `divide`, `create_exchange`, `attach`;
- each step: `begin`, `micro_batches`, `finish`, and `record` once the step is complete;
- pauses for evaluations and checkpoints: `pause`, `record_evaluation`, `replan`, `state`;
- end: `conclude` and `summary`, or after an error only `release`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.exchange import SIGNALS, GradientExchange
from paceline.comm.group import Group
from paceline.config import STRATEGIES, SYNCHRONOUS, RunConfig
from paceline.core.errors import ConfigError
from paceline.core.events import ShownField
from paceline.core.settings import register_settings
from paceline.data import BatchPlan
from paceline.optim.base import MasterOptimizer
from paceline.optim.rule import accurate_norms
from paceline.optim.schedules import set_rate
from paceline.plan.plan_file import ClusterFacts
from paceline.train.batch_norm import BatchNormState
from paceline.train.micro_step import Captured, MicroStep

if TYPE_CHECKING:
    from paceline.train.exchange_plan import ExchangeParts
    from paceline.train.inputs import RunInputs
    from paceline.train.step import StepOutcome
    from paceline.train.step_parts import StepParts
    from paceline.train.training import Training


# Fields of `Pending.row` that follow the sums of the signals.
EXTRAS = ("overflow", "halted", "scale", "grad_norm", "whole_squared", "parts_squared")


class MicroBatch(NamedTuple):
    """A micro-batch of a step.

    Attributes:
        number: Number of the micro-batch in the step.
        full_size: True if the micro-batch has the same size as nearly all micro-batches of this rank,
            and every rank has one in this step.
        last: True for the last micro-batch of this rank in the step.
    """

    number: int
    full_size: bool
    last: bool


def micro_batches_of(plan: BatchPlan, step: int, rank: int) -> Iterator[MicroBatch]:
    """Yields the micro-batches of one rank in a step."""
    stretches = plan.micro_batches(step, rank)
    # Either all ranks replay a CUDA graph that sends buckets, or none.
    all_compute = bool(plan.micro_batches(step, plan.world_size - 1))
    for turn, (start, stop) in enumerate(stretches):
        yield MicroBatch(
            number=rank + turn * plan.world_size,
            full_size=all_compute and stop - start == plan.full_micro_batch(rank),
            last=turn == len(stretches) - 1,
        )


@dataclass(kw_only=True)
class Pending:
    """The results of a step that may still run on the device.

    Attributes:
        row: A tensor in host memory, complete after `wait`: the sums of the `comm.Signals`, the values
            that `EXTRAS` names, and one flag per parameter for a non-finite gradient.
        wait: Waits for the device or for other ranks; None if there is nothing to wait for.
        exposed: Returns the seconds that this rank waited for the all-reduces after its own backward
            pass.
        fields: Fields that the strategy adds to the record of the step. `wait` may add more fields.
    """

    row: Tensor
    wait: Callable[[], None] | None
    exposed: Callable[[], float]
    fields: dict[str, Any] = field(default_factory=dict)


class Strategy:
    """The base class of training strategies. All defaults implement plain synchronous training.

    Attributes:
        name: The strategy's name in `run.strategy`, in checkpoints and in error messages.
        several_ranks: True if the strategy needs several ranks. If there is only one rank, `Synchronous`
            is used instead.
        same_weights: True if all ranks have the same weights after each step.
        eager: True if forward or backward contains collectives, which compiled code and CUDA graphs do
            not support.
        one_batch: Reason why the global batch cannot grow during a run; "" if it can.
        fixed_ranks: Reason why the number of ranks cannot change during a run; "" if it can.
        equal_parts: Reason why all ranks need the same number of micro-batches; "" if they do not.
        counts: Descriptions of record fields that are histograms, by field: title, name of the number,
            name of the count.
        shown: Names of values in the summary and in evaluations that reports display.
        lag: Number of launched but unfinished steps that are allowed while the next step is prepared;
            None for the default of the device.
        stops_within_step: False if ranks wait for each other inside a step, so that they can stop only
            between steps.
    """

    name: ClassVar[str] = ""
    several_ranks: ClassVar[bool] = False
    same_weights: ClassVar[bool] = True
    eager: ClassVar[bool] = False
    one_batch: ClassVar[str] = ""
    equal_parts: ClassVar[str] = ""
    fixed_ranks: ClassVar[str] = ""
    counts: ClassVar[Mapping[str, tuple[str, str, str]]] = {}
    shown: ClassVar[tuple[ShownField, ...]] = ()
    lag: int | None = None
    stops_within_step: bool = True

    def __init__(self, config: RunConfig, group: Group) -> None:
        self.config, self.group = config, group

    # Before and while the run is built.

    @classmethod
    def ranks(cls, config: RunConfig, processes: int) -> int:
        """Returns the number of ranks that share a global batch."""
        return processes

    @classmethod
    def check(cls, config: RunConfig, ranks: int) -> None:
        """Raises a ConfigError if settings do not fit the number of ranks."""

    @classmethod
    def check_model(cls, model: nn.Module) -> None:
        """Raises a ConfigError if the strategy cannot train the model."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores what `state` has returned, from the checkpoint of a resumed run."""

    def prepare(self, model: nn.Module, inputs: RunInputs) -> None:
        """Changes or inspects the new model before its fast path is chosen. All ranks call this."""

    @classmethod
    def cluster(cls, config: RunConfig, processes: int, nodes: int) -> ClusterFacts:
        """Returns the number of ranks and nodes that exchange gradients."""
        return ClusterFacts(processes, nodes)

    def batch_norm(self, model: nn.Module) -> BatchNormState:
        """Creates the object that holds this rank's running statistics of batch norm."""
        return BatchNormState(model)

    def divide(self, plan: BatchPlan, compute: Callable[[], None]) -> BatchPlan:
        """Returns a plan that divides each global batch among ranks.

        `compute` runs one micro-batch without effect on training, so that its time can be measured.
        """
        return plan

    def create_exchange(
        self, planned: ExchangeParts, *, accumulate: bool, graphs: bool, squares: bool
    ) -> GradientExchange:
        """Creates the object that sums gradients and signals over ranks. All ranks call this.

        Args:
            planned: The buckets, algorithms and formats, on which all ranks agree.
            accumulate: True if a step has several micro-batches.
            graphs: True if micro-steps are captured as CUDA graphs.
            squares: True to measure the squared norms of the micro-steps' gradients.
        """
        return planned.create(self.group, accumulate=accumulate, graphs=graphs, squares=squares)

    @property
    def computed_ranks(self) -> int | Sequence[int]:
        """The rank whose micro-batches this process computes, or several ranks in order."""
        return self.group.rank

    def attach(self, parts: StepParts, micro: MicroStep) -> None:
        """Stores the parts of the training step, which have now been created."""
        raise NotImplementedError

    @classmethod
    def outline(cls, config: RunConfig, ranks: int) -> dict[str, str]:
        """Returns lines to display in a dry run on `ranks` ranks; they replace lines of the same name."""
        return {}

    def describe(self) -> dict[str, str]:
        """Returns lines to display at the start of the run; they replace lines of the same name."""
        return self.outline(self.config, self.group.world_size)

    def start(self, training: Training) -> None:
        """Runs once before the first step."""

    # In each step.

    def begin(self, step: int, plan: BatchPlan) -> None:
        """Runs before the first micro-batch of a step."""

    def micro_batches(self, step: int, plan: BatchPlan) -> Iterator[MicroBatch]:
        """Yields the micro-batches of this process, in the order of its loader.

        The caller may close the iterator early.
        """
        return micro_batches_of(plan, step, self.group.rank)

    def finish(self, rate: float, hyperparameters: Mapping[str, float] | None) -> Pending:
        """Updates the weights after the gradients were summed over ranks.

        Args:
            rate: The learning rate.
            hyperparameters: Values of the schedule besides the learning rate, by name.

        Returns:
            The results of the step, which may still run on the device.
        """
        raise NotImplementedError

    def record(self, outcome: StepOutcome) -> Mapping[str, Any]:
        """Returns the strategy's fields for the record of a completed step."""
        return outcome.fields

    # Between steps.

    def pause(self) -> None:
        """Runs before an evaluation and a checkpoint, when no step is running. All ranks call this."""

    def record_evaluation(self, *, reached_target: bool) -> Mapping[str, Any]:
        """Returns the strategy's fields for the record of an evaluation."""
        return {}

    def remark(self) -> str:
        """Returns a text about the latest evaluation, which is appended to its displayed line."""
        return ""

    def replan(self, plan: BatchPlan) -> BatchPlan:
        """Returns the batch plan for later steps, or `plan` if nothing changes. All ranks call this."""
        return plan

    def state(self) -> dict[str, Any]:
        """Returns the strategy's state for a checkpoint."""
        return {}

    # At the end.

    def conclude(self) -> None:
        """Runs after the last step of a run that ends without an error. All ranks call this."""

    def summary(self) -> dict[str, Any]:
        """Returns entries for `summary.json`."""
        return {}

    def release(self) -> None:
        """Releases CUDA graphs, threads and connections without waiting; also called after an error."""

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the strategy's state between steps, without the optimizer's state."""
        return 0

    def step_bytes(self, gradient_bytes: float) -> float:
        """Returns the bytes that a rank sends in a step if all buckets together have `gradient_bytes`."""
        return gradient_bytes


class Synchronous(Strategy):
    """Sums the gradients of all ranks in each step; all ranks make the same update.

    The device decides whether to update, so the host does not wait. If a gradient is not finite, the
    weights and the optimizer's state do not change. After an error of a rank, or a stop inside a step,
    they never change again, and the run ends. `TrainStep.collect` reads the outcome later.
    """

    name = SYNCHRONOUS

    def attach(self, parts: StepParts, micro: MicroStep) -> None:
        optimizer, scale = parts.optimizer, parts.scale
        self.optimizer, self.average, self._clip_norm = optimizer, parts.average, parts.clip_norm
        self._exchange, self._batch_norm, self._scale = parts.exchange, parts.batch_norm, scale
        names = parameter_names(parts.exchange, optimizer)
        device = scale.value.device
        place = {name: i for i, name in enumerate(parts.exchange.names)}
        self._order = torch.tensor([place[name] for name in names], device=device)
        self._halted = torch.zeros((), device=device)
        # 1 if the current step changes nothing, else 0.
        self._discard = torch.zeros((), device=device)
        self._row = torch.zeros(len(SIGNALS) + len(EXTRAS) + len(names), device=device)
        optimizer.hold = self._halted
        optimizer.active = torch.zeros(len(names), device=device)
        self._grad_norm = torch.zeros((), device=device)
        # Squared norm of the step's gradient, sum of the micro-steps' squared norms; 0 if not measured.
        self._squares = torch.zeros(2, device=device)
        # Clipping increases the divisor of the gradients, so the gradients are not read once more.
        self._divisor = scale.step_value.clone()
        optimizer.grad_scale = self._divisor if self._clip_norm else scale.step_value
        # A wrapped optimizer reads flags on the host, which waits for the exchange.
        self._waits = optimizer.path == "torch" and device.type == "cuda"
        graphs = parts.fast.graphs and optimizer.path == "triton"
        self._captured = Captured(self._update, enabled=graphs)

    def finish(self, rate: float, hyperparameters: Mapping[str, float] | None) -> Pending:
        """Queues the update of the weights, and then the copy of the results to host memory."""
        set_rate(self.optimizer, rate, hyperparameters)
        self.optimizer.upload()
        if self._waits:
            self.group.watched("the update", self._captured)
        else:
            self._captured()
        if (memory := self._exchange.memory) is not None:
            memory.commit(self._discard)
        exposed = self._exchange.exposed
        if not self._row.is_cuda:
            return Pending(row=self._row.clone(), wait=None, exposed=exposed)
        row = torch.empty(self._row.shape, pin_memory=True)
        row.copy_(self._row, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return Pending(row=row, wait=ready.synchronize, exposed=exposed)

    def release(self) -> None:
        """Destroys the CUDA graph."""
        self._captured.release()

    @property
    def state_bytes(self) -> int:
        memory = self._exchange.memory
        return 0 if memory is None else memory.state_bytes

    def _update(self) -> None:
        tail = self._exchange.tail
        given_up = tail[SIGNALS.index("fault")] + tail[SIGNALS.index("abandon")]
        self._halted.copy_(torch.maximum(self._halted, (given_up > 0).to(torch.float32)))
        assert self.optimizer.active is not None
        torch.index_select(self._exchange.uses, 0, self._order, out=self.optimizer.active)
        if self._clip_norm or self._exchange.squares is not None:
            self._measure()
        self.optimizer.step()
        overflow = self.optimizer.overflow
        discard = self._discard.copy_(torch.maximum(overflow, self._halted))
        self._batch_norm.discard_if(discard)
        if self.average is not None:
            self.average.add(discard)
        extras = torch.stack(
            [overflow, self._halted, self._scale.value, self._grad_norm, *self._squares.unbind()]
        )
        bad = self.optimizer.bad.to(torch.float32)
        self._row.copy_(torch.cat([tail[: len(SIGNALS)], extras, bad]))
        self._scale.update(overflow, self._halted)

    def _measure(self) -> None:
        """Computes the norm of all gradients, for clipping and for the noise scale."""
        gradients = [p.grad for p in self.optimizer.parameters() if p.grad is not None]
        norms = torch.stack([norm.double() for norm in gradient_norms(gradients)])
        scale = self._scale.step_value.double()
        norm = torch.linalg.vector_norm(norms) / scale
        if (parts := self._exchange.squares) is not None:
            self._squares.copy_(torch.stack([norm.square(), parts.double() / scale.square()]))
        if self._clip_norm:
            self._grad_norm.copy_(norm)
            over = (norm / self._clip_norm).clamp(min=1.0)
            # Gradients whose norm is not finite must stay as they are, so that the step is skipped.
            self._divisor.copy_(scale * torch.where(torch.isfinite(over), over, 1.0))


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the 2-norm of each gradient in fp32; on a GPU, the order is grouped by number format."""
    if gradients[0].device.type == "cpu":
        return accurate_norms([gradient.float() for gradient in gradients])
    norms: list[Tensor] = []
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype == kind]
        norms += torch._foreach_norm(same, 2, dtype=torch.float32)
    return norms


def parameter_names(exchange: GradientExchange, optimizer: MasterOptimizer) -> list[str]:
    """Returns the names of the parameters in the optimizer's order.

    Does not use the model, because a user's code may have replaced the model's parameters. The first
    step reports such a replacement.
    """
    names: dict[int, str] = {id(p): name for name, p in exchange.parameters.items()}
    return [names[id(p)] for p in optimizer.parameters()]


def row_values(row: Tensor) -> tuple[dict[str, float], list[int]]:
    """Returns the values of `Pending.row` by name, and the indices of non-finite gradients."""
    names, values = (*SIGNALS, *EXTRAS), row.tolist()
    bad = [index for index, flag in enumerate(values[len(names) :]) if flag]
    return dict(zip(names, values[: len(names)], strict=True)), bad


def register_strategy(kind: type[Strategy], settings: type | None = None) -> None:
    """Registers a strategy in this process. A later call with the same name replaces the strategy.

    Args:
        kind: A subclass of `Strategy` with a `name`.
        settings: The settings class of the table `[run.NAME]`.

    Raises:
        ConfigError: If `kind` is not a strategy or does not set `name`, or if an installed package
            already provides a strategy of this name.

    Example:
        from paceline.train import Synchronous

        class Local(Synchronous):
            name = "local"

        pl.register_strategy(Local)
    """
    if not isinstance(kind, type) or not issubclass(kind, Strategy):
        raise ConfigError("kind", kind, "is not a subclass of Strategy", "give a class")
    if "name" not in vars(kind):
        raise ConfigError(
            "kind", kind.__name__, "has no name", f"write name = '…' in {kind.__name__}"
        )
    if settings is not None:
        register_settings("run", kind.name, settings)
    STRATEGIES.register(kind.name, kind)


def strategy_fields(
    strategy: Strategy, method: str, returned: object, taken: Collection[str]
) -> Mapping[str, Any]:
    """Checks the record fields that a method of a strategy has returned, and returns them.

    Args:
        strategy: The strategy.
        method: Name of the method, for messages.
        returned: Return value of the method.
        taken: Names of Paceline's own record fields, which a strategy must not use.

    Raises:
        ConfigError: If the value is not a mapping, or contains a name in `taken`.
    """
    place = f"{strategy.name}.{method}"
    if not isinstance(returned, Mapping):
        raise ConfigError(place, type(returned).__name__, "is not a mapping", "return a dictionary")
    if overwritten := sorted(returned.keys() & taken):
        raise ConfigError(place, overwritten[0], "is a field of Paceline's", "choose another name")
    return returned


def strategy_class(config: RunConfig) -> type[Strategy]:
    """Returns the strategy class that `run.strategy` names."""
    kind: type[Strategy] = STRATEGIES.get(config.run.strategy, "run.strategy")
    return kind


def create_strategy(config: RunConfig, group: Group) -> Strategy:
    """Creates the named strategy; on one rank, `Synchronous` if the strategy needs several ranks."""
    kind = strategy_class(config)
    return Synchronous(config, group) if is_idle(kind, group.world_size) else kind(config, group)


def is_idle(kind: type[Strategy], ranks: int) -> bool:
    """Returns True if a strategy has no effect on `ranks` ranks, because it needs several."""
    return kind.several_ranks and ranks == 1
