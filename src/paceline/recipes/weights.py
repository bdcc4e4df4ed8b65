"""Pretrained weights for `recipe = auto`: the user's file, or timm's in its local cache."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import CheckpointError, ConfigError
from paceline.models.pretrained import load_pretrained
from paceline.models.registry import create_model
from paceline.models.settings import STEMS_OF_MODEL, ModelSettings
from paceline.train.choices import Situation

# `--pretrained timm` allows a download of this model.
TIMM = "timm"
_DOWNLOADED = "resnet18.a1_in1k"
_FILE = "model.safetensors"
# Built-in models that weights of timm and torchvision may fit, in order of preference on a CPU, and those
# whose weights only Paceline writes.
_COMMON = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_MODELS = (*_COMMON, "resnet_tiny", "resnet_fast")


@dataclass(frozen=True)
class Weights:
    """Pretrained weights and the built-in model that they fit.

    Attributes:
        model: Name of the model; empty if the user has named a model.
        channels: Channels of the images that the weights need.
        settings: The settings that use the weights.
        reason: The origin of the weights, for the user.
        settles: Settings that the user has given, but whose value is a word instead of a file.
    """

    model: str
    channels: int
    settings: dict[str, Any]
    reason: str
    settles: tuple[str, ...] = ()


def find_weights(situation: Situation, channels: int) -> Weights | None:
    """Returns the weights to start from; None if there are none.

    Args:
        situation: The settings that the user has given.
        channels: Channels of the images.

    Raises:
        PacelineError: If the user's file fits no built-in model, or timm's weights cannot be had.
    """
    given = situation.given
    asked = str(given.get("run.pretrained", ""))
    if asked == TIMM:
        cached = next(_cached(given.get("model.name")), None)
        model, path = cached or (_DOWNLOADED.partition(".")[0], _download())
        found = _of_file(path, model)
        settings = {**found.settings, "run.pretrained": str(path)}
        return Weights(
            found.model, found.channels, settings, f"{path.name} of timm: {found.reason}",
            ("run.pretrained",),
        )  # fmt: skip
    if "run.pretrained" in given:
        named = "model.name" in given or situation.own_model
        return Weights("", channels, {}, asked) if named else _of_file(Path(asked))
    if "model.name" in given or situation.own_model or given.get("data.channels", 3) != 3:
        return None
    for model, path in _cached(None):
        try:
            found = _of_file(path, model)
        except CheckpointError:
            continue
        settings = {**found.settings, "run.pretrained": str(path)}
        reason = f"{found.reason}, from timm's local cache"
        return Weights(found.model, found.channels, settings, reason)
    return None


def _of_file(path: Path, model: str = "") -> Weights:
    """Finds the built-in model that the weights of a file fit, with any number of classes."""
    first: CheckpointError | None = None
    for name in (model,) if model else _MODELS:
        for stem in STEMS_OF_MODEL.get(name, ()):
            for channels in (3, 1):
                try:
                    _try(name, stem, channels, path)
                except CheckpointError as error:
                    if "does not fit" not in str(error):
                        raise
                    first = first or error
                    continue
                settings = {"model.name": name, "model.stem": stem, "data.channels": channels}
                return Weights(name, channels, settings, f"{path.name} fits {name}")
    raise CheckpointError(
        f"{path} fits none of {', '.join(_MODELS)}", "name its model with --model"
    ) from first


def _try(name: str, stem: str, channels: int, path: Path) -> None:
    """Raises CheckpointError if the weights do not fit the model. Creates no tensors."""
    with torch.device("meta"), warnings.catch_warnings():
        # Torch warns that nothing is copied.
        warnings.simplefilter("ignore")
        made = create_model(
            ModelSettings(name=name, stem=stem), num_classes=2, in_channels=channels
        )
        load_pretrained(made, path)


def _cached(model: object) -> Iterator[tuple[str, Path]]:
    """Yields the weights in timm's local cache, with the name of the built-in model."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for name in _COMMON:
        if model in (None, name):
            for path in sorted(hub.glob(f"models--timm--{name}.*/snapshots/*/{_FILE}")):
                yield name, path


def _download() -> Path:
    """Downloads timm's weights; raises ConfigError if that fails."""
    if importlib.util.find_spec("timm") is None:
        raise ConfigError(
            "run.pretrained",
            TIMM,
            "needs the package timm, which is not installed",
            "pip install timm",
        )
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(repo_id=f"timm/{_DOWNLOADED}", filename=_FILE))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            "run.pretrained", TIMM, f"the weights cannot be downloaded ({reason})",
            "give a file, or leave it out",
        ) from error  # fmt: skip
