"""Half precision that cannot work: one line each, the same on both ranks, and no traceback."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import faults
from cli_runs import Call, events, run, run_two, small
from paceline.train.checkpoint import Checkpoint


def _no_half() -> None:
    """A device that has no convolutions in half precision."""
    import torch

    import paceline.precision.policy as module

    real = module.F.conv2d

    def convolution(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if image.dtype != torch.float32:
            raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")
        return real(image, weight)

    module.F = type("F", (), {"conv2d": staticmethod(convolution)})  # type: ignore[assignment]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_format_that_one_ranks_device_lacks(tmp_path: Path, dtype: str) -> None:
    arguments = small("--output", "run", "--amp-dtype", dtype)
    for rank in run_two(arguments, tmp_path, [None, _no_half]):
        assert rank.error_line() == (
            f"rank 1: precision.amp_dtype = '{dtype}': cpu cannot compute in it "
            "(\"slow_conv2d_cpu\" not implemented for 'Half'); use --amp-dtype fp32"
        )
        assert rank.code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--amp-dtype", "half"], "precision.amp_dtype = 'half': unknown; "),
        (["--compile", "all"], "run.compile = 'all': unknown; "),
        (["--set", "run.cuda_graphs=on"], "run.cuda_graphs = 'on': needs a GPU, not cpu; use 'auto'"),
        (["--set", "run.fused_norm=on"], "run.fused_norm = 'on': needs a GPU; use 'auto'"),
        (["--set", "precision.loss_scale=0"], "precision.loss_scale = 0.0: must be above 0; "),
        (["--set", "precision.loss_scal=2.0"], "precision.loss_scal"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_used(call: Call, arguments: list[str], words: str) -> None:
    done = call(*small("--output", "run", *arguments))
    assert done.error_line().startswith(words)
    assert done.code == 2


def _overflow_on_this_rank(nth: int) -> None:
    """In the nth backward pass of this rank, counted from 1, gradients leave fp16's range."""
    import torch

    from paceline.comm.exchange import GradientExchange

    real, calls = GradientExchange.gather, [0]

    def gather(self: GradientExchange) -> None:
        calls[0] += 1
        if calls[0] == nth:
            gradient = self._trained["conv1.weight"].grad
            assert gradient is not None
            gradient.fill_(torch.inf)
        real(self)

    GradientExchange.gather = gather  # type: ignore[method-assign]


def test_an_overflow_on_one_rank_skips_the_step_on_both_and_training_goes_on(
    tmp_path: Path,
) -> None:
    arguments = small("--output", "run", "--amp-dtype", "fp16")
    fault = partial(_overflow_on_this_rank, 4)
    done = run_two(arguments, tmp_path, [None, fault])
    assert [rank.code for rank in done] == [0, 0], done
    for rank in (0, 1):
        steps = events(tmp_path / "run", "step", rank)
        assert [step["step"] for step in steps if step["skipped"]] == [4]
        assert [step["loss_scale"] for step in steps] == [65536.0] * 4 + [32768.0] * 9


def test_a_divergence_ends_with_one_line_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--amp-dtype", "fp16", "--set", "run.max_skipped_steps=3",
                      "--set", "checkpoint.interval_steps=2")  # fmt: skip
    done = run(arguments, tmp_path, partial(faults.poison, 6))
    assert done.code == 1
    assert done.error_line() == (
        "diverged at step 6: the loss was not finite in 3 steps in a row; first in the gradient of "
        "fc.bias (38 of 38 tensors); lower --lr (now 0.05 at its peak) or lengthen --warmup-epochs; "
        "the last good checkpoint is kept"
    )
    saved = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    assert all(value.isfinite().all() for value in Checkpoint.read(saved[-1]).model.values())
    assert run([*arguments, "--resume", "auto"], tmp_path).code == 0
