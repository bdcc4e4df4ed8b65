"""`Predictor`: a trained model with its classes and preprocessing.

    predictor = Predictor.load(Path("runs/quickstart-001"))
    predictor.predict(["photo.jpg"])[0].label

Weights and settings come from a checkpoint. If the run averages weights, the predictor uses the averaged
weights. Batch-norm statistics are averaged over the ranks of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from paceline.config import RunConfig, stored_config
from paceline.core.errors import ConfigError, DataError
from paceline.core.files import open_regular, read_regular
from paceline.core.topology import Topology
from paceline.data import Normalizer, Source, create_eval_loader, to_mode
from paceline.precision.policy import Policy, allow_tf32, choose_policy
from paceline.train.checkpoint import Checkpoint, find_checkpoint
from paceline.train.components import Components
from paceline.train.evaluate import restore_model
from paceline.train.export import check_export, export_onnx, export_program
from paceline.train.fast_path import triton_problem
from paceline.train.machine import choose_device, explain_out_of_memory
from paceline.train.model_checks import explained_forward, find_logits
from paceline.train.weights import as_metadata, preprocessing, write_weights

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
# Number of images on which an exported program is compared with the model.
_CHECKED_IMAGES = 3
Pixels = npt.NDArray[np.uint8]
ImageLike = str | Path | Image.Image | Pixels


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image.

    Attributes:
        name: File name of the image, or `image N` for an image without a file.
        labels: Names of the most likely classes, the most likely one first.
        confidences: Probabilities of the classes in `labels`.
        error: Reason why the image could not be classified; "" on success.

    Example:
        for prediction in trainer.predict(["a.jpg", "b.jpg"]):
            print(prediction.name, prediction.label, prediction.confidence)
    """

    name: str
    labels: tuple[str, ...] = ()
    confidences: tuple[float, ...] = ()
    error: str = ""

    @property
    def label(self) -> str:
        """The most likely class; "" if the image could not be decoded."""
        return self.labels[0] if self.labels else ""

    @property
    def confidence(self) -> float:
        """The probability of the most likely class."""
        return self.confidences[0] if self.confidences else 0.0


class _Images(Source):
    """A source of the images to classify. The label of an image is its index, to order the results."""

    def __init__(self, images: Sequence[ImageLike], names: Sequence[str]) -> None:
        # A loader raises an error if no image can be decoded. This additional image always can be.
        blank = np.zeros((1, 1, 3), dtype=np.uint8)
        self._images, self._names = [*images, blank], [*names, ""]
        self.labels = np.arange(len(images) + 1, dtype=np.int64)
        self.classes = ("",)

    def read(self, i: int) -> bytes | Pixels:
        image = self._images[i]
        if isinstance(image, str | Path):
            # No bytes mean a corrupt image, so that the remaining images are still classified.
            return b"" if _unreadable(Path(image)) else read_regular(image)
        if isinstance(image, Image.Image):
            mode = "L" if image.mode.startswith(("I", "F", "L", "1")) else "RGB"
            return _pixels(to_mode(image, mode))
        return _pixels(image)

    def name(self, i: int) -> str:
        return self._names[i]


def _unreadable(path: Path) -> str:
    """Returns the reason why a file cannot be read; "" if it can."""
    try:
        with open_regular(path):
            return ""
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _pixels(image: Image.Image | Pixels) -> Pixels:
    """Converts an image to an array of height × width × channels."""
    pixels: Pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


@dataclass(frozen=True)
class Predictor:
    """A model in evaluation mode with its classes and preprocessing.

    Attributes:
        model: The model on the device of `policy`.
        config: Settings of the run, with the overrides of `load`.
        classes: Names of the classes, in the order of the model's outputs.
        policy: The number format and the device.
        step: Number of completed steps in the checkpoint.
        path: The checkpoint file.

    Example:
        predictor = pl.Predictor.load("runs/quickstart-001")
        predictor.predict(["photo.jpg"])[0].label
    """

    model: nn.Module
    config: RunConfig
    classes: tuple[str, ...]
    policy: Policy
    step: int
    path: Path

    @classmethod
    def load(
        cls,
        run: Path | str,
        *,
        device: str = "auto",
        precision: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        components: Components | None = None,
        trust: bool | RunConfig = False,
    ) -> Predictor:
        """Loads a predictor from a checkpoint.

        Args:
            run: A checkpoint file, or a run folder, whose best checkpoint is loaded.
            device: `cpu`, `cuda` or `auto`.
            precision: Number format. None means the number format of the run.
            overrides: Settings that replace settings of the run, by name.
            components: Python objects of the program. `model` is needed if the model of the run was a
                Python object.
            trust: True to allow all code that the run names, or a configuration to allow only the
                code that this configuration names.

        Returns:
            The predictor.

        Raises:
            PacelineError: If the checkpoint cannot be used.
        """
        path = find_checkpoint(Path(run))
        checkpoint = Checkpoint.read(path)
        wanted: dict[str, Any] = {"run.device": device, **(overrides or {})}
        if precision is not None:
            wanted["precision.amp_dtype"] = precision
        config = stored_config(checkpoint.config, wanted, path, trust)
        place = choose_device(config, Topology.from_env({}))
        model = restore_model(config, checkpoint, path, components or Components())
        policy = choose_policy(config.precision, place)
        allow_tf32(config.precision)
        model = policy.convert(model.to(place)).eval()
        return cls(model, config, tuple(checkpoint.classes), policy, checkpoint.step, path)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What a program with an export needs to turn an image into an input, such as mean and size."""
        return preprocessing(self.config, self.classes, self.step)

    def predict(
        self, images: Iterable[ImageLike], *, top: int = 5, batch_size: int = 64
    ) -> list[Prediction]:
        """Classifies images.

        Args:
            images: File names, PIL images or uint8 arrays (height × width × channels).
            top: Number of most likely classes to return per image.
            batch_size: Number of images per forward pass.

        Returns:
            One prediction per image, in the same order. An image that cannot be decoded has an `error`.

        Raises:
            DataError: If an element is not an image.
            ConfigError: If `top` is less than 1.
        """
        if isinstance(images, str | Path | Image.Image | np.ndarray):
            raise DataError(
                f"{type(images).__name__} is one image or path, and predict takes several",
                "give a list: predict([image])",
            )
        if top < 1:
            raise ConfigError("top", top, "must be at least 1")
        given = list(images)
        names = [
            str(image) if isinstance(image, str | Path) else f"image {number}"
            for number, image in enumerate(given)
        ]
        for name, image in zip(names, given, strict=True):
            _check_image(name, image)
        if not given:
            return []
        scores, errors = self._scores(_Images(given, names), batch_size)
        for number, image in enumerate(given):
            if isinstance(image, str | Path) and (problem := _unreadable(Path(image))):
                errors[number] = problem
        scores = scores[:, : len(self.classes)]
        best = scores.topk(min(top, scores.shape[1]), dim=1)
        for number in (~torch.isfinite(scores).all(dim=1)).nonzero().flatten().tolist():
            errors.setdefault(number, "the model's scores are not finite")
        predictions = []
        for number, name in enumerate(names):
            if number in errors:
                predictions.append(Prediction(name, error=errors[number]))
                continue
            labels = tuple(self.classes[index] for index in best.indices[number].tolist())
            predictions.append(Prediction(name, labels, tuple(best.values[number].tolist())))
        return predictions

    def _scores(self, source: Source, batch_size: int) -> tuple[Tensor, dict[int, str]]:
        """Returns probabilities (samples × outputs), and by index the reason why a sample failed."""
        device, data = self.policy.device, self.config.data
        data = replace(data, max_corrupt_share=1 - 1e-9, resident="off", cache="none")
        if not data.decoder.startswith("n"):
            data = replace(data, decoder="auto")
        normalize = Normalizer(
            data.mean, data.std, data.channels, self.policy.dtype,
            channels_last=self.config.run.channels_last, kernel=not triton_problem(device),
        )  # fmt: skip
        # A model may have more outputs than the data has classes.
        scores = torch.zeros(len(source), self.width)
        seen = torch.zeros(len(source), dtype=torch.bool)
        loader = create_eval_loader(
            source, data, rank=0, world_size=1, batch_size=batch_size, device=device
        )
        where, remedy = f"classifying {batch_size} images at a time", "use a smaller --batch-size"
        # Binary cross-entropy trains one binary decision per class.
        binary = self.config.run.loss == "bce"
        with (
            explain_out_of_memory(where, remedy), loader, torch.inference_mode(), self.policy.compute(),
        ):  # fmt: skip
            for batch in loader:
                inputs, places = normalize(batch.images, device), batch.labels.cpu()
                with explained_forward(inputs.shape):
                    outputs = find_logits(self.model(inputs), self.width).float()
                scores[places] = (outputs.sigmoid() if binary else outputs.softmax(1)).cpu()
                seen[places] = True
            corrupt = {sample.name: sample.reason for sample in loader.corrupt}
        missing = torch.nonzero(~seen).flatten().tolist()
        errors = {i: corrupt.get(source.name(i), "cannot be decoded") for i in missing}
        return scores, errors

    @property
    def width(self) -> int:
        """Number of outputs of the model: `model.num_classes` if set, else the number of classes."""
        return self.config.model.num_classes or len(self.classes)

    def export(self, out: Path, opset: int | None = None) -> str:
        """Writes the model to a file, with class names, image size, mean and standard deviation.

        Before an `.onnx` or `.pt2` file is written, its outputs are compared with those of the model.

        Args:
            out: The file: `.safetensors` (weights), `.onnx` or `.pt2` (a program of `torch.export`).
            opset: Version of the ONNX operators. None means the default of torch's exporter.

        Returns:
            One line that describes the file.

        Raises:
            ConfigError: If the format or the opset cannot be written.
            RunError: If the model cannot be exported.
        """
        check_export(out, opset)
        if out.suffix == ".safetensors":
            state = self.model.state_dict()
            write_weights(state, out, as_metadata(self.preprocessing))
            return f"{out}: {len(state)} tensors of {self.path}"
        if out.suffix == ".onnx":
            return export_onnx(self, out, opset)
        return export_program(self, out)

    def example_input(self) -> Tensor:
        """Returns a small batch of random inputs, equal in every call."""
        data = self.config.data
        shape = (_CHECKED_IMAGES, data.channels, data.image_size, data.image_size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _check_image(name: str, image: object) -> None:
    if isinstance(image, str | Path | Image.Image):
        return
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim not in (2, 3):
        kind = type(image).__name__
        if isinstance(image, np.ndarray):
            kind = f"{image.dtype} array of shape {image.shape}"
        raise DataError(
            f"{name} is a {kind}",
            "give file names, PIL images, or uint8 arrays of height × width × channels",
        )


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Replaces each folder by all images in it, sorted by name. Refuses a folder without images."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            if not inside:
                raise DataError(f"{path} has no images", f"looked for {', '.join(IMAGE_SUFFIXES)}")
            files += inside
        else:
            files.append(path)  # a missing file gets a prediction with an error
    return files
