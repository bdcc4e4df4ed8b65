"""A backward pass before the first step: the order of the gradients, and whether model and loss work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RunError
from paceline.core.imports import first_line
from paceline.data import Normalizer
from paceline.precision.policy import Policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.loss import CrossEntropy, OwnLoss, TrainingLoss, check_gradient
from paceline.train.machine import run_eagerly
from paceline.train.micro_step import step_error
from paceline.train.model_checks import restored_buffers


@dataclass(frozen=True)
class DryBackward:
    """One backward pass over images of zeros, to record the order of the gradients.

    Running statistics and random numbers are restored; the caller discards the gradients. `images` is
    the shape of a micro-batch, so that compiled code serves the first step, too.
    """

    forward: Callable[[Tensor], Tensor]
    policy: Policy
    normalize: Normalizer
    batch_norm: BatchNormState
    images: tuple[int, int, int, int]
    loss: TrainingLoss = field(default_factory=CrossEntropy)
    # A user's model: its other buffers are restored too, and what it raises is reported in one line.
    foreign: nn.Module | None = None

    def __call__(self, guard: AbstractContextManager[None] | None = None) -> None:
        """Raises the errors of a first step. `guard` is around forward and backward."""
        with self._as_first_step():
            self._run(guard or nullcontext())

    @contextmanager
    def _as_first_step(self) -> Iterator[None]:
        """Restores the buffers of a user's model; what is raised inside is an error of the first step."""
        try:
            with restored_buffers(self.foreign) if self.foreign else nullcontext():
                yield
        except Exception as error:  # a defect of the program is raised again
            fault = step_error(error, 0, self.images[0], foreign=self.foreign is not None)
            if fault is None:
                raise
            raise fault from error

    def _run(self, guard: AbstractContextManager[None]) -> None:
        device = self.policy.device
        on_gpu = device.type == "cuda"
        self.batch_norm.remember()
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            zeros = torch.zeros(self.images, dtype=torch.uint8, device=device)
            every = torch.ones((), device=device)
            try:
                with guard:
                    with self.policy.compute():
                        outputs = self.forward(self.normalize(zeros, device))
                    if isinstance(self.loss, CrossEntropy):
                        outputs.float().sum().backward()  # type: ignore[no-untyped-call]
                    else:
                        self._total(outputs, mixes=False).backward()  # type: ignore[no-untyped-call]
            finally:
                self.batch_norm.discard_if(every)
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()

    def check_loss(self, model: nn.Module, *, mixes: bool) -> TrainingLoss:
        """Tries the loss, forward and backward, and returns it. Raises one line if it raises, has another
        shape or no gradient. Notes an own loss that does not take the model's evaluation outputs."""
        with self._as_first_step():
            self._check_loss(model, mixes)
        return self.loss

    def _check_loss(self, model: nn.Module, mixes: bool) -> None:
        device = self.policy.device
        trained = [p for p in model.parameters() if p.requires_grad]
        self.batch_norm.remember()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            zeros = torch.zeros(self.images, dtype=torch.uint8, device=device)
            with self.policy.compute():
                outputs = self.forward(self.normalize(zeros, device))
            total = self._total(outputs, mixes=mixes)
            check_gradient(total, self.loss)
            try:
                torch.autograd.grad(total, trained, allow_unused=True)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                    raise
                raise RunError(
                    f"the backward pass of the loss {self.loss.name} failed ({first_line(error)})",
                    "compute it from the outputs with differentiable operations",
                ) from error
            if isinstance(self.loss, OwnLoss):
                self.loss.in_evaluation = self._takes_evaluation(model, zeros)
        self.batch_norm.discard_if(torch.ones((), device=device))

    def _takes_evaluation(self, model: nn.Module, zeros: Tensor) -> bool:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad(), run_eagerly(), self.policy.compute():
                outputs = model(self.normalize(zeros, self.policy.device))
                self.loss.evaluated(outputs, self._labels(len(zeros)))
        except RunError:
            return False
        finally:
            for module, training in modes:
                module.training = training
        return True

    def _total(self, outputs: Any, *, mixes: bool) -> Tensor:
        own = torch.ones(self.images[0], device=self.policy.device) if mixes else None
        return self.loss.total(outputs, self._labels(self.images[0]), own)

    def _labels(self, samples: int) -> Tensor:
        return torch.zeros(samples, dtype=torch.int64, device=self.policy.device)
