"""Ways to train that Paceline does not offer, tried by patching it: searches 17 to 19.

    python explore.py SERIES.toml --data-dir DIR --output DIR

Reads a series as ../series.py does, and in a run the keys `explore.sam` (sharpness-aware minimisation:
each layer's radius is so many of its weights' norms, the way uphill that of a micro-batch's gradient),
`explore.reflect` (crops filled up by reflection) and `explore.altflip` (an image is flipped every other
epoch, not by chance). After each run it evaluates averages of the weights too, one for each of `DECAYS`.
For commit a5c8d40 (searches 17 and 18 ran on 14a03f5). The averages were built: `run.average_epochs`.
"""

from __future__ import annotations

import argparse
import runpy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paceline.train.run as run_module
from paceline.config import load_config
from paceline.data.create_loader import create_eval_loader
from paceline.data.on_device.device_augment import _OUTSIDE, DeviceAugment
from paceline.data.on_device.resident_loader import ResidentTrainLoader
from paceline.train.evaluate import evaluate
from paceline.train.micro_step import MicroStep, mixed
from paceline.train.update import Update

CHOSEN: dict[str, Any] = {}
Line = runpy.run_path(str(Path(__file__).parents[1] / "series.py"))["Line"]
DECAYS = (0.95, 0.97, 0.98, 0.985, 0.99)  # searches 17 and 18: 0.7, 0.85, 0.93, 0.97

plain_init, plain_run, plain_compute = Update.__init__, Update._run, MicroStep._compute
plain_shifted, plain_draw = DeviceAugment._shifted, ResidentTrainLoader._draw
plain_conclude = run_module._conclude


def init(
    self: Any, model: Any, optimizer: Any, exchange: Any, batch_norm: Any, *rest: Any, **how: Any
):
    plain_init(self, model, optimizer, exchange, batch_norm, *rest, **how)
    self.masters, self.norms = optimizer.masters(), batch_norm
    self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
    self.wide = [i for i, p in enumerate(self.parameters) if p.dim() > 1]
    self.averages = {d: [m.detach().clone() for m in self.masters] for d in DECAYS}
    self.statistics = {d: batch_norm.flat.clone() for d in DECAYS}
    MicroStep.update = self


@torch.no_grad()
def run(self: Any) -> None:
    plain_run(self)
    for decay in DECAYS:
        torch._foreach_lerp_(self.averages[decay], self.masters, 1 - decay)
        self.statistics[decay].lerp_(self.norms.flat, 1 - decay)


def compute(self: Any, images: Any, labels: Any, mix: Any) -> None:
    """With `sam`, the gradient is that at the weights plus a step uphill, which is taken back."""
    radius = CHOSEN.get("sam", 0)
    if not radius:
        plain_compute(self, images, labels, mix)
        return
    update, own = MicroStep.update, None
    half = [update.parameters[i] for i in update.wide]
    masters = [update.masters[i] for i in update.wide]
    with self._policy.compute():
        inputs = self._normalize(images, self._policy.device)
        if mix is not None:
            inputs, own = mixed(inputs, mix)
        outputs = self.forward(inputs)
    loss = self._loss(outputs.float(), labels, own) * self._share * self._scale.value
    gradients = [g.float() for g in torch.autograd.grad(loss, half)]
    with torch.no_grad():
        sizes = zip(torch._foreach_norm(masters), torch._foreach_norm(gradients), strict=True)
        steps = [radius * weights / gradient.clamp(min=1e-12) for weights, gradient in sizes]
        uphill = [m + g * s for m, g, s in zip(masters, gradients, steps, strict=True)]
        torch._foreach_copy_([p.data for p in half], uphill)
        statistics = update.norms.flat.clone()
    plain_compute(self, images, labels, mix)
    with torch.no_grad():
        torch._foreach_copy_([p.data for p in half], masters)
        update.norms.flat.copy_(statistics)


def shifted(self: Any, indices: Any, numbers: Any) -> Any:
    if not CHOSEN.get("reflect"):
        return plain_shifted(self, indices, numbers)
    size = self._size
    flip, down, right = numbers[:3, :, None]
    columns = torch.where(flip > 0, size - 1 - self._sides, self._sides)
    line, column = (self._sides - down).abs(), (columns - right).abs()
    line, column = (torch.where(x >= size, 2 * (size - 1) - x, x) for x in (line, column))
    source = ((indices[:, None] * size + line) * size)[:, :, None] + column[:, None, :]
    if self._cutout:
        source.masked_fill_(self._hole(numbers), _OUTSIDE)
    source.clamp_max_(len(self._held.pixels) - 1)
    found = self._held.pixels.index_select(0, source.view(-1))
    return found.view(len(indices), size, size, -1)


def draw(self: Any, start: int, numbers: Any, check: Any) -> Any:
    met = plain_draw(self, start, numbers, check)
    if CHOSEN.get("altflip"):
        epochs, indices = self._order.at(start, start + numbers.shape[1])
        drawn = np.asarray(indices).astype(np.uint64) * np.uint64(2654435761) >> np.uint64(13)
        numbers[1] = (drawn.astype(np.int64) + np.asarray(epochs).astype(np.int64)) & 1
    return met


def conclude(training: Any, result: Any) -> Any:
    update, words = MicroStep.update, []
    own = [m.detach().clone() for m in update.masters]
    statistics = update.norms.flat.clone()
    with torch.no_grad():
        for decay in DECAYS:
            torch._foreach_copy_(update.parameters, update.averages[decay])
            update.norms.flat.copy_(update.statistics[decay])
            loader = create_eval_loader(
                training.validation, training.config.data, rank=0, world_size=1, batch_size=500,
                device=training.group.device,
            )  # fmt: skip
            step = training.step
            with loader:
                found = evaluate(
                    training.model,
                    loader,
                    step.normalize,
                    step.policy,
                    training.group,
                    training.stop,
                )
            words.append(f"ema{decay} {found.top1:.2f}")
        torch._foreach_copy_(update.parameters, own)
        update.norms.flat.copy_(statistics)
    print(Path(training.config.run.output).name, "EMA:", *words, flush=True)
    return plain_conclude(training, result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("series", type=Path)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    Update.__init__, Update._run, MicroStep._compute = init, run, compute
    DeviceAugment._shifted, ResidentTrainLoader._draw = shifted, draw
    run_module._conclude = conclude
    series = tomllib.loads(options.series.read_text(encoding="utf-8"))
    for name, own in series["runs"].items():
        settings = {**series["common"], **own, "run.output": str(options.output / name)}
        settings |= {"data.dir": options.data_dir, "data.source": "auto"}
        CHOSEN.clear()
        for key in [key for key in settings if key.startswith("explore.")]:
            CHOSEN[key.removeprefix("explore.")] = settings.pop(key)
        recipe = settings.pop("recipe")
        beside = options.series.parent / recipe
        recipe = str(beside) if beside.is_file() else recipe
        run_module.run_training(load_config(recipe, settings), lambda name=name: Line(name))


if __name__ == "__main__":
    main()
