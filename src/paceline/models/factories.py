"""Creates models that are not ours: timm's, torchvision's, registered ones, and those of any module.

A factory is called with those of `num_classes`, `in_channels` and `image_size` that its signature takes
(timm's names for them, `in_chans` and `img_size`, count too), and with `model.arguments`. What a user's
code raises becomes one line; the exception is its `__cause__`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.core.errors import ConfigError, PacelineError, nearest
from paceline.core.imports import first_line, import_object
from paceline.models.settings import ZOOS, nearest_of_many, registered_factory, split_name

# Other names for what a factory is offered.
_ALIASES = {"in_channels": "in_chans", "image_size": "img_size"}
_FIELD = "model.name"


def create_foreign_model(
    name: str, arguments: Mapping[str, Any], *, num_classes: int, in_channels: int, image_size: int
) -> nn.Module:
    """The model `name`, which is not one of ours. Raises ConfigError where it cannot be found, and for
    whatever its factory raises."""
    offered = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    source, rest = split_name(name)
    if source in ZOOS:
        create = _from_timm if source == "timm" else _from_torchvision
        return _called(name, lambda: create(name, rest, arguments, offered))
    if source:
        factory = _factory(name, name)
    else:
        found = registered_factory(name)
        if isinstance(found, importlib.metadata.EntryPoint):
            found = _factory(f"{found.module}:{found.attr}", name)
        assert found is not None, name
        factory = found
    return call_factory(factory, name, arguments, **offered)


def call_factory(
    factory: Callable[..., object], name: str, arguments: Mapping[str, Any] | None = None, *,
    num_classes: int, in_channels: int, image_size: int,
) -> nn.Module:  # fmt: skip
    """What `factory` returns for those of the arguments that it takes; `name` is for messages."""
    offered = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    given = {**_accepted(factory, offered), **(arguments or {})}
    _check_arguments(factory, name, arguments or {})
    return _called(name, lambda: factory(**given))


def zoo_models(package: str, pattern: str = "*") -> list[str] | None:
    """Names of the models of timm or torchvision; None if the package is not installed. ConfigError if it
    cannot be imported."""
    try:
        module = _zoo(package, f"{package}:")
    except ConfigError as error:
        cause = error.__cause__
        if (
            isinstance(cause, ModuleNotFoundError)
            and (cause.name or "").partition(".")[0] == package
        ):
            return None
        raise
    where = module if package == "timm" else module.models
    return list(
        where.list_models(pattern) if package == "timm" else where.list_models(include=pattern)
    )


def _from_timm(
    name: str, model: str, arguments: Mapping[str, Any], offered: Mapping[str, int]
) -> object:
    timm = _zoo("timm", name)
    # Names may have a tag; those of a hub or a folder have a prefix and are not listed.
    if ":" not in model:
        _check_known("timm", model.partition(".")[0], timm.list_models(), name)
    values = {
        "pretrained": False, "num_classes": offered["num_classes"],
        "in_chans": offered["in_channels"], **arguments,
    }  # fmt: skip
    create = timm.create_model
    return _with_size(lambda **more: create(model, **values, **more), "img_size", values, offered)


def _from_torchvision(
    name: str, model: str, arguments: Mapping[str, Any], offered: Mapping[str, int]
) -> object:
    models = _zoo("torchvision", name).models
    _check_known("torchvision", model, models.list_models(), name)
    if offered["in_channels"] != 3:
        raise ConfigError(
            _FIELD, name, f"torchvision's models take 3 channels, not {offered['in_channels']}",
            "set data.channels=3, with a mean and std for each",
        )  # fmt: skip
    values = {"weights": None, "num_classes": offered["num_classes"], **arguments}
    create = models.get_model
    return _with_size(lambda **more: create(model, **values, **more), "image_size", values, offered)


def _with_size(
    create: Callable[..., object], key: str, values: Mapping[str, Any], offered: Mapping[str, int]
) -> object:
    """Calls `create` with the image size, and without it where the model takes none: transformers have
    embeddings of a fixed size, convolutional networks refuse the argument."""
    if key in values:
        return create()
    drawn = torch.get_rng_state()
    try:
        return create(**{key: offered["image_size"]})
    except TypeError as error:
        if key not in str(error):
            raise
    torch.set_rng_state(drawn)
    return create()


def _check_known(package: str, model: str, known: list[str], name: str) -> None:
    if model not in known:
        listing = f"paceline models '{package}:*'"
        remedy = nearest_of_many(model, known, listing)
        raise ConfigError(_FIELD, name, f"{package} has no such model", remedy)


def _zoo(package: str, name: str) -> Any:
    try:
        importlib.import_module(package)
        # `torchvision.models` is not an attribute before it is imported.
        importlib.import_module(f"{package}.models")
        return sys.modules[package]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise _import_error(package, name, error) from error
        raise ConfigError(
            _FIELD, name, f"needs the package {package}, which is not installed",
            f"pip install {package}",
        ) from error  # fmt: skip
    except Exception as error:
        raise _import_error(package, name, error) from error


def _import_error(path: str, name: str, error: BaseException) -> ConfigError:
    return ConfigError(
        _FIELD, name, f"importing {path} failed: {first_line(error)}",
        f"install the torchvision of torch {torch.__version__}, from the same index as torch"
        if "torchvision::" in str(error)
        else f"make `python -c 'import {path}'` work first",
    )  # fmt: skip


def _factory(path: str, name: str) -> Callable[..., object]:
    """The function or class that `module:attribute` names."""
    found = import_object(_FIELD, path)
    if isinstance(found, nn.Module):
        raise ConfigError(
            _FIELD, name, "is a module, not a function that makes one",
            "put it into a function: all ranks make their own",
        )  # fmt: skip
    if not callable(found):
        raise ConfigError(
            _FIELD, name, f"is a {type(found).__name__}", "name a function or a class"
        )
    factory: Callable[..., object] = found
    return factory


def _parameters(factory: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """None where a function of C has no signature."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _names(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters.values() if p.kind in kinds]


def _accepted(factory: Callable[..., object], offered: Mapping[str, int]) -> dict[str, int]:
    """With `**kwargs` a factory takes all that it does not name otherwise."""
    parameters = _parameters(factory)
    if parameters is None:
        return {}
    named, given = _names(parameters), {}
    for name, value in offered.items():
        alias = _ALIASES.get(name, name)
        if name in named or (alias not in named and _takes_any(parameters)):
            given[name] = value
        elif alias in named:
            given[alias] = value
    return given


def _check_arguments(
    factory: Callable[..., object], name: str, arguments: Mapping[str, Any]
) -> None:
    parameters = _parameters(factory)
    if parameters is None or _takes_any(parameters):
        return
    named = _names(parameters)
    for key in arguments:
        if key not in named:
            remedy = nearest(key, named) if named else "it takes no arguments"
            raise ConfigError("model.arguments", key, f"{name} has no such argument", remedy)


def _called(name: str, create: Callable[[], object]) -> nn.Module:
    """What a factory returns, checked."""
    try:
        model = create()
    except (PacelineError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            _FIELD, name, f"could not be created: {first_line(error)}",
            "check its factory and model.arguments",
        ) from error  # fmt: skip
    return checked_module(model, name)


def checked_module(model: object, name: str) -> nn.Module:
    """`model` if it can be trained; ConfigError otherwise."""
    if not isinstance(model, nn.Module):
        kind = "a class" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(_FIELD, name, f"gives {kind}", "return an nn.Module")
    weights = list(model.named_parameters())
    if not any(parameter.requires_grad for _, parameter in weights):
        problem = "all of its parameters are frozen" if weights else "it has no parameters"
        raise ConfigError(_FIELD, name, problem, "leave some to train")
    tensors = [*weights, *model.named_buffers()]
    for key, value in tensors:
        if is_lazy(value):
            raise ConfigError(
                _FIELD, name, f"{key} has no shape yet",
                "run lazy modules once on an example before you return the model",
            )  # fmt: skip
        if value.is_meta:
            raise ConfigError(
                _FIELD, name, f"{key} is on the device meta, without values",
                "build the model on the CPU, or call to_empty and initialize it",
            )  # fmt: skip
    for key, value in weights:
        if not value.is_floating_point():
            dtype = str(value.dtype).removeprefix("torch.")
            raise ConfigError(
                _FIELD, name, f"the parameter {key} is {dtype}",
                "make it a buffer, or floating-point",
            )  # fmt: skip
    return model
