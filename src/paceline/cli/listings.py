"""`paceline recipes` lists the shipped recipes, `paceline models` the models for `--model`."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import typer

from paceline.cli.options import AsJson
from paceline.config import CHOOSERS, RECIPES, recipe_names
from paceline.core.errors import ConfigError, nearest
from paceline.core.untrusted import one_line
from paceline.models.settings import FORMS, MODEL_NAMES, ZOOS, registered_models, split_name


def recipes(
    name: str | None = typer.Argument(None, help="Show this recipe."),
) -> int:
    """List the shipped recipes, or show one."""
    if name is None:
        lines = dict.fromkeys(CHOOSERS.names(), "Chooses settings from data and machine.")
        for known in recipe_names():
            comment = (RECIPES / f"{known}.toml").read_text("utf-8").partition("\n")[0]
            lines[known] = comment.removeprefix("#").strip()
        width = max(map(len, lines))
        for known, text in lines.items():
            typer.echo(f"{known:<{width}}  {text}")
        return 0
    if name not in recipe_names():
        raise ConfigError("NAME", name, "is not a recipe", nearest(name, recipe_names()))
    typer.echo((RECIPES / f"{name}.toml").read_text("utf-8").rstrip())
    return 0


NOTES = {
    **{f"resnet{depth}": "ResNet v1.5" for depth in (18, 34, 50, 101, 152)},
    "resnet_tiny": "for 28 or 32 pixels; parameters for 10 classes in grayscale",
    "resnet_fast": "for 32 pixels, seconds on a GPU; parameters for 10 classes",
    "alexnet": "torchvision's AlexNet",
    "alexnet_bn": "with batch norm, for large batches",
}


def list_models(
    pattern: str | None = typer.Argument(
        None, help="Of names, such as 'resnet*' or 'timm:conv*'. Default: an overview."
    ),
    as_json: AsJson = False,
) -> int:
    """List the models that --model takes."""
    source, rest = split_name(pattern or "")
    if source in ZOOS:
        names = [f"{source}:{name}" for name in _zoo(source, rest)]
        _check_matches(names, pattern)
        typer.echo(json.dumps({"models": names}) if as_json else "\n".join(names))
        return 0
    wanted = pattern or "*"
    ours = [name for name in MODEL_NAMES if fnmatchcase(name, wanted)]
    registered = {n: module for n, module in registered_models().items() if fnmatchcase(n, wanted)}
    if pattern is not None:
        _check_matches([*ours, *registered], pattern)
    parameters = {name: count_parameters(name) for name in ours}
    if as_json:
        typer.echo(json.dumps({"own": parameters, "registered": registered}))
        return 0
    for name in ours:
        typer.echo(f"{name:<14} {parameters[name]:>12,}  {NOTES[name]}")
    for name, module in registered.items():
        typer.echo(one_line(f"{name:<14} {'':>12}  {module}"))
    if pattern is None:
        for zoo in ZOOS:
            typer.echo(f"{zoo + ':NAME':<27}  listed by paceline models '{zoo}:*'")
        function = "any function that returns an nn.Module (docs/models.md)"
        typer.echo(f"{'module:factory':<27}  {function}")
    return 0


def count_parameters(name: str) -> int:
    """Returns the number of parameters of one of Paceline's models.

    The model has 1,000 classes, or 10 for models that are made for small images.
    """
    import torch

    from paceline.models.registry import create_model
    from paceline.models.settings import ModelSettings

    classes, channels = {"resnet_tiny": (10, 1), "resnet_fast": (10, 3)}.get(name, (1000, 3))
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name), num_classes=classes, in_channels=channels)
    return sum(parameter.numel() for parameter in model.parameters())


def _zoo(package: str, pattern: str) -> list[str]:
    from paceline.models.factories import zoo_models

    names = zoo_models(package, pattern or "*")
    if names is None:
        raise ConfigError(
            "PATTERN", f"{package}:{pattern}", f"the package {package} is not installed",
            f"pip install {package}",
        )  # fmt: skip
    return names


def _check_matches(names: list[str], pattern: str | None) -> None:
    if not names:
        known = [*MODEL_NAMES, *registered_models()]
        hint = nearest(str(pattern).strip("*"), known)
        raise ConfigError("PATTERN", pattern, "matches no model", f"{hint}; or give {FORMS}")
