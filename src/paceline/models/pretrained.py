"""Weights from a file into a model: torchvision's, timm's, or our own.

In: a model and a file, either safetensors or what `torch.save` writes. Out: the model with the file's
weights, and notes for the user. All keys and shapes are compared first; where they do not fit,
CheckpointError names them and the model stays as it was.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.models.alexnet import AlexNet

# Where trainers put the weights inside a checkpoint that holds more than weights.
_WRAPPERS = ("state_dict", "model", "model_state", "weights")
_SHOWN_KEYS = 3

StateDict = dict[str, Tensor]


def load_pretrained(model: nn.Module, path: Path) -> list[str]:
    """Loads `path` into `model` and returns notes to print; the model must not be wrapped yet.

    A head for another number of classes keeps its fresh values, with a note. Absent
    `num_batches_tracked` is tolerated, as is a plain AlexNet's file for one with batch norm.
    Anything else that is missing, unexpected or of another shape raises CheckpointError.
    """
    stored = read_weights(path)
    own: StateDict = dict(model.state_dict())
    notes: list[str] = []
    kept = _other_head(model, own, stored, notes)
    absent_norms = _absent_norms(model, own, stored, notes)

    missing = [
        key
        for key in own
        if key not in stored
        and key not in absent_norms
        and not key.endswith(".num_batches_tracked")
    ]
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
            "choose the model, stem and channels that the file was trained with",
        )
    taken = {key: stored[key] for key in own if key in stored and key not in kept}
    _note_narrow_formats(taken, notes)
    model.load_state_dict({**own, **taken})
    return notes


def read_weights(path: Path) -> StateDict:
    """The tensors of a file by key, unwrapped, without the prefixes of DDP and torch.compile."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file", "give the path of a .pth, .pt or .safetensors file"
        )
    try:
        content = _read(path)
    except Exception as problem:  # damaged bytes make unpickling raise anything
        raise CheckpointError(
            f"{path} cannot be read as weights: {_damage(path, problem)}",
            "fetch it again, or save it anew as a plain state dict or as safetensors",
        ) from problem
    return _strip_prefixes(_unwrap(content, path))


def _damage(path: Path, problem: Exception) -> str:
    """Why a file could not be read. Torch's own text is long and advises to trust the file."""
    foreign = re.search(r"Unsupported global: GLOBAL (\S+)", str(problem))
    if foreign:
        return f"besides tensors it holds objects of {foreign[1]}"
    if isinstance(problem, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return "it is empty" if path.stat().st_size == 0 else "it is damaged, or no file of weights"


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        return load_file(path, device="cpu")
    # Reference trainers keep their command line in the checkpoint; a Namespace runs no code.
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        # Torch's own code for files from before version 1.6 uses what it deprecates.
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


def _unwrap(content: object, path: Path) -> StateDict:
    if isinstance(content, Mapping):
        if content.get("format") == "paceline-checkpoint":
            # Its batch-norm statistics are those of each rank; export averages them.
            raise CheckpointError(
                f"{path} is a checkpoint of a run, not weights",
                "take the run's weights.safetensors, or make it with paceline export",
            )
        for wrapper in _WRAPPERS:
            if isinstance(content.get(wrapper), Mapping):
                return _unwrap(content[wrapper], path)
        if content and all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
        ):
            return dict(content)
    raise CheckpointError(
        f"{path} holds no weights: neither a state dict nor one under " + ", ".join(_WRAPPERS),
        "save `model.state_dict()` alone, or as safetensors",
    )


def _strip_prefixes(weights: StateDict) -> StateDict:
    # torch.compile can wrap any part of a model, so its mark is found anywhere in a key.
    weights = {key.replace("_orig_mod.", ""): value for key, value in weights.items()}
    while all(key.startswith("module.") for key in weights):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    return weights


def _other_head(
    model: nn.Module, own: StateDict, stored: StateDict, notes: list[str]
) -> frozenset[str]:
    """Keys of the head, where the file's is for another number of classes; else none."""
    heads = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    keys = (
        [key for kind in ("weight", "bias") if (key := f"{heads[-1]}.{kind}") in own]
        if heads
        else []
    )
    if not keys or any(key not in stored or stored[key].ndim == 0 for key in keys):
        return frozenset()
    model_classes = {len(own[key]) for key in keys}
    file_classes = {len(stored[key]) for key in keys}
    same_features = all(own[key].shape[1:] == stored[key].shape[1:] for key in keys)
    if not same_features or len(file_classes) > 1 or file_classes == model_classes:
        return frozenset()
    notes.append(
        f"the head {heads[-1]} starts fresh: the file's has {file_classes.pop()} classes, "
        f"this model's {model_classes.pop()}"
    )
    return frozenset(keys)


def _absent_norms(
    model: nn.Module, own: StateDict, stored: StateDict, notes: list[str]
) -> frozenset[str]:
    """Keys of AlexNet's added batch norms, where the file, a plain AlexNet's, has none of them.

    A fresh batch norm passes its input on unchanged in evaluation, so the function is the file's.
    """
    prefixes = model.added_norm_prefixes if isinstance(model, AlexNet) else ()
    keys = frozenset(key for key in own if key.startswith(prefixes)) if prefixes else frozenset()
    if not keys or not keys.isdisjoint(stored):
        return frozenset()
    notes.append(f"the file is a plain AlexNet's: {len(prefixes)} batch norms start fresh")
    return keys


def _fits(own: Tensor, stored: Tensor) -> bool:
    return own.shape == stored.shape and own.is_floating_point() == stored.is_floating_point()


def _shape(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {tensor.dtype}".replace("torch.", "")
    return f"{list(tensor.shape)}{kind}"


def _finding(what: str, keys: list[str]) -> Iterable[str]:
    if keys:
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        yield f"{len(keys)} {what} ({', '.join(keys[:_SHOWN_KEYS])}{more})"


def _note_narrow_formats(taken: StateDict, notes: list[str]) -> None:
    narrow = {
        str(value.dtype).removeprefix("torch.")
        for value in taken.values()
        if value.is_floating_point() and value.dtype.itemsize < 4
    }
    if narrow:
        notes.append(f"the file's weights are stored as {', '.join(sorted(narrow))}")
