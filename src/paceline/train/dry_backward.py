"""A dry backward pass: the order of the gradients, and nothing left behind.

In: the forward pass as training runs it, and the shape of its micro-batches. Out: one backward pass over
images of zeros. Running statistics and random numbers are afterwards what they were; gradients are
the caller's to throw away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.normalize import Normalizer
from paceline.precision.policy import Policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.step_error import step_error


@dataclass(frozen=True)
class DryBackward:
    """`images`: the shape of a micro-batch, so that compiled code serves the first step, too."""

    forward: Callable[[Tensor], Tensor]
    policy: Policy
    normalize: Normalizer
    batch_norm: BatchNormState
    images: tuple[int, int, int, int]

    def __call__(self) -> None:
        """Fails in the words of a first step."""
        try:
            self._run()
        except Exception as error:  # what a user cannot mend is raised again
            fault = step_error(error, 0, self.images[0])
            if fault is None:
                raise
            raise fault from error

    def _run(self) -> None:
        device = self.policy.device
        on_gpu = device.type == "cuda"
        self.batch_norm.remember()
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            zeros = torch.zeros(self.images, dtype=torch.uint8, device=device)
            with self.policy.compute():
                outputs = self.forward(self.normalize(zeros, device))
            outputs.float().sum().backward()  # type: ignore[no-untyped-call]
        self.batch_norm.discard_if(torch.ones((), device=device))
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
