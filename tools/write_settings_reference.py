"""Writes docs/settings.md: every setting with its type, default and meaning, in two levels.

Types and defaults come from the settings dataclasses, the meaning from the docstring under each field.
`COMMON` names the settings of the first level. `make docs` runs it; a test fails when the page is out of
date or a field has no docstring.
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

All settings in two levels: the common ones, and those that few users change. In a recipe or any other
TOML file a setting is written as

```toml
[run]
epochs = 30
```

and on the command line as `--set run.epochs=30`; many have a [flag of their own](command-line.md#train).
Precedence: defaults < recipe < command line. Unknown keys and invalid values end the command with one
line and exit code 2. `RUN/config.toml` contains the resolved settings of a run. `make docs` generates
this page from the docstrings of the settings dataclasses.
"""
LEVELS = {
    "Common settings": "Enough for most trainings.\n",
    "Expert settings": "Everything else, including the tables of single optimizers and extensions.\n",
}
_COMMON = {
    "run": (
        "epochs global_batch_size batch_size loss smoothing mixup cutmix average_epochs seed "
        "device output resume pretrained target_top1 trackers"
    ),
    "data": "dir source image_size val_split augment workers decoder cache",
    "model": "name arguments freeze",
    "optim": ("name lr lr_base weight_decay momentum warmup_epochs schedule clip_norm scaling"),
    "run.accel": "compile fused_convolutions",
    "precision": "amp_dtype",
    "comm": "algorithm wire plan timeout_s",
    "checkpoint": "interval_epochs interval_steps keep",
}
COMMON = frozenset(
    f"{section}.{name}" for section, names in _COMMON.items() for name in names.split()
)


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
    known = {f"{section}.{field.name}" for section, kind in tables() for field in fields(kind)}
    assert known >= COMMON, f"COMMON names unknown settings: {COMMON - known}"
    parts = [HEAD]
    for level, (title, about) in enumerate(LEVELS.items()):
        parts.append(f"## {title}\n\n{about}")
        for section, kind in tables():
            lines = [
                line
                for name, line in items(section, kind).items()
                if (name in COMMON) == (level == 0)
            ]
            if lines:
                about = " ".join((kind.__doc__ or "").split()) + "\n\n" if level else ""
                heading = f"### `[{section}]`" if level else f"`[{section}]`:"
                parts.append(f"{heading}\n\n{about}" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def items(section: str, kind: type) -> dict[str, str]:
    """The line of each setting of a table, by the full name of the setting."""
    meanings = field_meanings(kind)
    lines = {}
    for field in fields(kind):
        if field.name not in own_hints(kind):
            continue
        name = f"{section}.{field.name}"
        assert field.default is not MISSING, f"{name} has no default"
        assert field.name in meanings, f"{name} has no docstring"
        default = "" if field.default is None else f" = {_default(field.default)}"
        lines[name] = f"- `{field.name}{default}` ({_type(field.type)}): {meanings[field.name]}"
    return lines


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
    """The default as it is written in TOML."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(format(item, '.6g') for item in value)}]"
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
