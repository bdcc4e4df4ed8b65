"""Signatures of commands, from which Typer makes flags: of another command, or of functions that make one
argument each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, get_type_hints


def take_signature(
    command: Callable[..., int], names: Collection[str], *functions: Callable[..., Any]
) -> None:
    """Gives `command` those parameters of `functions` that are in `names`, from which Typer makes its
    flags. Of two with the same name the later one counts, in the place of the earlier."""
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {"return": int}
    for function in functions:
        known = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in names:
                hints[name] = known[name]
                parameters[name] = parameter.replace(annotation=known[name])
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = hints


def flags_of(**makers: Callable[..., Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Replaces parameters of a command by the flags of the functions in `makers`, which make them."""

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
