"""Composes the signatures of commands, from which Typer makes command-line flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, get_type_hints


def take_signature(
    command: Callable[..., int], names: Collection[str], *functions: Callable[..., Any]
) -> None:
    """Gives `command` parameters of other functions, from which Typer makes flags.

    Args:
        command: A function that accepts any keyword arguments.
        names: The names of the parameters to copy.
        functions: The functions that have these parameters. If two functions have a parameter of the same
            name, the later function decides.
    """
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {"return": int}
    for function in functions:
        types = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in names:
                hints[name] = types[name]
                parameters[name] = parameter.replace(annotation=types[name])
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = hints


def flags_of(**makers: Callable[..., Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Returns a decorator that replaces some parameters of a command by several flags each.

    Args:
        makers: By parameter of the command, a function that makes the parameter's value. The parameters
            of this function become flags.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def run(**given: Any) -> int:
            made = {}
            for name, make in makers.items():
                flags = inspect.signature(make).parameters
                made[name] = make(**{flag: given.pop(flag) for flag in flags})
            return command(**made, **given)

        functions = (*makers.values(), command)
        names = {name for function in functions for name in inspect.signature(function).parameters}
        take_signature(run, names - makers.keys(), *functions)
        return run

    return decorate
