"""Commands that share flags with another command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
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
