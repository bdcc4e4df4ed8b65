"""Signatures of commands, from which Typer makes flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, get_type_hints


def take_signature(
    command: Callable[..., int], names: Collection[str], *functions: Callable[..., Any]
) -> None:
    """Gives `command` the signature of other functions, from which Typer makes its flags.

    Args:
        command: A function of keyword arguments.
        names: The parameters to take.
        functions: The functions that have them. If two have a parameter of the same name, `command` gets
            the later one.
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
    """Returns a decorator that replaces parameters of a command by flags.

    Args:
        makers: For each parameter the function that makes its value; the parameters of that function
            become flags.
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
