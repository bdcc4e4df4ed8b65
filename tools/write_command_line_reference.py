"""Writes docs/command-line.md: every command with its arguments and options.

The text is that of `paceline COMMAND --help`. `make docs` runs it; a test fails when the page is out of
date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from paceline.cli.app import app

PAGE = Path(__file__).parent.parent / "docs" / "command-line.md"
HEAD = """# Command line

`paceline COMMAND --help` prints the same text. Every setting without an option of its own is set by
`--set section.key=value` ([settings](settings.md)). `make docs` generates this page from the commands.
Exit codes: 0 success, 1 failure, 2 wrong input, 128 + n stopped by signal n.
"""
# Commands that take most options of `paceline train`; their lists have only further ones.
LIKE_TRAIN = ("lr-find", "rehearse")


def commands() -> Iterator[tuple[str, Any]]:
    """Yields every command with its full name, such as `bench step`."""
    root: Any = typer.main.get_command(app)
    for name in root.commands:
        command = root.get_command(None, name)
        if hasattr(command, "commands"):
            for inner in command.commands:
                yield f"{name} {inner}", command.commands[inner]
        else:
            yield name, command


def render() -> str:
    found = dict(commands())
    shared = {item(p): p for p in found["train"].params}
    parts = [HEAD]
    for name, command in found.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(["paceline", name, *map(argument, arguments)])
        parts.append(f"## {name}\n\n`{usage}`\n\n{' '.join((command.help or '').split())}\n")
        listed = [p for p in command.params if not p.hidden]
        if name in LIKE_TRAIN:
            own = {item(p) for p in listed}
            left = [p.opts[0] for text, p in shared.items() if text not in own]
            names = ", ".join(f"`{flag}`" for flag in left if flag.startswith("--"))
            parts.append(f"Takes the options of [`train`](#train) except {names}.")
            parts[-1] += " Further options:\n"
            listed = [p for p in listed if item(p) not in shared]
        parts.append("\n".join(map(item, listed)) + "\n")
    return "\n".join(parts)


def argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    name += "..." if parameter.nargs == -1 and not name.endswith("...") else ""
    return name if parameter.required else f"[{name}]"


def item(parameter: Any) -> str:
    """One line of a list: the flags with their metavariable, and the help text with the default."""
    if parameter.param_type_name == "argument":
        names = f"`{argument(parameter)}`"
    else:
        names = ", ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
        names += f" {parameter.metavar}" if parameter.metavar else ""
    text = " ".join((getattr(parameter, "help", None) or "").split())
    if parameter.default not in (None, "", [], (), False, 0) and not callable(parameter.default):
        text = f"{text} Default: {parameter.default}.".strip()
    return f"- {names}: {text}".removesuffix(": ")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
