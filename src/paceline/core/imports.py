"""Imports objects that a setting names as `package.module:attribute`.

Importing a module runs its code, so only names that the user has given are imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, nearest

# The module name in settings for an object that a program gave to `pl.Trainer`.
PYTHON = "python"
_MAX_NAMES = 20


def object_name(thing: object) -> str:
    """Returns the text `python:NAME`, by which settings refer to a Python object of a program."""
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{PYTHON}:{re.sub(r'[^0-9A-Za-z_]+', '_', name).strip('_') or 'object'}"


def python_object_error(field: str, text: str) -> ConfigError:
    """Returns the error for a setting that names a Python object which was not passed in."""
    return ConfigError(
        field, text, "was given as a Python object, which settings cannot create",
        "use the program that created it, or name it as package.module:name from the start",
    )  # fmt: skip


def split_name(field: str, text: str) -> tuple[str, str]:
    """Splits `module:attribute`; raises ConfigError for a text of another form."""
    module, colon, attribute = text.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    if not colon or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            field, text, "is not of the form module:name", "write it as my_package.my_module:name"
        )
    return module, attribute


def import_object(field: str, text: str) -> Any:
    """Imports the object that the setting `field` names, also from the current directory.

    Args:
        field: The setting.
        text: The value of the setting, `module:attribute`.

    Raises:
        ConfigError: If there is no such object, or if importing its module fails.
    """
    module, attribute = split_name(field, text)
    if module == PYTHON:
        raise python_object_error(field, text)
    here = str(Path.cwd())
    # Not for a package that is already imported, such as torch: the current directory may be a foreign
    # run folder, from which later imports of that package would take modules.
    if module.partition(".")[0] not in sys.modules and not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(field, text, module, error) from error
        raise _no_module(field, text, error.name) from None
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise _failed(field, text, module, error) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [n for n, v in vars(value).items() if callable(v) and not n.startswith("_")]
            remedy = nearest(part, names)
            if not remedy.startswith("did you mean"):
                remedy = f"it has {', '.join(names[:_MAX_NAMES]) or 'no functions or classes'}"
            owner = getattr(value, "__name__", module)
            raise ConfigError(field, text, f"{owner} has no attribute {part}", remedy)
        value = getattr(value, part)
    return value


def _no_module(field: str, text: str, module: str) -> ConfigError:
    return ConfigError(
        field, text, f"there is no module {module!r} in {Path.cwd()} or among the packages",
        f"run where {module.partition('.')[0]}.py is, or install its package",
    )  # fmt: skip


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an exception, as in `TypeError: reason`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _failed(field: str, text: str, module: str, error: BaseException) -> ConfigError:
    return ConfigError(
        field, text, f"importing {module} failed ({first_line(error)})", f"fix {module}"
    )
