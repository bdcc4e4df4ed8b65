"""Checks a user's model before the first step, finds its logits, and explains errors in its passes.

`check_model` runs a few images through the model in training and evaluation mode and then restores the
model. It raises an error of one line if the model cannot be trained, and returns notes on limits of
the model. `check_parameters` detects whether a user's code has replaced parameters later. `step_error`
turns an exception of a forward or backward pass into an error for the user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import PacelineError, RunError, compile_reason, is_compile_error
from paceline.core.imports import first_line
from paceline.models.factories import call_factory, checked_module
from paceline.models.registry import create_model, freeze_parameters, is_own
from paceline.train.components import Components
from paceline.train.machine import out_of_memory
from paceline.train.micro_step import Advise, CaptureError, no_advice

_SHOWN = 3
# Number of images in a check: enough for the variance of batch norm.
CHECKED_IMAGES = 4
VARIES = "gives other outputs for the same batch"
# On a GPU, the order of a sum can differ from run to run.
_GPU_TOLERANCE = 1e-2

Images = tuple[int, int, int, int]


def make_model(config: RunConfig, classes: int, components: Components) -> nn.Module:
    """Creates the model with fp32 weights on the CPU.

    Args:
        config: The settings of the run.
        classes: Number of classes.
        components: Python objects of the program; `model` takes precedence over the settings.
    """
    offered = {
        "num_classes": classes, "in_channels": config.data.channels,
        "image_size": config.data.image_size,
    }  # fmt: skip
    given = components.model
    if given is None:
        model = create_model(config.model, **offered)
    else:
        name = given_name(given)
        if isinstance(given, nn.Module):
            model = checked_module(given, name)
        else:
            model = call_factory(given, name, offered)
        freeze_parameters(model, config.model.freeze)
    if not is_own(model) and any(p.dtype != torch.float32 for p in model.parameters()):
        model = model.float()
    return model


def given_name(model: nn.Module | Callable[..., nn.Module]) -> str:
    """Returns a name for error messages of a model that a program has passed."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__qualname__", type(model).__name__))


def tensors_in(outputs: object) -> list[Tensor]:
    """Returns all tensors of a model's outputs.

    Outputs can be a tensor, or a tuple, list, dictionary or data class of tensors.
    """
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        return [tensor for value in outputs.values() for tensor in tensors_in(value)]
    if isinstance(outputs, tuple | list):
        return [tensor for value in outputs for tensor in tensors_in(value)]
    return [v for v in getattr(outputs, "__dict__", {}).values() if isinstance(v, Tensor)]


def only_output(outputs: object) -> Tensor:
    """Returns the only tensor in `outputs`; raises a RunError unless there is exactly one."""
    tensors = tensors_in(outputs)
    if len(tensors) != 1:
        raise RunError(
            f"the model returns {_kind(outputs)} in training mode",
            "return only the logits (in torchvision with model.arguments={aux_logits=false}), or give "
            "the run a loss that accepts all outputs",
        )
    return tensors[0]


def with_one_output(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Wraps `forward` so that it returns only the single tensor in its outputs (`only_output`)."""
    return lambda images: only_output(forward(images))


def find_logits(outputs: object, classes: int | None = None) -> Tensor:
    """Returns the logits of a model's outputs in evaluation mode.

    Args:
        outputs: A tensor, or a container with `logits` or with a tensor of samples × classes.
        classes: Number of classes; None accepts any number.

    Raises:
        RunError: If the outputs contain no logits.
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else None
    named = getattr(outputs, "logits", None) if named is None else named
    if isinstance(named, Tensor):
        return named
    for tensor in tensors_in(outputs):
        if tensor.ndim == 2 and classes in (None, tensor.shape[1]):
            return tensor
    raise RunError(
        f"the model returns {_kind(outputs)} in evaluation mode, without a tensor of samples × "
        f"{classes or 'classes'}",
        "return the logits first, or as an attribute `logits`",
    )


def _kind(outputs: object) -> str:
    tensors = tensors_in(outputs)
    what = type(outputs).__name__
    if not tensors:
        return f"a {what}"
    shapes = ", ".join(_shape(t.shape) for t in tensors[:_SHOWN])
    more = ", …" if len(tensors) > _SHOWN else ""
    return f"a {what} of {len(tensors)} tensors ({shapes}{more})"


def _shape(sizes: Any) -> str:
    return " × ".join(str(size) for size in sizes) or "one value"


def forward_error(
    error: Exception, images: Any, what: str = "the model's forward"
) -> PacelineError | None:
    """Returns an error of one line for an exception of a user's model.

    Args:
        error: The exception.
        images: Shape of the batch.
        what: What failed, for the message.

    Returns:
        The error; None if memory ran out or the device is lost.
    """
    if isinstance(error, PacelineError):
        return error
    lost = isinstance(error, torch.AcceleratorError | MemoryError)
    if lost or out_of_memory(error, "", "") is not None:
        return None
    return RunError(
        f"{what} failed on {_shape(images)} images: {first_line(error)}",
        "check data.image_size, data.channels and the model's code",
    )


def step_error(
    error: Exception, step: int, micro_batch: int, *, foreign: bool = False,
    advise: Advise = no_advice,
) -> PacelineError | None:  # fmt: skip
    """Turns an exception of a forward or backward pass into an error with cause and remedy.

    Args:
        error: The exception.
        step: Number of the step, for messages.
        micro_batch: Number of samples in a micro-batch, for messages.
        foreign: True if the model is a user's. All exceptions are then treated as errors of the model.
        advise: Returns the remedies that the acceleration knows for an error.

    Returns:
        The error for the user. None for a defect of Paceline, whose traceback must stay visible.
    """
    if isinstance(error, CaptureError):
        return CaptureError(error.cause, _remedies(advise(error), error.remedy))
    if isinstance(error, PacelineError):
        return error
    if is_compile_error(error):
        return _compile_error(error, advise(error))
    smaller = "free memory, or choose a smaller model"
    if micro_batch > 1:
        smaller = f"use --batch-size {micro_batch // 2}; the global batch stays the same"
    where = f"at step {step + 1} with a batch size of {micro_batch} per rank"
    if fault := out_of_memory(error, where, "; ".join([smaller, *advise(error)])):
        return fault
    if "more than 1 value per channel" in str(error):  # one sample with 1 × 1 activations
        return RunError(
            f"batch norm needs more than one sample, but a micro-batch of step {step + 1} has only one",
            "choose a --global-batch-size or --epochs with which the last batch has more samples, or a "
            "larger --batch-size",
        )
    if foreign and not isinstance(error, torch.AcceleratorError):
        return RunError(
            f"the model's forward or backward failed at step {step + 1} on {micro_batch} images: "
            f"{first_line(error)}",
            "check the model's code",
        )
    return None


def _remedies(advice: Sequence[str], remedy: str) -> str:
    return "; if that does not help, ".join(filter(None, (*advice, remedy)))


def _compile_error(error: Exception, advice: Sequence[str]) -> RunError:
    reason = compile_reason(error)
    if type(error).__module__.startswith("triton"):
        remedy = _remedies(advice, "use --set optim.fused=foreach")
        return RunError(f"Triton could not build a kernel ({reason})", remedy)
    return RunError(f"torch.compile failed ({reason})", _remedies(advice, "check the model's code"))


@contextmanager
def explained_forward(images: Any, what: str = "the model's forward") -> Iterator[None]:
    """Replaces exceptions of a user's model by the error that `forward_error` returns."""
    try:
        yield
    except Exception as error:
        fault = forward_error(error, images, what)
        if fault is None or fault is error:
            raise
        raise fault from error


def check_placed(model: nn.Module, device: torch.device) -> None:
    """Raises a RunError unless all tensors of the model are on `device`."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.device != device:
            raise RunError(
                f"{name} of the model is on {value.device}, but the run computes on {device}",
                "do not move parts of the model: a rank trains the whole model on one device",
            )


def check_model(
    model: nn.Module, images: Images, classes: int, *, own_loss: bool, ranks: int, nhwc: bool = True
) -> list[str]:
    """Checks a user's model in fp32 and restores it.

    Args:
        model: The model.
        images: Shape of a micro-batch. The check uses at most `CHECKED_IMAGES` images.
        classes: Number of classes.
        own_loss: True if the loss is a user's, which accepts any outputs.
        ranks: Number of ranks.
        nhwc: True if the images have the NHWC memory format.

    Returns:
        Notes for the user.

    Raises:
        RunError: If the model cannot be trained.
    """
    shape = (min(CHECKED_IMAGES, images[0]), *images[1:])
    extra = [n for n, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if extra:
        raise RunError(
            f"the model's state dict has {_names(extra)}, which is not a tensor",
            "keep state in buffers instead of get_extra_state",
        )
    for name, value in model.state_dict().items():
        if value.layout != torch.strided or any(
            step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)
        ):
            raise RunError(
                f"{name} of the model is a sparse or expanded tensor",
                "keep a dense one, with .to_dense() or .contiguous()",
            )
    with _restored(model):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = _other_buffers(model)
        first = _outputs(model, shape, nhwc)
        _check_parameters(model, before)
        notes = _check_state(model, state, ranks)
        if not own_loss:
            _check_shape(only_output(first), shape[0], classes, "")
        if not notes and not _alike(first, _outputs(model, shape, nhwc)):
            notes.append(
                f"{VARIES}: it keeps state outside of its buffers or draws numbers outside of torch's "
                "generators; a resumed run is not bit-identical, and CUDA graphs are off"
            )
        model.eval()
        last = _outputs(model, shape, nhwc, "the model's forward in evaluation mode")
        _check_shape(find_logits(last, classes), shape[0], classes, " in evaluation mode")
    return notes


def _outputs(
    model: nn.Module, shape: Images, nhwc: bool, what: str = "the model's forward"
) -> object:
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    layout = torch.channels_last if nhwc else torch.contiguous_format
    with explained_forward(shape, what), torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        images = torch.randn(shape, device=device)
        outputs: object = model(images.contiguous(memory_format=layout))
        if devices:
            torch.cuda.synchronize(device)
        return outputs


def _check_shape(logits: Tensor, samples: int, classes: int, mode: str) -> None:
    if tuple(logits.shape) != (samples, classes):
        width = logits.shape[1] if logits.ndim == 2 else 0
        raise RunError(
            f"the model's outputs are {_shape(logits.shape)}{mode} for {samples} images of {classes} "
            "classes",
            "let the model's factory take num_classes"
            + (f", or set model.num_classes={width}" if width > classes else ""),
        )
    if not logits.is_floating_point():
        kind = str(logits.dtype).removeprefix("torch.")
        raise RunError(f"the model's outputs are {kind}{mode}", "return logits")


def _check_parameters(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    after = dict(model.named_parameters())
    changed = [
        name
        for name in dict.fromkeys((*before, *after))
        if name not in before or name not in after or not _same(before[name], after[name])
    ]
    if changed:
        raise RunError(
            f"the model's forward changes its parameters: {_names(changed)}",
            "let only the optimizer change parameters; keep state that forward changes in buffers",
        )


def _check_state(model: nn.Module, before: Mapping[str, Tensor], ranks: int) -> list[str]:
    """Returns notes on buffers that the forward pass has changed, except those of batch norm.

    Buffers that the forward pass has created are ignored, because they are caches.
    """
    after = dict(model.named_buffers())
    changed = [n for n, value in before.items() if n in after and not _same(value, after[n])]
    if not changed:
        return []
    if ranks > 1:
        raise RunError(
            f"the model keeps state between batches in {_names(changed)}, which ranks do not share",
            "train on one rank, or use batch norm, whose statistics are averaged",
        )
    saved = model.state_dict().keys()
    lost = [name for name in changed if name not in saved]
    kept = f"keeps state between batches in {_names(changed)}; a skipped step does not undo it"
    return [f"{kept}, and checkpoints do not hold {_names(lost)}" if lost else kept]


def _other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of all buffers except the running statistics of batch norm."""
    statistics = {
        id(buffer)
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
        for buffer in layer.buffers(recurse=False)
    }
    return {n: b.clone() for n, b in model.named_buffers() if id(b) not in statistics}


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restores the buffers at the end of the context, both the tensor objects and their values."""
    places = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [b for _, own in places for b in own.values() if b is not None]
    values = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, own in places:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restores training modes, parameters and buffers at the end of the context."""
    modes = [(module, module.training) for module in model.modules()]
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with restored_buffers(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)


def _same(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors have equal shapes, formats and values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _alike(one: object, other: object) -> bool:
    first, second = tensors_in(one), tensors_in(other)
    if [t.shape for t in first] != [t.shape for t in second]:
        return False
    for a, b in zip(first, second, strict=True):
        if not a.is_floating_point():
            continue
        margin = _GPU_TOLERANCE * float(a.abs().max()) if a.is_cuda and a.numel() else 0.0
        if not torch.allclose(a, b, rtol=0.0, atol=margin, equal_nan=True):
            return False
    return True


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def share_weights(model: nn.Module, group: Group) -> str:
    """Broadcasts the parameters and buffers of rank 0, as DDP does: each rank has created its own module.

    Returns:
        A note for the user; "" on one rank.

    Raises:
        PacelineError: If the tensors of the ranks have different names, shapes or formats.
    """
    if group.world_size == 1:
        return ""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = "\n".join(f"{name} {_shape(t.shape)} {t.dtype}" for name, t in tensors)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    facts = {"the model's tensors": f"{len(tensors)} ({digest})"}
    group.agree("model's tensors", facts=facts, remedy="build the same model on every rank")
    with torch.no_grad():
        for _, tensor in tensors:
            content = tensor.detach().contiguous().clone()
            group.broadcast(content)
            tensor.copy_(content)
    return "initial weights of rank 0"


def check_parameters(
    model: nn.Module, held: Mapping[str, tuple[nn.Parameter, int]], exchanged: Container[str]
) -> None:
    """Checks that a user's code has not replaced parameters in the forward pass or in a callback.

    The optimizer and the exchange would silently not update new parameters.

    Args:
        model: The model.
        held: Parameters and the addresses of their data at the start of the run, by name.
        exchanged: Names of the trained parameters.

    Raises:
        RunError: If a parameter was added, removed, replaced or unfrozen.
    """
    current = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    for name in (*current, *held):
        now, before = current.get(name), held.get(name)
        same = now and before and now[0] is before[0] and now[1] == before[1]
        thawed = now and now[0].requires_grad and name not in exchanged
        if not same or thawed:
            raise RunError(
                f"the model's parameter {name} was added, removed, replaced or unfrozen after the "
                "start and would not be trained",
                "create and freeze all layers before the run, and change weights in place",
            )
