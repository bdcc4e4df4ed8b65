"""Settings of the documentation site, which `make docs` builds from docs/*.md with Sphinx.

The Markdown files are plain, so that they are readable on a forge. Three steps happen when Sphinx reads
a file: lists of links in index.md become the navigation, `<!-- autodoc: NAMES -->` becomes the
documentation of these names of `paceline`, and links that leave docs/ lead to the source files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.util import logging

from paceline.version import __version__

ROOT = Path(__file__).parent.parent
# Address of the source files; by default those on this disk, as seen from docs/_build/html.
SOURCE = os.environ.get("PACELINE_SOURCE_URL", "../../../")

project = "Paceline"
copyright = "The Paceline developers"  # noqa: A001 - Sphinx reads this name
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "source": SOURCE + "{{path}}",
}

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"Paceline {release}"
html_static_path: list[str] = []
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
highlight_language = "none"

_LINK = re.compile(r"\]\(\.\./([^)\s#]*)(#[^)\s]*)?\)")
_AUTODOC = re.compile(r"<!-- autodoc: ([^>]*?) -->")
_log = logging.getLogger(__name__)


def read_source(app: Any, name: str, content: list[str]) -> None:
    text = _LINK.sub(lambda link: _source_link(name, link[1]), content[0])
    text = _AUTODOC.sub(lambda found: autodoc(found[1].split()), text)
    content[0] = text + navigation(text) if name == root_doc else text


def _source_link(page: str, path: str) -> str:
    if not (ROOT / path).exists():
        _log.warning("the link to ../%s leads nowhere", path, location=page)
    return f"](source:{path})"


def autodoc(names: list[str]) -> str:
    """The directives that document public names of `paceline`. Functions are in lower case."""
    lines = []
    for name in names:
        kind = "autofunction" if name.islower() else "autoclass"
        lines.append(f".. {kind}:: paceline.{name}")
    return "\n```{eval-rst}\n" + "\n\n".join(lines) + "\n```\n"


def navigation(text: str) -> str:
    """Hidden tables of contents from the lists of links below each heading."""
    parts = []
    for section in text.split("\n## ")[1:]:
        caption, _, body = section.partition("\n")
        pages = re.findall(r"^- \[[^]]*\]\(([\w-]+)\.md\)", body, re.M)
        lines = "\n".join(pages)
        parts.append(f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n")
    return "".join(parts)


def to_restructured_text(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are written in Markdown's style; Sphinx reads them as reStructuredText."""
    result: list[str] = []
    code: int | None = None  # indentation of the line that introduces a block of code
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if code is not None and line.strip() and indent <= code:
            code = None
        if code is None and _begins_code(result, line, indent):
            code = next(_indent(b) for b in reversed(result) if b.strip())
            result += [" " * code + ".. code-block:: python", ""]
        if code is None and line.strip() in ("Example:", "Examples:"):
            code = indent
            pad = " " * indent
            result += ["", f"{pad}**Example**", "", f"{pad}.. code-block:: python", ""]
        else:
            result.append(line if code is not None else _inline(line))
    lines[:] = result


def _begins_code(before: list[str], line: str, indent: int) -> bool:
    """If an indented line after an empty one is code: all other text is continued without empty lines."""
    texts = [text for text in before if text.strip()]
    if not line.strip() or not texts or before[-1].strip():
        return False
    sections = ("Args:", "Arguments:", "Attributes:", "Returns:", "Raises:", "Yields:", "Note:")
    in_section = any(text.strip() in sections for text in texts)
    return indent >= _indent(texts[-1]) + 4 and not in_section


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _inline(line: str) -> str:
    """`code` becomes ``code``; characters with a meaning in reStructuredText are escaped elsewhere."""
    parts = re.split(r"(`+[^`]*`+)", line)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part.strip('`')}``" + ("\\ " if parts[i + 1][:1].isalnum() else "")
        else:
            parts[i] = re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", part)
    return "".join(parts)


def setup(app: Any) -> None:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", to_restructured_text, priority=100)
