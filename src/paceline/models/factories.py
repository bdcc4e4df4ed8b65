"""Creates models that are not part of Paceline: from timm, torchvision or any factory.

A factory receives `model.arguments`. It also receives `num_classes`, `in_channels` and `image_size`, each
only if the factory's signature has this argument, possibly under timm's name `in_chans` or `img_size`.
An exception in a user's code becomes a ConfigError with one line, whose `__cause__` is the exception.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.core.errors import ConfigError, PacelineError, nearest
from paceline.core.imports import first_line, import_object
from paceline.models.settings import ZOOS, nearest_of_many, registered_models, split_name

# Names that timm uses for our arguments.
_ALIASES = {"in_channels": "in_chans", "image_size": "img_size"}
_FIELD = "model.name"


def create_foreign_model(
    name: str, arguments: Mapping[str, Any], offered: Mapping[str, int]
) -> nn.Module:
    """Creates a model that is not part of Paceline.

    Args:
        name: Value of `model.name`.
        arguments: Value of `model.arguments`.
        offered: As in `call_factory`.

    Returns:
        The model.

    Raises:
        ConfigError: If the model is unknown, or if the factory raises any exception.
    """
    source, rest = split_name(name)
    if source in ZOOS:
        create = _from_timm if source == "timm" else _from_torchvision
        return _called(name, lambda: create(name, rest, arguments, offered))
    factory = _imported_factory(name) if source else registered_models()[name]
    return call_factory(factory, name, offered, arguments)


def call_factory(
    factory: Callable[..., object], name: str, offered: Mapping[str, int],
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:  # fmt: skip
    """Calls a factory with the arguments that the factory's signature accepts.

    Args:
        factory: Function or class that returns a module.
        name: Name of the factory in error messages.
        offered: `num_classes`, `in_channels` and `image_size` (pixels per side of the images).
        arguments: Further keyword arguments.

    Returns:
        The model.

    Raises:
        ConfigError: If an argument is unknown, or if the factory raises any exception.
    """
    keywords = _keywords(factory, name, offered, arguments or {})
    return _called(name, lambda: factory(**keywords))


def zoo_models(package: str, pattern: str = "*") -> list[str] | None:
    """Lists the models in timm or torchvision.

    Args:
        package: `timm` or `torchvision`.
        pattern: Glob that the names must match.

    Returns:
        The names of the models; None if the package is not installed.

    Raises:
        ConfigError: If the package cannot be imported.
    """
    if importlib.util.find_spec(package) is None:
        return None
    module = _zoo(package, f"{package}:")
    if package == "timm":
        return list(module.list_models(pattern))
    return list(module.models.list_models(include=pattern))


def _from_timm(
    name: str, model: str, arguments: Mapping[str, Any], offered: Mapping[str, int]
) -> object:
    timm = _zoo("timm", name)
    # A name may end with a tag. A name with a prefix, for a hub or a folder, is not in timm's list.
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
    """Calls `create` with the image size, or without it if the model has no such argument.

    Transformers need the image size for their position embeddings. Convolutional networks refuse
    it.
    """
    if key in values:
        return create()
    random_state = torch.get_rng_state()
    try:
        return create(**{key: offered["image_size"]})
    except TypeError as error:
        if key not in str(error):
            raise
    torch.set_rng_state(random_state)
    return create()


def _check_known(package: str, model: str, known: list[str], name: str) -> None:
    if model not in known:
        remedy = nearest_of_many(model, known, f"paceline models '{package}:*'")
        raise ConfigError(_FIELD, name, f"{package} has no such model", remedy)


def _zoo(package: str, name: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            _FIELD, name, f"needs the package {package}, which is not installed",
            f"pip install {package}",
        )  # fmt: skip
    try:
        # `torchvision.models` is not an attribute before it is imported.
        importlib.import_module(f"{package}.models")
        return importlib.import_module(package)
    except Exception as error:
        remedy = f"make `python -c 'import {package}'` work first"
        if "torchvision::" in str(error):
            remedy = (
                f"install the torchvision of torch {torch.__version__}, from the index of torch"
            )
        problem = f"importing {package} failed: {first_line(error)}"
        raise ConfigError(_FIELD, name, problem, remedy) from error


def _imported_factory(name: str) -> Callable[..., object]:
    factory = import_object(_FIELD, name)
    if isinstance(factory, nn.Module):
        raise ConfigError(
            _FIELD, name, "is a module, not a function that creates one",
            "name a function that returns the model; all ranks call it",
        )  # fmt: skip
    if not callable(factory):
        raise ConfigError(
            _FIELD, name, f"is a {type(factory).__name__}", "name a function or a class"
        )
    return factory  # type: ignore[no-any-return]


def _keywords(
    factory: Callable[..., object],
    name: str,
    offered: Mapping[str, int],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Selects the keyword arguments that the factory accepts; a factory with `**kwargs` accepts all."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return dict(arguments)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in kinds]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for key in arguments:
        if key not in names and not takes_any:
            remedy = nearest(key, names) if names else "it takes no arguments"
            raise ConfigError("model.arguments", key, f"{name} has no such argument", remedy)
    keywords: dict[str, Any] = {}
    for key, value in offered.items():
        alias = _ALIASES.get(key, key)
        if key in names or (takes_any and alias not in names):
            keywords[key] = value
        elif alias in names:
            keywords[alias] = value
    return {**keywords, **arguments}


def _called(name: str, create: Callable[[], object]) -> nn.Module:
    """Calls a function that creates a model, and checks the model."""
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
    """Checks that a model can be trained.

    Args:
        model: Result of a factory.
        name: Name of the model in error messages.

        Returns:
            The model.

        Raises:
            ConfigError: If `model` is not a module, has nothing to train, or has tensors without
            values.
    """
    if not isinstance(model, nn.Module):
        kind = "a class" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(_FIELD, name, f"returns {kind}", "return an nn.Module")
    weights = list(model.named_parameters())
    if not any(parameter.requires_grad for _, parameter in weights):
        problem = "all of its parameters are frozen" if weights else "it has no parameters"
        raise ConfigError(_FIELD, name, problem, "leave some parameters to train")
    for key, value in [*weights, *model.named_buffers()]:
        problem = ""
        if is_lazy(value):
            problem = f"{key} has no shape yet"
            remedy = "run lazy modules once on an example before you return the model"
        elif value.is_meta:
            problem = f"{key} is on the device meta, without values"
            remedy = "build the model on the CPU, or call to_empty and initialize it"
        elif isinstance(value, nn.Parameter) and not value.is_floating_point():
            problem = f"the parameter {key} is {str(value.dtype).removeprefix('torch.')}"
            remedy = "make it a buffer, or floating-point"
        if problem:
            raise ConfigError(_FIELD, name, problem, remedy)
    return model
