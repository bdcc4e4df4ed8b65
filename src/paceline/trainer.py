"""`Trainer`: trains, evaluates and predicts with a model and data of the user's choice.

    result = pl.Trainer("resnet18", "photos/", epochs=20).fit()
    print(result.top1, result.folder)

Each process is one rank. To use several ranks, start the same script with torchrun, srun or mpirun.
Named arguments override `settings`, `settings` override the recipe, and the recipe overrides the
defaults of docs/settings.md.
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
from paceline.config import RunConfig, default_recipe, load_config
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
    """The results of a training run. All fields except `summary` are equal on all ranks.

    Attributes:
        folder: The run folder.
        stopped_by: The reason for the end: `finished`, `target`, `callback` or the name of a signal.
        top1: Final top-1 accuracy in percent.
        top5: Final top-5 accuracy in percent.
        best_top1: Best top-1 accuracy of the run in percent.
        images_per_s: Training throughput in images per second, summed over all ranks.
        summary: Content of `summary.json` on rank 0; empty on all other ranks.

    Example:
        result = pl.Trainer("resnet18", "photos/", epochs=20).fit()
        print(result.top1, result.weights)
    """

    folder: Path
    stopped_by: str
    top1: float | None
    top5: float | None
    best_top1: float | None
    images_per_s: float | None
    summary: Mapping[str, Any]

    @property
    def weights(self) -> Path:
        """Path of the safetensors file with the final weights.

        Raises:
            RunError: If a signal stopped the run, because such a run has no final weights.
        """
        if self.stopped_by.startswith("SIG"):
            raise RunError(
                f"the run was stopped by {self.stopped_by} and has no final weights",
                "continue it with resume='auto', or use its checkpoints",
            )
        return self.folder / "weights.safetensors"

    @property
    def report(self) -> Path:
        """Path of the HTML report."""
        return self.folder / "report.html"


class Trainer:
    """Trains, evaluates and exports a model.

    Args:
        model: The name of a built-in model, `timm:NAME`, `torchvision:NAME`, `package.module:factory`,
            a function that returns a module, or a module.
        data: A directory (shards, class folders, or the files of ImageNet or CIFAR-10), a `pl.Source`,
            or a map-style torch Dataset of (image, label).
        val_data: A `pl.Source` or a torch Dataset for evaluation.
        val_split: Fraction of `data` to hold out for evaluation.
        recipe: The name of a recipe, or a TOML file. Default: `quickstart` without data, and `auto` for
            `data` without a model.
        optimizer: A name, `module:Class`, or a function that creates an optimizer from parameter groups.
        lr: Learning rate; the same as the setting `optim.lr`.
        epochs: Number of epochs to train.
        global_batch: Samples per update, summed over ranks and micro-batches.
        batch_size: Samples per micro-batch on one rank.
        image_size: Width and height of the images in pixels.
        precision: `fp16`, `bf16`, `fp32` or `auto`.
        plan: A `plan.toml` file that `paceline tune` has written.
        loss: A name, or a function that maps outputs and targets to one value per sample.
        augment: A function that changes one decoded image on the host.
        device_augment: A function that changes a batch of normalized images on the device.
        callbacks: Callbacks, which run in the given order.
        pretrained: A file with the initial weights.
        device: `cpu`, `cuda` or `auto`.
        seed: Seed of initial weights, sample order and augmentation.
        output: The run folder.
        resume: A checkpoint file, or `auto` for the newest checkpoint of the run.
        settings: Any other settings, as `{"section.key": value}`.
        trust: True to allow code that a recipe, or a run in `output`, names. Code that the arguments
            name needs no permission.

    Raises:
        ConfigError: If an argument or a setting is invalid.

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
        if recipe is None:
            # A given model has its own needs, so nothing is chosen for it.
            chooses = data is not None and not {"model.name"} & values.keys()
            recipe = default_recipe(values, own_data=chooses)
        config = load_config(str(recipe) if recipe else None, values, trust=trust)
        self._set_up(config, Components(**components), trust)

    @classmethod
    def from_config(cls, config: RunConfig, components: Components | None = None) -> Trainer:
        """Creates a trainer from a complete configuration.

        Args:
            config: The configuration.
            components: Python objects that replace objects that the configuration names.
        """
        trainer = cls.__new__(cls)
        trainer._set_up(config, components or Components())
        return trainer

    def _set_up(self, config: RunConfig, components: Components, trust: bool = False) -> None:
        self.config = config
        # A checkpoint in the run folder may come from another program. Without `trust`, it may name only
        # code that this program's configuration names, too.
        self._trust = trust or config
        self._components = components
        self._folder: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The run folder, or None before `fit`."""
        return self._folder

    def fit(self) -> Result:
        """Trains to the end, or until a signal or a callback stops the run.

        Returns:
            Accuracies, throughput and the run folder.

        Raises:
            PacelineError: If the run fails. The message names cause and remedy. The last checkpoint is
                kept; `resume="auto"` continues the run from this checkpoint.
        """
        outcome = self.run()
        summary = outcome.summary
        return Result(
            folder=outcome.folder,
            stopped_by=outcome.result.stopped_by,
            top1=summary.get("top1"),
            top5=summary.get("top5"),
            best_top1=summary.get("best_top1"),
            images_per_s=summary.get("images_per_s"),
            summary=summary,
        )

    def run(
        self,
        display: Callable[[], Observer] | None = None,
        show_error: ShowError | None = None,
        startup: StartUp | None = None,
    ) -> RunOutcome:
        """Trains as `fit` does, with a custom display of the progress.

        Args:
            display: Creates the observer that displays the events of rank 0.
            show_error: Displays the error with which the watchdog ends the process.
            startup: Times that the parts of the start-up have taken until this call.
        """
        interval = self.config.run.log_interval
        display = display or (lambda: create_display(Console(), interval))
        outcome = run_training(self.config, display, show_error, self._components, startup)
        self._folder = outcome.folder
        return outcome

    def evaluate(self, data: Source | Any | None = None, *, batch_size: int = 256) -> EvalResult:
        """Evaluates the best checkpoint. All ranks must call this method.

        Args:
            data: The images to evaluate. None means the validation data of the run. For a directory,
                its validation set is used, or all its images if it has no validation set.
            batch_size: Images per forward pass on one rank.

        Returns:
            The accuracy and the mean loss.

        Raises:
            RunError: If nothing has been trained, or a signal stops the evaluation.
        """
        components, path = self._components, find_checkpoint(self._trained())
        overrides: dict[str, Any] = {"run.device": self.config.run.device}
        if isinstance(data, str | Path):
            overrides |= {"data.dir": str(data), "data.source": "auto"}
            components = replace(components, train_data=None, val_data=None)
        elif data is not None:
            source = as_source(data, "val", Checkpoint.read(path).classes)
            components = replace(components, val_data=source)
        result, _, _ = evaluate_file(path, overrides, batch_size, components, trust=self._trust)
        if isinstance(result, signal.Signals):
            raise RunError(f"the evaluation was stopped by {result.name}", "call it again")
        return result

    def predictor(self) -> Predictor:
        """Loads the best checkpoint for prediction and export."""
        return self._predictor(self.config.run.device)

    def predict(self, images: Iterable[ImageLike], *, top: int = 5) -> list[Prediction]:
        """Classifies images with the best checkpoint.

        Args:
            images: File names, PIL images or uint8 arrays.
            top: Number of most likely classes to return per image.

        Returns:
            One prediction per image, in the same order.
        """
        return self.predictor().predict(images, top=top)

    def export(self, out: str | Path, *, opset: int | None = None) -> str:
        """Writes the best checkpoint as `.onnx`, `.pt2` or `.safetensors`.

        Args:
            out: The file to write. The suffix decides the format.
            opset: Version of the ONNX operators. None means the default of torch's exporter.

        Returns:
            One line that describes the file.
        """
        return self._predictor("cpu", "fp32").export(Path(out), opset)

    def _predictor(self, device: str, precision: str | None = None) -> Predictor:
        return Predictor.load(
            self._trained(), device=device, precision=precision, components=self._components,
            trust=self._trust,
        )  # fmt: skip

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
    """Puts an argument of `Trainer` into `values` if it is a name, else also into `components`."""
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
