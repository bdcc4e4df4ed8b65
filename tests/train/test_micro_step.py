"""The micro-step: images mixed with one another, the loss of mixed labels, and errors of a pass."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from accel.norm_reference import channels_last
from paceline.core.errors import DataError, RunError
from paceline.train.loss import Mixing, mixed
from paceline.train.model_checks import step_error
from refusals import refused
from small_runs import run_on_ranks, run_small, small_config
from train.steps import Made, alone, make_step

SIZE = 12


def images(samples: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return channels_last(torch.randn(samples, 3, SIZE, SIZE, dtype=dtype))


def test_a_table_is_a_function_of_seed_step_and_micro_batch() -> None:
    first = Mixing(0.2, 1.0, SIZE, seed=4).table(7, 2, 50)
    assert torch.equal(first, Mixing(0.2, 1.0, SIZE, seed=4).table(7, 2, 50))
    others = (
        Mixing(0.2, 1.0, SIZE, seed=5).table(7, 2, 50),
        Mixing(0.2, 1.0, SIZE, seed=4).table(8, 2, 50),
        Mixing(0.2, 1.0, SIZE, seed=4).table(7, 3, 50),
    )
    for other in others:
        assert not torch.equal(first, other)


def test_mixup_adds_two_images_up() -> None:
    given, table = images(5), Mixing(0.4, 0.0, SIZE, seed=0).table(0, 0, 5)
    found, own = mixed(given, table)
    share = table[:, 0]
    assert torch.equal(own, share)
    for i, j in enumerate((4, 3, 2, 1, 0)):
        expected = share[i] * given[i] + (1 - share[i]) * given[j]
        torch.testing.assert_close(found[i], expected)


def test_cutmix_puts_a_box_of_one_image_into_the_other() -> None:
    given, table = images(40), Mixing(0.0, 1.0, SIZE, seed=0).table(0, 0, 40)
    found, own = mixed(given, table)
    other = given.flip(0)
    sizes = set()
    for i, (outside, top, bottom, left, right) in enumerate(table.int().tolist()):
        assert outside == 1
        assert 0 <= top <= bottom <= SIZE
        assert 0 <= left <= right <= SIZE
        expected = given[i].clone()
        expected[:, top:bottom, left:right] = other[i][:, top:bottom, left:right]
        assert torch.equal(found[i], expected)
        area = (bottom - top) * (right - left)
        assert float(own[i]) == pytest.approx(1 - area / SIZE**2)
        sizes.add(area)
    assert len(sizes) > 10


def test_boxes_are_as_large_as_the_shares_say() -> None:
    """Where no edge cuts them off: Beta(1, 1) is even, so is 1 - the box's part of the image."""
    table = Mixing(0.0, 1.0, 1000, seed=0).table(0, 0, 20_000)
    tall, wide = table[:, 2] - table[:, 1], table[:, 4] - table[:, 3]
    whole = (table[:, 1] > 0) & (table[:, 2] < 1000) & (table[:, 3] > 0) & (table[:, 4] < 1000)
    assert (tall[whole] == wide[whole]).all()
    # A box of side s lies inside at (1 - s)² of the centres: small ones are found more often.
    sides = np.linspace(0, 1, 100_001)
    weight = 2 * sides * (1 - sides) ** 2
    expected = (weight * sides).sum() / weight.sum()
    assert float(tall[whole].mean()) / 1000 == pytest.approx(expected, rel=0.02)


def test_with_both_each_image_takes_one() -> None:
    table = Mixing(0.2, 1.0, SIZE, seed=0).table(0, 0, 2000)
    boxed = table[:, 2] > table[:, 1]
    assert (table[boxed, 0] == 1).all()
    assert 0.4 < float(boxed.float().mean()) < 0.55  # some boxes are empty
    assert float(table[~boxed, 0].min()) < 0.5
    for dtype in (torch.float32, torch.float16):
        found, own = mixed(images(6, dtype), Mixing(0.2, 1.0, SIZE, seed=0).table(0, 0, 6))
        assert (found.dtype, own.dtype) == (dtype, torch.float32)
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.3, 0.0), (0.0, 1.0), (0.3, 1.0)])
def test_the_step_s_loss_is_that_of_soft_labels(mixup: float, cutmix: float) -> None:
    plain, step = (make_step(alone(), made=Made(12)) for _ in range(2))
    step.mixing = Mixing(mixup, cutmix, SIZE, seed=9)
    batch = next(plain.loader)
    table = Mixing(mixup, cutmix, SIZE, seed=9).table(0, 0, 12)
    inputs, own = mixed(plain.normalize(batch.images, "cpu"), table)
    outputs = plain.model(inputs).detach().double()
    classes = outputs.shape[1]
    kept = own[:, None].double()
    one_hot = F.one_hot(batch.labels, classes).double()
    soft = kept * one_hot + (1 - kept) * one_hot.flip(0)
    soft = 0.9 * soft + 0.1 / classes
    expected = float(-(soft * outputs.log_softmax(1)).sum(1).mean())
    assert step.run(0, 0.1).loss == pytest.approx(expected, rel=1e-5)
    assert plain.run(0, 0.1).loss != pytest.approx(expected, rel=1e-3)


MIXED = {"run__batch_size": 8, "run__mixup": 0.2, "run__cutmix": 1.0}


def test_one_rank_and_two_and_a_resumed_run_mix_alike(tmp_path: Path) -> None:
    every = {"checkpoint__interval_steps": 1, "checkpoint__keep": 9}
    whole = run_small(tmp_path / "one", **MIXED, **every)
    resume = str(tmp_path / "one/checkpoints/step-00000003.pt")
    rest = run_small(tmp_path / "rest", **MIXED, run__resume=resume)
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
    unmixed = run_small(tmp_path / "unmixed", run__batch_size=8)
    assert unmixed.summary["weights_sha256"] != whole.summary["weights_sha256"]
    run_on_ranks(2, tmp_path / "two", MIXED)
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        if "running" not in name and "tracked" not in name:  # averaged over ranks
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("value", [-0.1, 0.001, 101.0, float("nan")])
@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_what_is_no_strength_is_refused(name: str, value: float, tmp_path: Path) -> None:
    with refused(f"run.{name}"):
        small_config(tmp_path, **{f"run__{name}": value})


def compile_error(text: str) -> Exception:
    """An error of the compiler's, known by its module: importing the compiler takes seconds."""
    return type("Failed", (RuntimeError,), {"__module__": "torch._inductor.exc"})(text)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        ValueError("Expected more than 1 value per channel when training, got (1, 4, 1, 1)"),
        compile_error("backend='inductor' raised:\n\nImportError: no ninja\nSet TORCH_LOGS"),
        compile_error(""),
    ],
    ids=["memory", "single value", "compiler", "silent compiler"],
)
def test_what_a_user_can_fix_is_one_line(error: Exception) -> None:
    found = step_error(error, 3, 8)
    assert isinstance(found, RunError)
    assert found.remedy
    assert "\n" not in str(found)


def test_our_own_errors_stay_and_a_defect_keeps_its_traceback() -> None:
    own = DataError("the shard is gone", "bring it back")
    assert step_error(own, 3, 8) is own
    for defect in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("x")):
        assert step_error(defect, 3, 8) is None


def test_a_size_that_comes_once_is_not_compiled() -> None:
    """12, 12, and a short step of 5: one compilation, and the weights of an uncompiled run."""
    sizes: list[int] = []

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        sizes.append(max(given.shape[0] for given in inputs if given.dim() == 4))
        return module.forward

    plain, step = (make_step(alone()) for _ in range(2))
    step.micro.forward = torch.compile(step.model, dynamic=False, backend=note)
    for number in range(3):
        assert step.run(number, 0.1).loss == pytest.approx(plain.run(number, 0.1).loss, rel=1e-6)
    assert sizes == [12]


class Rearranging(nn.Module):
    """Keeps a copy of the images, as a first convolution on windows of pixels does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE * SIZE, 4)
        self.alive: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = weakref.ref(x)
        out: torch.Tensor = self.layer(x.flatten(1).clone())
        out.register_hook(lambda grad: self.alive.append(given() is not None))
        return out


def test_backward_does_not_hold_images_that_the_model_does_not_keep() -> None:
    model = Rearranging()
    make_step(alone(), model=model).run(0, 0.1)
    assert model.alive == [False]
