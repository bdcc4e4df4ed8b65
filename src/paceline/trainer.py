"""`Trainer`: trains, evaluates and predicts with a model and data of the user's choice.

    result = pl.Trainer("resnet18", "photos/", epochs=20).fit()
    print(result.top1, result.folder)

One process is one rank. Start the same script with torchrun, srun or mpirun for several. Named
arguments override `settings`, which reaches every setting and overrides the recipe, which overrides the
defaults of docs/settings.md.
`paceline train` is built on this class.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from paceline.comm.peer_errors import ShowError
from paceline.config import RunConfig, load_config
from paceline.core.errors import ConfigError, RunError
from paceline.core.events import Observer
from paceline.core.host import StartUp
from paceline.core.imports import PYTHON, object_name
from paceline.data import Source, as_source
from paceline.train.callbacks import Callback
from paceline.train.checkpoint import Checkpoint, find_checkpoint
from paceline.train.components import Components, Loss
from paceline.train.display import create_display
from paceline.train.evaluate import EvalResult, evaluate_file
from paceline.train.inference import ImageLike, Prediction, Predictor
from paceline.train.run import RunOutcome, run_training

ModelLike = str | nn.Module | Callable[..., nn.Module]
DataLike = str | Path | Source | Any


@dataclass(frozen=True)
class Result:
    """The outcome of a run, equal on all ranks up to `summary`, which rank 0 has. Accuracies are in
    percent. `stopped_by` is finished, target, callback or the name of a signal."""

    folder: Path
    stopped_by: str
    top1: float | None
    top5: float | None
    best_top1: float | None
    images_per_s: float | None
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, outcome: RunOutcome) -> Result:
        found = outcome.summary
        return cls(
            folder=outcome.folder,
            stopped_by=outcome.result.stopped_by,
            top1=found.get("top1"),
            top5=found.get("top5"),
            best_top1=found.get("best_top1"),
            images_per_s=found.get("images_per_s"),
            summary=found,
        )

    @property
    def weights(self) -> Path:
        """The final weights as safetensors. RunError where the run was stopped by a signal."""
        path = self.folder / "weights.safetensors"
        if self.stopped_by.startswith("SIG"):
            raise RunError(
                f"the run was stopped by {self.stopped_by} and has no final weights",
                "continue it with resume='auto', or use its checkpoints",
            )
        return path

    @property
    def report(self) -> Path:
        return self.folder / "report.html"


class Trainer:
    """Trains a model.

    `model` is a built-in name, `timm:NAME`, `torchvision:NAME`, `package.module:factory`, a function
    that returns a module, or a module. `data` is a directory (shards, class folders, ImageNet's or
    CIFAR-10's files), a `pl.Source`, or a map-style torch Dataset of (image, label); `val_data` is a
    source or dataset for evaluation, or `val_split` the share of `data` to hold out. `recipe` is a
    shipped name or a TOML file. `optimizer` is a name, `module:Class`, or a function that makes an
    optimizer of parameter groups. `loss` maps outputs and targets to one value per sample. `settings`
    has any setting as `{"section.key": value}`. `trust` allows the code that a recipe or a run in
    `output` names; code that you name here needs none.

    Example:
        trainer = pl.Trainer("resnet18", "photos/", epochs=20, val_split=0.1)
        result = trainer.fit()
        trainer.predict(["new.jpg"])[0].label
    """

    def __init__(
        self,
        model: ModelLike | None = None,
        data: DataLike | None = None,
        *,
        val_data: Source | Any | None = None,
        val_split: float | None = None,
        recipe: str | Path | None = None,
        optimizer: str | Callable[..., Any] | None = None,
        lr: float | None = None,
        epochs: int | None = None,
        global_batch: int | None = None,
        batch_size: int | None = None,
        image_size: int | None = None,
        precision: str | None = None,
        plan: str | Path | None = None,
        loss: str | Loss | None = None,
        augment: Callable[..., Any] | None = None,
        device_augment: Callable[[Tensor], Tensor] | None = None,
        callbacks: Sequence[Callback] = (),
        pretrained: str | Path | None = None,
        device: str | None = None,
        seed: int | None = None,
        output: str | Path | None = None,
        resume: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        trust: bool = False,
    ) -> None:
        named: dict[str, Any] = {
            "data.val_split": val_split, "optim.lr": lr, "run.epochs": epochs,
            "run.global_batch_size": global_batch, "run.batch_size": batch_size,
            "data.image_size": image_size, "precision.amp_dtype": precision, "comm.plan": plan,
            "run.pretrained": pretrained, "run.device": device, "run.seed": seed,
            "run.output": output, "run.resume": resume,
        }  # fmt: skip
        values = {name: _plain(value) for name, value in named.items() if value is not None}
        components: dict[str, Any] = {
            "augment": augment, "device_augment": device_augment,
            "callbacks": _checked_callbacks(callbacks),
        }  # fmt: skip
        _take(values, components, "model.name", "model", model)
        _take(values, components, "optim.name", "optimizer", optimizer)
        _take(values, components, "run.loss", "loss", loss)
        _take_data(values, components, data, val_data)
        values = {**(settings or {}), **values}
        if recipe is None and not {"data.dir", "data.source"} & values.keys():
            recipe = "quickstart"
        config = load_config(str(recipe) if recipe else None, values, trust=trust)
        self._set_up(config, Components(**components), trust)

    @classmethod
    def from_config(cls, config: RunConfig, components: Components | None = None) -> Trainer:
        """A trainer for a configuration that is already complete."""
        trainer = cls.__new__(cls)
        trainer._set_up(config, components or Components())
        return trainer

    def _set_up(self, config: RunConfig, components: Components, trust: bool = False) -> None:
        self.config = config
        # Checkpoints in the run folder may come from elsewhere: they may name what this program names.
        self._trust = trust or config
        self._components = components
        self._folder: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The run folder, once `fit` has chosen it."""
        return self._folder

    def fit(self) -> Result:
        """Trains to the end, or until a signal or callback stops it. Raises a `PacelineError` with one
        line that names cause and remedy; the last checkpoint stays, and `resume="auto"` continues."""
        return Result.of(self.run())

    def run(
        self,
        display: Callable[[], Observer] | None = None,
        show_error: ShowError | None = None,
        startup: StartUp | None = None,
    ) -> RunOutcome:
        """`fit` with a display of one's own. `startup` has what the command took until here."""
        interval = self.config.run.log_interval
        shown = display or (lambda: create_display(Console(), interval))
        outcome = run_training(self.config, shown, show_error, self._components, startup)
        self._folder = outcome.folder
        return outcome

    def evaluate(self, data: Source | Any | None = None, *, batch_size: int = 256) -> EvalResult:
        """Accuracy of the best checkpoint on the validation data, or on `data`: of a directory its
        validation set, or all images if it has none. All ranks call it."""
        components, path = self._components, find_checkpoint(self._trained())
        overrides: dict[str, Any] = {"run.device": self.config.run.device}
        if isinstance(data, str | Path):
            overrides |= {"data.dir": str(data), "data.source": "auto"}
            components = replace(components, train_data=None, val_data=None)
        elif data is not None:
            source = as_source(data, "val", Checkpoint.read(path).classes)
            components = replace(components, val_data=source)
        found, _, _ = evaluate_file(path, overrides, batch_size, components, trust=self._trust)
        if isinstance(found, signal.Signals):
            raise RunError(f"the evaluation was stopped by {found.name}", "call it again")
        return found

    def predictor(self) -> Predictor:
        """The best checkpoint, ready to classify images and to be exported."""
        return Predictor.load(
            self._trained(),
            device=self.config.run.device,
            components=self._components,
            trust=self._trust,
        )

    def predict(self, images: Iterable[ImageLike], *, top: int = 5) -> list[Prediction]:
        """Classifies files, PIL images or uint8 arrays with the best checkpoint."""
        return self.predictor().predict(images, top=top)

    def export(self, out: str | Path, *, opset: int | None = None) -> str:
        """Writes the best checkpoint as `.onnx`, `.pt2` or `.safetensors`, and returns what was done.
        `opset` is the version of ONNX's operators."""
        cpu = Predictor.load(
            self._trained(),
            device="cpu",
            precision="fp32",
            components=self._components,
            trust=self._trust,
        )
        return cpu.export(Path(out), opset)

    def _trained(self) -> Path:
        if self._folder is None and self.config.run.output:
            self._folder = Path(self.config.run.output)
        if self._folder is None or not self._folder.exists():
            raise RunError("nothing has been trained yet", "call fit() first, or give output=")
        return self._folder


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _take(
    values: dict[str, Any], components: dict[str, Any], setting: str, component: str, given: Any
) -> None:
    """A name goes to the settings; an object to the components, and its name to the settings."""
    if given is None:
        return
    if isinstance(given, str):
        values[setting] = given
        return
    if not callable(given):
        raise ConfigError(component, given, "is neither a name nor callable", "see pl.Trainer")
    values[setting] = object_name(given)
    components[component] = given


def _take_data(
    values: dict[str, Any], components: dict[str, Any], data: Any, val_data: Any
) -> None:
    if isinstance(data, str | Path):
        values |= {"data.dir": str(data), "data.source": "auto"}
    elif data is not None:
        values["data.source"] = PYTHON
        components["train_data"] = as_source(data)
    if val_data is not None:
        train = components.get("train_data")
        components["val_data"] = as_source(val_data, "val", train.classes if train else None)


def _checked_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                "callbacks", callback, "is not a Callback", "derive its class from pl.Callback"
            )
    return tuple(callbacks)
