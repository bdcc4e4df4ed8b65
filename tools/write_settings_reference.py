"""Writes docs/settings.md: every setting with its type, default and meaning.

Types and defaults come from the settings dataclasses, the meaning from the docstring under each field.
`make docs` runs it; a test fails when the page is out of date or a field has no docstring.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

from paceline.config import SECTIONS
from paceline.core.settings import own_hints, owner_tables

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

All settings, by section. In a recipe or any other TOML file a setting is written as

```toml
[run]
epochs = 30
```

and on the command line as `--set run.epochs=30`. Common settings also have a flag of their own
(`paceline train --help`). Precedence: defaults < recipe < command line. An unknown key, a wrong type or
a value out of range ends the command with one line and exit code 2. `paceline train` writes the resolved
settings to `RUN/config.toml`.

`make docs` generates this page from the docstrings of the settings dataclasses.
"""


def field_meanings(kind: type) -> dict[str, str]:
    """The docstring under each field of the dataclass `kind`, and of those that it inherits from."""
    meanings = {}
    for base in kind.__mro__[1:]:
        meanings |= field_meanings(base) if is_dataclass(base) else {}
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for item, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    meanings[item.target.id] = " ".join(text.split())
    return meanings


def tables() -> Iterator[tuple[str, type]]:
    """Yields every table of a recipe with its dataclass: a section, then those of its owners."""
    for section, kind in SECTIONS.items():
        yield section, kind
        for table, own in owner_tables(kind):
            yield f"{section}.{table}", own


def render() -> str:
    parts = [HEAD]
    for section, kind in tables():
        about = " ".join((kind.__doc__ or "").split())
        own = [field for field in fields(kind) if field.name in own_hints(kind)]
        if not own:
            continue
        parts.append(
            f"\n## `[{section}]`\n\n{about}\n\n"
            "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        )
        meanings = field_meanings(kind)
        for field in own:
            name = f"{section}.{field.name}"
            assert field.default is not MISSING, f"{name} has no default"
            assert field.name in meanings, f"{name} has no docstring"
            parts.append(
                f"| `{field.name}` | {_type(field.type)} | {_default(field.default)} | "
                f"{meanings[field.name].replace('|', chr(92) + '|')} |"
            )
    return "\n".join(parts) + "\n"


def _type(hint: object) -> str:
    """The type in the words of TOML."""
    text = str(hint).removesuffix(" | None")
    names = {"str": "string", "int": "integer", "float": "float", "bool": "boolean"}
    if text.startswith("tuple["):
        items = text[len("tuple[") : -1].split(", ")
        length = "array" if items[-1] == "..." else f"array of {len(items)}"
        return f"{length}, {names[items[0]]}"
    return names[text]


def _default(value: object) -> str:
    """The default as it is written in TOML; an unset one is a dash."""
    match value:
        case None:
            return "–"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case tuple():
            return f"`[{', '.join(format(item, '.6g') for item in value)}]`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
