"""Loads pretrained weights from a safetensors or `torch.save` file into a model.

Reads state dicts of torchvision, timm (the moving average if there is one), Lightning, Hugging Face and
Paceline. Removes wrapper dictionaries and key prefixes. Compares all keys and shapes first; if they do
not match, the model is unchanged.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.core.files import open_regular
from paceline.models.tensor_file import TensorFileError, load_tensors

# Keys under which checkpoints of other programs hold the weights; averaged weights first, as in timm.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state", "weights")
# Prefixes of heads that some networks have only in training.
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.", "aux_classifier.")
_SHOWN_KEYS = 3

StateDict = dict[str, Tensor]


def load_pretrained(model: nn.Module, path: Path) -> list[str]:
    """Loads weights from a file into a model.

    If the number of classes differs, the model's head keeps its initial values. The file may lack
    `num_batches_tracked`, and may contain auxiliary heads that the model does not have.

    Args:
        model: The model, not wrapped yet.
        path: A `.safetensors` file or a file written by `torch.save`.

    Returns:
        Texts that tell the user what was left out or kept.

    Raises:
        CheckpointError: If the file cannot be read, or if any other tensors are missing or
            unexpected, or have a different shape.
    """
    stored, wrapper = _read_wrapped(path)
    own: StateDict = dict(model.state_dict())
    notes = [f"of {wrapper}"] if wrapper.endswith("_ema") else []
    stored = _without_prefix(stored, own, notes)
    if not any(key.startswith(_AUXILIARY) for key in own):
        stored = {key: value for key, value in stored.items() if not key.startswith(_AUXILIARY)}
    kept = _replaced_head(model, own, stored, notes)

    missing = [key for key in own if key not in stored and not key.endswith(".num_batches_tracked")]
    unexpected = [key for key in stored if key not in own]
    misfits = [
        f"{key} {_shape(stored[key])} for {_shape(own[key])}"
        for key in own
        if key in stored and key not in kept and not _fits(own[key], stored[key])
    ]
    if missing or unexpected or misfits:
        findings = [
            *_finding("missing", missing),
            *_finding("unexpected", unexpected),
            *_finding("of another shape", misfits),
        ]
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__} of {len(own)} tensors: "
            + "; ".join(findings),
            "choose the model, stem and channels with which the file was saved",
        )
    taken = {key: stored[key] for key in own if key in stored and key not in kept}
    model.load_state_dict({**own, **taken})
    return [f"{len(taken)} of {len(own)} tensors from {path.name}", *notes]


def _read_wrapped(path: Path) -> tuple[StateDict, str]:
    """Reads a file and removes the key prefixes that DDP and torch.compile add.

    Returns:
        The tensors by name, and the key under which the file stores them, such as `state_dict`.
    """
    try:
        with open_regular(path) as file:
            content = _read(path, file)
    except (FileNotFoundError, IsADirectoryError):
        raise CheckpointError(
            f"{path} is not a file", "give the path of a .pth, .pt or .safetensors file"
        ) from None
    except Exception as problem:  # unpickling damaged bytes can raise anything
        raise CheckpointError(
            f"{path} cannot be read as weights: {_reason(path, problem)}",
            "download it again, or save it as a plain state dict or as safetensors",
        ) from problem
    weights, wrapper = _unwrap(content, path)
    # torch.compile can wrap any submodule, so the prefix can occur anywhere in a key.
    weights = {key.replace("_orig_mod.", ""): value for key, value in weights.items()}
    while all(key.startswith("module.") for key in weights):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    return weights, wrapper


def _reason(path: Path, problem: Exception) -> str:
    """Returns a short reason why a file cannot be read; torch's message would advise to trust it."""
    foreign = re.search(r"Unsupported global: GLOBAL (\S+)", str(problem))
    if foreign:
        return f"it contains objects of {foreign[1]}"
    if isinstance(problem, TensorFileError):
        return str(problem)
    if isinstance(problem, MemoryError):
        return "it needs more memory than is available"
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return "it is empty" if path.stat().st_size == 0 else "it is damaged or not a weights file"


def _read(path: Path, file: BinaryIO) -> object:
    if path.suffix == ".safetensors":
        return load_file(path, device="cpu")
    # torchvision's reference scripts store their argparse Namespace, which is safe to load.
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        # Loading files from before torch 1.6 emits deprecation warnings.
        warnings.simplefilter("ignore")
        return load_tensors(file)


def _unwrap(content: object, path: Path, wrapper: str = "") -> tuple[StateDict, str]:
    if isinstance(content, Mapping):
        if content.get("format") == "paceline-checkpoint":
            # A checkpoint has separate batch-norm statistics for each rank; only export averages them.
            raise CheckpointError(
                f"{path} is a checkpoint of a run, not weights",
                "use the run's weights.safetensors, or create it with paceline export",
            )
        for key in _WRAPPERS:
            if isinstance(content.get(key), Mapping):
                return _unwrap(content[key], path, wrapper or key)
        if content and all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
        ):
            return dict(content), wrapper
    raise CheckpointError(
        f"{path} contains no weights: it is not a state dict and has no state dict under "
        + ", ".join(_WRAPPERS),
        "save `model.state_dict()` alone, or as safetensors",
    )


def _without_prefix(stored: StateDict, own: StateDict, notes: list[str]) -> StateDict:
    """Removes a prefix that another program adds to all keys, such as `model.` in Lightning.

    Chooses the prefix with which most keys match the model. Leaves out tensors whose keys lack the
    prefix, such as those of a loss.
    """
    matches: Counter[str] = Counter()
    for key in stored:
        parts = key.split(".")
        matches.update(
            ".".join(parts[:depth]) + "." if depth else ""
            for depth in range(len(parts))
            if ".".join(parts[depth:]) in own
        )
    prefix, _ = max(matches.items(), key=lambda item: (item[1], -len(item[0])), default=("", 0))
    if not prefix:
        return stored
    inside = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    more = len(stored) - len(inside)
    left_out = f", {more} other tensors left out" if more else ""
    notes.append(f"prefix {prefix!r} removed{left_out}")
    return inside


def _head_names(model: nn.Module) -> list[str]:
    """Returns the names of the modules that compute the logits.

    These are the classifiers of a timm model. In any other model, this is the last linear layer, or the
    last convolution if there is no linear layer.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if callable(getattr(model, "get_classifier", None)):
        heads = model.get_classifier()  # type: ignore[operator]
        heads = heads if isinstance(heads, tuple | list) else [heads]
        if known := [names[id(head)] for head in heads if id(head) in names]:
            return known
    for kind in (nn.Linear, nn.Conv2d):
        layers = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if layers:
            return layers[-1:]
    return []


def _replaced_head(
    model: nn.Module, own: StateDict, stored: StateDict, notes: list[str]
) -> frozenset[str]:
    """Returns the keys of the classifier if file and model differ in the number of classes.

    Returns an empty set if the number is equal.
    """
    heads = _head_names(model)
    keys = [
        key for head in heads for kind in ("weight", "bias") if (key := f"{head}.{kind}") in own
    ]
    if not keys or any(key not in stored or stored[key].ndim == 0 for key in keys):
        return frozenset()
    model_classes = {len(own[key]) for key in keys}
    file_classes = {len(stored[key]) for key in keys}
    same_features = all(own[key].shape[1:] == stored[key].shape[1:] for key in keys)
    if not same_features or len(file_classes) > 1 or file_classes == model_classes:
        return frozenset()
    notes.append(
        f"the head {' and '.join(heads)} keeps its initial values: the file has {file_classes.pop()} "
        f"classes, this model {model_classes.pop()}"
    )
    return frozenset(keys)


def _fits(own: Tensor, stored: Tensor) -> bool:
    return (own.shape, own.is_floating_point()) == (stored.shape, stored.is_floating_point())


def _shape(tensor: Tensor) -> str:
    """Returns the shape as text, followed by the dtype unless it is floating-point."""
    kind = "" if tensor.is_floating_point() else f" {tensor.dtype}".replace("torch.", "")
    return f"{list(tensor.shape)}{kind}"


def _finding(what: str, keys: list[str]) -> Iterable[str]:
    if keys:
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        yield f"{len(keys)} {what} ({', '.join(keys[:_SHOWN_KEYS])}{more})"
