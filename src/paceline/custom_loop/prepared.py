"""`prepare`: half-precision weights with fp32 master weights and a loss scale, for a custom loop.

`Prepared.backward` scales the loss. `Prepared.step` unscales the gradients, updates the fp32 masters
and rounds them to the model's weights. If a gradient is not finite on any rank, all ranks skip the
update. The device makes all decisions, so the host never waits for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.core.errors import CheckpointError, ConfigError, nearest
from paceline.core.settings import read_names, settings_class
from paceline.custom_loop.context import agreed, several_ranks
from paceline.custom_loop.data_parallel import trained_parameters, wire_of
from paceline.optim.schedules import set_rate
from paceline.optim.settings import OptimSettings
from paceline.precision.policy import LossScale, Policy, choose_policy
from paceline.precision.settings import PrecisionSettings
from paceline.train.step_parts import create_master_optimizer
from paceline.train.strategy import gradient_norms
from paceline.train.weights import full_state

_SCALE_FIELDS = {f.name for f in fields(PrecisionSettings) if f.name.startswith("loss_scale")}
# Settings of `[optim]` that `prepare` accepts as `**arguments`. The loop itself sets the schedule.
_SHARED_FIELDS = {
    "arguments", "decay_bias_norm", "fused", "layer_decay", "momentum", "nesterov",
}  # fmt: skip


class Prepared:
    """A model with its optimizer and loss scale, created by `prepare`.

    Attributes:
        model: The model, which computes in `precision`.
        optimizer: The optimizer with the fp32 masters. Schedulers of torch.optim accept it.
        overflow: Scalar tensor on the device: 1 if the last step was skipped, otherwise 0.

    Example:
        >>> import torch
        >>> prepared = prepare(torch.nn.Linear(4, 2), "sgd", lr=0.1)
        >>> with prepared.autocast():
        ...     loss = prepared.model(torch.ones(3, 4)).float().square().mean()
        >>> prepared.backward(loss)
        >>> prepared.step()
        >>> prepared.precision, prepared.lr, prepared.skipped_steps
        ('fp32', 0.1, 0)
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, policy: Policy, settings: PrecisionSettings,
        clip_norm: float = 0.0,
    ) -> None:  # fmt: skip
        self.model = model
        self.optimizer: Optimizer = optimizer
        # The same object, typed as Any to allow access to masters and flags.
        self._masters: Any = optimizer
        self._clip_norm = clip_norm
        self.overflow = torch.zeros((), device=policy.device)
        self._policy = policy
        self._settings = settings
        self._scale = LossScale(policy, settings)
        self._skipped = torch.zeros((), dtype=torch.int64, device=policy.device)
        self._free = torch.zeros((), device=policy.device)

    @property
    def precision(self) -> str:
        """Format in which the model computes: `fp16`, `bf16` or `fp32`."""
        return self._policy.name

    @property
    def lr(self) -> float:
        """The learning rate, before each group's `lr_scale`. Assign to it to follow a schedule."""
        groups = self.optimizer.param_groups
        group = next((group for group in groups if group.get("lr_scale", 1.0)), groups[0])
        return float(group["lr"]) / (group.get("lr_scale", 1.0) or 1.0)

    @lr.setter
    def lr(self, rate: float) -> None:
        set_rate(self.optimizer, rate)

    @property
    def loss_scale(self) -> float:
        """The current factor that multiplies the loss. Reading it waits for the device."""
        return float(self._scale.value)

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because of non-finite gradients. Reading it waits for the device."""
        return int(self._skipped)

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context manager for the forward pass, which does nothing in fp32."""
        return self._policy.compute()

    def backward(self, loss: Tensor) -> None:
        """Multiplies `loss` by the loss scale and runs the backward pass.

        Several calls before `step` accumulate gradients.
        """
        self._follow_wire()
        (loss.float() * self._scale.value).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Updates the fp32 masters and the weights, adjusts the loss scale, and clears the gradients.

        If a gradient is not finite, only the loss scale changes, on all ranks. With `DataParallel`,
        all ranks have the same gradients. Without `DataParallel`, ranks sum an overflow flag, so all
        ranks must call this.
        """
        optimizer, scale = self._masters, self._scale
        optimizer.grad_scale = self._divisor()
        optimizer.found_inf = self._agreed_overflow()
        optimizer.step()
        overflow = optimizer.overflow
        if optimizer.found_inf is not None:
            overflow = torch.maximum(overflow, optimizer.found_inf)
        self.overflow.copy_(overflow)
        self._skipped.add_(overflow.to(torch.int64))
        scale.update(self.overflow, self._free)
        optimizer.zero_grad(set_to_none=True)

    def _divisor(self) -> Tensor:
        """Returns the divisor of the gradients: the loss scale, multiplied to clip too large a norm."""
        scale, gradients = self._scale.value, self._gradients()
        if not self._clip_norm or not gradients:
            return scale
        norms = torch.stack(gradient_norms(gradients))
        norm = torch.linalg.vector_norm(norms) / scale
        # The finite check handles a norm that is not finite.
        over = torch.where(torch.isfinite(norm), (norm / self._clip_norm).clamp(min=1.0), 1.0)
        return scale * over

    def _agreed_overflow(self) -> Tensor | None:
        """Returns 1 if any rank has a non-finite gradient, else 0; None if gradients are equal."""
        if not several_ranks() or wire_of(self.model) is not None:
            return None
        flag = torch.zeros((), device=self._policy.device)
        if gradients := self._gradients():
            squares = torch.stack(gradient_norms(gradients)).square()
            flag.copy_(~torch.isfinite(squares).all())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag

    def _follow_wire(self) -> None:
        """Makes the loss scale dynamic if gradients are sent in fp16, whatever the model's precision."""
        if self._scale.dynamic:
            return
        if wire_of(self.model) == "float16" and several_ranks():
            self._scale = LossScale(self._policy, self._settings, fp16_travels=True)

    def _gradients(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [p.grad.detach() for group in groups for p in group["params"] if p.grad is not None]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the model's state dict in fp32, with the masters instead of half-precision weights."""
        return full_state(self.model, self._masters)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next step depends on.

        The state contains weights, buffers, masters, momenta and the loss scale.
        """
        return {
            "precision": self.precision,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self._scale.state(),
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state bit for bit.

        Args:
            state: The result of `state_dict` with the same model, optimizer and precision.

        Raises:
            CheckpointError: If the precision differs.
        """
        if state["precision"] != self.precision:
            raise CheckpointError(
                f"the saved state has precision {state['precision']}, this object {self.precision}",
                f"prepare the model with precision={state['precision']!r}",
            )
        self._follow_wire()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scale.restore(state["loss_scale"])
        self._skipped.fill_(state["skipped_steps"])


def prepare(
    module: nn.Module,
    optimizer: str | Optimizer = "sgd",
    lr: float | None = None,
    *,
    precision: str = "auto",
    weight_decay: float | None = None,
    clip_norm: float = 0.0,
    **arguments: Any,
) -> Prepared:
    """Rounds matrix weights to half precision and creates an optimizer with fp32 masters.

    The masters hold the weights before rounding. Biases and normalization parameters stay fp32, have no
    weight decay and, with LARS, no trust ratio. All ranks start with rank 0's weights and buffers.
    Prepare first, then wrap: `model = DataParallel(prepared.model)`.

    Args:
        module: The module on its device.
        optimizer: A name, such as `sgd`, `lars` or `muon`, or one of Paceline's optimizers with the
            parameters of `module`. Optimizers without masters for half-precision weights are refused.
        lr: Learning rate; only with a name.
        precision: `fp16`, `bf16`, `fp32`, or `auto`: fp16 on a GPU, fp32 on a CPU.
        weight_decay: Weight decay; only with a name. The default is 1e-4.
        clip_norm: Upper limit of the norm over all gradients; 0 switches clipping off.
        **arguments: Further settings of `[optim]`, such as `momentum`; settings of the optimizer, such
            as `trust_coefficient`; and settings of `[precision]` that begin with `loss_scale`.

    Returns:
        The model with its optimizer and loss scale.

    Raises:
        ConfigError: If an argument is invalid.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
        >>> prepared = prepare(net, optimizer="lars", lr=2.0, precision="bf16", momentum=0.95)
        >>> net[0].weight.dtype, net[1].weight.dtype, prepared.full_state_dict()["0.weight"].dtype
        (torch.bfloat16, torch.float32, torch.float32)
    """

    def facts() -> dict[str, Any]:
        return {
            "the trained parameters": trained_parameters(module),
            "precision": made.precision,
            "optimizer": type(made.optimizer).__name__,
        }

    with agreed(facts):
        made = _prepare(module, optimizer, lr, precision, weight_decay, clip_norm, arguments)
    if several_ranks():
        _broadcast(made)
    return made


def _prepare(
    module: nn.Module, optimizer: str | Optimizer, lr: float | None, precision: str,
    weight_decay: float | None, clip_norm: float, arguments: dict[str, Any],
) -> Prepared:  # fmt: skip
    if isinstance(module, DistributedDataParallel):
        raise ConfigError(
            "module", type(module).__name__, "is already wrapped, but prepare must change its dtypes",
            "prepare the module first, then wrap prepared.model",
        )  # fmt: skip
    device = _device(module)
    if not 0 <= clip_norm < float("inf"):
        raise ConfigError("clip_norm", clip_norm, "must be 0 or more", "use 0 to disable clipping")
    known = _SCALE_FIELDS | _SHARED_FIELDS
    if isinstance(optimizer, str):
        own = settings_class(OptimSettings, optimizer, "optimizer")
        known = known | (read_names(own) if own is not None else set())
    for name in arguments:
        if name not in known:
            raise ConfigError(name, None, "unknown", nearest(name, known))
    scale = {name: value for name, value in arguments.items() if name in _SCALE_FIELDS}
    settings, policy = _precision(precision, scale, device)
    update = {name: value for name, value in arguments.items() if name not in _SCALE_FIELDS}
    if not isinstance(optimizer, str):
        given = {"lr": lr, "weight_decay": weight_decay, **update}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    name,
                    value,
                    "is already set in the given optimizer",
                    "leave it out, or pass the optimizer by name",
                )
        return Prepared(module, _adopt(module, optimizer, policy), policy, settings, clip_norm)
    if lr is None:
        raise ConfigError("lr", None, f"{optimizer!r} needs a learning rate", "give lr=")
    if weight_decay is not None:
        update["weight_decay"] = weight_decay
    chosen = OptimSettings.gather(name=optimizer, lr=lr, **update)
    made = create_master_optimizer(chosen, module, policy, lr)
    set_rate(made, lr)  # multiplied by each group's `lr_scale`
    return Prepared(module, made, policy, settings, clip_norm)


def _precision(
    name: str, scale: dict[str, Any], device: torch.device
) -> tuple[PrecisionSettings, Policy]:
    try:
        settings = PrecisionSettings(amp_dtype=name, **scale)
        return settings, choose_policy(settings, device)
    except ConfigError as error:
        if error.field != "precision.amp_dtype":
            raise
        _, _, problem = error.cause.partition(": ")
        remedy = error.remedy.replace("--amp-dtype fp32", "precision='fp32'")
        raise ConfigError("precision", name, problem, remedy) from None


def _device(module: nn.Module) -> torch.device:
    devices = {p.device for p in module.parameters() if p.requires_grad}
    if len(devices) != 1:
        where = ", ".join(sorted(str(d) for d in devices)) or "no device: nothing is trained"
        raise ConfigError("module", type(module).__name__, f"its trained parameters are on {where}",
                          "move it to one device first")  # fmt: skip
    return devices.pop()


def _adopt(module: nn.Module, optimizer: Any, policy: Policy) -> Any:
    """Rounds the weights that an existing optimizer updates; its masters keep the unrounded values."""
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "masters"):
        if policy.is_half:
            raise ConfigError(
                "optimizer", kind, "does not support fp32 masters for half-precision weights",
                "pass its name or a Paceline optimizer, or use precision='fp32'",
            )  # fmt: skip
        raise ConfigError(
            "optimizer", kind, "is neither a name nor an optimizer of Paceline",
            "in fp32 it needs no prepare: use it as it is",
        )  # fmt: skip
    held = set(optimizer.parameters())
    trained = {p for p in module.parameters() if p.requires_grad}
    if held != trained:
        raise ConfigError(
            "optimizer", kind,
            f"has {len(held)} parameters, {len(held - trained)} of them not of the model, which "
            f"trains {len(trained)}",
            "create it from parameter_groups(module, weight_decay)",
        )  # fmt: skip
    drawn = {p: p.detach().clone() for p in held if p.dtype == torch.float32}
    policy.convert(module)
    # Creates masters for the parameters that were fp32 before and had none.
    optimizer.load_state_dict(optimizer.state_dict())
    for master, parameter in zip(optimizer.masters(), optimizer.parameters(), strict=True):
        if parameter in drawn:
            master.detach().copy_(drawn[parameter])
    return optimizer


@torch.no_grad()
def _broadcast(made: Prepared) -> None:
    """Copies rank 0's weights, masters and buffers to all ranks."""
    masters = made._masters.masters()
    weights = [*made.model.parameters(), *made.model.buffers()]
    own = {id(p) for p in weights}
    for tensor in [*weights, *(m for m in masters if id(m) not in own)]:
        # A copy in channels_last, otherwise the tensor itself.
        content = tensor.detach().contiguous()
        dist.broadcast(content, src=0)
        tensor.copy_(content)
