"""Objects that a setting names as `package.module:attribute`.

Importing a module runs its code: only names that the user gave on this machine are imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, nearest

# What settings write in place of a module for an object that a program gave to `pl.Trainer`.
PYTHON = "python"
_NAMED = 20


def object_name(thing: object) -> str:
    """`python:NAME`, as settings name an object of a program."""
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{PYTHON}:{re.sub(r'[^0-9A-Za-z_]+', '_', name).strip('_') or 'object'}"


def python_object_error(field: str, text: str) -> ConfigError:
    """For a setting whose object is not given."""
    return ConfigError(
        field, text, "was given as a Python object, which settings cannot make again",
        "use the program that made it, or name it as package.module:name from the start",
    )  # fmt: skip


def split_name(field: str, text: str) -> tuple[str, str]:
    """Module and attribute; raises ConfigError for another form."""
    module, colon, attribute = text.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    if not colon or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            field, text, "is not of the form module:name", "write it as my_package.my_module:name"
        )
    return module, attribute


def check_module(field: str, text: str) -> None:
    """ConfigError where the package that `text` names cannot be found. Nothing is imported, so that a
    module or attribute inside of it may still be missing."""
    module, _ = split_name(field, text)
    package = module.partition(".")[0]
    if package == PYTHON or package in sys.modules:
        return
    path = [str(Path.cwd()), *sys.path]
    if package not in sys.builtin_module_names and PathFinder.find_spec(package, path) is None:
        raise _no_module(field, text, package)


def import_object(field: str, text: str) -> Any:
    """Imports what `field` names. Modules of the current directory are found, as with `python -m`."""
    module, attribute = split_name(field, text)
    if module == PYTHON:
        raise python_object_error(field, text)
    here = str(Path.cwd())
    # Not for a package that is imported already, such as torch: the current directory may be a foreign
    # run folder, from which later imports of that package would take modules.
    if module.partition(".")[0] not in sys.modules and not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(field, text, module, error) from error
        raise _no_module(field, text, error.name) from None
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise _failed(field, text, module, error) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
            remedy = nearest(part, names)
            if not remedy.startswith("did you mean"):
                remedy = f"it has {', '.join(names[:_NAMED]) or 'no functions or classes'}"
            where = getattr(found, "__name__", module)
            raise ConfigError(field, text, f"no attribute {part} in {where}", remedy)
        found = getattr(found, part)
    return found


def _no_module(field: str, text: str, module: str) -> ConfigError:
    return ConfigError(
        field, text, f"there is no module {module!r} in {Path.cwd()} or among the packages",
        f"run where {module.partition('.')[0]}.py is, or install its package",
    )  # fmt: skip


def first_line(error: BaseException) -> str:
    """Type and first line of an exception out of a user's code: `TypeError: what is wrong`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _failed(field: str, text: str, module: str, error: BaseException) -> ConfigError:
    return ConfigError(
        field, text, f"importing {module} failed ({first_line(error)})", f"fix {module}"
    )
