"""Writes docs/settings.md: every setting, its type and its default, read off the dataclasses.

In: nothing. Out: the page. `make docs` runs it; a test keeps the page true.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

from paceline.config import SECTIONS

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Every setting, as it stands in a recipe's TOML (`[section]`, `key = value`) and after `--set`
(`--set section.key=value`). Values that are out of range, of the wrong type or unknown end the command
with one line. This page is written by `make docs` from the code.
"""


def render() -> str:
    parts = [HEAD]
    for section, kind in SECTIONS.items():
        about = " ".join((kind.__doc__ or "").split())
        parts.append(
            f"\n## `[{section}]`\n\n{about}\n\n| key | type | default |\n| --- | --- | --- |"
        )
        for field in fields(kind):
            assert field.default is not MISSING, f"{section}.{field.name} has no default"
            shown = "–" if field.default is None else f"`{field.default!r}`"
            kind_name = str(field.type).replace(" | None", ", or unset").replace("|", "or")
            parts.append(f"| `{field.name}` | {kind_name} | {shown} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
