"""Exports a model as weights, as an ONNX model, or as a program of `torch.export`."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.config import stored_config
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.imports import first_line
from paceline.train.checkpoint import Checkpoint, find_checkpoint, write_atomically
from paceline.train.model_checks import find_logits
from paceline.train.weights import as_metadata, checkpoint_weights, preprocessing, write_weights

if TYPE_CHECKING:
    from paceline.train.inference import Predictor

FORMATS = (".safetensors", ".onnx", ".pt2")
METADATA = "paceline"
# Largest difference of an exported program's outputs, relative to the largest output.
_TOLERANCE = 1e-3
# The oldest version of the ONNX operators that torch's exporter writes.
_FIRST_OPSET = 18


def check_export(out: Path, opset: int | None) -> None:
    """Raises ConfigError if the file format of `out` or the ONNX opset cannot be written."""
    if out.suffix not in FORMATS:
        raise ConfigError(
            "OUT", str(out), "is not a format to export", f"end it in {', '.join(FORMATS)}"
        )
    if opset is not None and out.suffix != ".onnx":
        raise ConfigError("opset", opset, f"is not for {out.suffix} files", "leave it out")


def export_stored_weights(run: Path, out: Path) -> str:
    """Writes the weights of a checkpoint without building the model, so that no code of the run executes.

    Args:
        run: A run folder or a checkpoint.
        out: The safetensors file.

    Returns:
        One line that describes the file.
    """
    path = find_checkpoint(run)
    checkpoint = Checkpoint.read(path)
    state = checkpoint_weights(checkpoint)
    # Trusted, because no object that the settings name is created here.
    config = stored_config(checkpoint.config, {}, path, trust=True)
    about = preprocessing(config, checkpoint.classes, checkpoint.step)
    write_weights(state, out, as_metadata(about))
    averaged = ""
    if epochs := about.get("average_epochs"):
        averaged = f"weights averaged over {epochs:g} epochs, "
    return f"{out}: {len(state)} tensors of {path}; {averaged}batch norm averaged over its ranks"


class _Logits(nn.Module):
    """A copy of a model that returns only the logits, in fp32.

    The weights of the copy have the contiguous memory format, because files of `torch.export` programs
    keep no other format.
    """

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self._width = width
        self.model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        return find_logits(self.model(images), self._width).float()


def _exported(predictor: Predictor) -> tuple[Tensor, torch.export.ExportedProgram]:
    model = _Logits(predictor.model, predictor.width).eval()
    images = predictor.example_input()
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
    except PacelineError:
        raise
    except Exception as error:  # the model's code can raise anything in the exporter
        raise RunError(
            f"the model cannot be exported as a program ({first_line(error)})",
            "export its weights as .safetensors",
        ) from error
    return images, program


def export_program(predictor: Predictor, out: Path) -> str:
    """Writes a program of `torch.export` to `out`; returns a line that describes the file."""
    images, program = _exported(predictor)
    worst = _difference(predictor, images, lambda x: program.module()(x))
    content = io.BytesIO()
    torch.export.save(
        program, content, extra_files={f"{METADATA}.json": json.dumps(predictor.preprocessing)}
    )
    write_atomically(out, content.getvalue())
    return f"{out}: a torch.export program of {predictor.path}, equal to the run within {worst:.1e}"


def export_onnx(predictor: Predictor, out: Path, opset: int | None) -> str:
    """Writes an ONNX model to `out`; returns a line that describes the file."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError("OUT", str(out), f"needs the package {package}",
                              "pip install 'paceline[onnx]', or export .pt2 or .safetensors")  # fmt: skip
    import onnx

    last = onnx.defs.onnx_opset_version()
    if opset is not None and not _FIRST_OPSET <= opset <= last:
        raise ConfigError("opset", opset, f"must be from {_FIRST_OPSET} to {last}", "leave it out")
    images, program = _exported(predictor)
    for name in ("torch.onnx", "onnxscript"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        exported = torch.onnx.export(
            program, (images,), dynamo=True, verbose=False, input_names=["images"],
            output_names=["scores"], opset_version=opset, dynamic_shapes=({0: "batch"},),
        )  # fmt: skip
    assert exported is not None
    # If the exporter cannot convert an operator to `opset`, it writes a different version and only logs
    # the failure.
    if opset is not None and (written := exported.model.opset_imports[""]) != opset:
        raise ConfigError(
            "opset", opset, f"this model cannot be converted to it, only to {written}",
            "leave it out",
        )  # fmt: skip
    for name, text in as_metadata(predictor.preprocessing).items():
        exported.model.metadata_props[f"{METADATA}.{name}"] = text
    content = exported.model_proto.SerializeToString()
    checked = "not checked: onnxruntime is not installed"
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        entry = session.get_inputs()[0].name

        def run(batch: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {entry: batch.numpy()})[0])

        worst = _difference(predictor, images, run)
        checked = f"equal to the run within {worst:.1e} in ONNX Runtime"
    write_atomically(out, content)
    return f"{out}: an ONNX model of {predictor.path}, {checked}"


def _difference(predictor: Predictor, images: Tensor, run: Any) -> float:
    """Runs an exported program and the model with two batch sizes, and compares the outputs.

    Returns:
        The largest difference of the outputs, relative to the largest output.

    Raises:
        RunError: If the difference is larger than rounding can explain.
    """
    worst = 0.0
    with torch.no_grad():
        for batch in (images, images[:1]):
            wanted = find_logits(predictor.model(batch), predictor.width).float()
            got = run(batch)
            if got.shape != wanted.shape:
                raise RunError(
                    f"the exported program returns {tuple(got.shape)}, the model {tuple(wanted.shape)}",
                    "export .safetensors, and report this",
                )
            scale = float(wanted.abs().max()) or 1.0
            worst = max(worst, float((wanted - got).abs().max()) / scale)
    if not worst <= _TOLERANCE:
        raise RunError(
            f"the exported program differs from the model by {worst:.1e} of its largest output",
            "export .safetensors, and report this",
        )
    return worst
