"""Reads a page as a browser would, and checks that it is harmless."""

import re
from html.parser import HTMLParser
from pathlib import Path

from paceline.report import RunFiles, render_run


class Page(HTMLParser):
    """`text`, `tags`, `attributes`, and the rows of each table by its caption, else its heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.tables: dict[str, list[tuple[str, ...]]] = {}
        self.title = ""
        self.feed(text)
        self.close()
        assert self.open == [], "each element that opens also closes"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag in ("h2", "caption"):
            self.title = ""
        elif tag == "tr":
            self.tables.setdefault(self.title, []).append(())
        elif tag in ("td", "th"):
            self.tables[self.title][-1] += ("",)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        if tag != "style":
            self.text += f"{data}\n"
        if tag in ("h2", "caption"):
            self.title += data
        elif {"td", "th"} & set(self.open):
            *cells, last = self.tables[self.title][-1]
            self.tables[self.title][-1] = (*cells, last + data)


def read_page(text: str) -> Page:
    """The page, which is small, well-formed, and neither runs nor loads anything."""
    assert len(text.encode("utf-8")) < 1_000_000
    assert text.startswith("<!doctype html>\n")
    page = Page(text)
    assert {"script", "link", "img", "iframe", "object", "base"}.isdisjoint(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "style")
        assert not name.startswith("on")
        if name == "href":  # an image in the page, or a page beside it
            assert re.fullmatch(
                r"data:image/jpeg;base64,[A-Za-z0-9+/=]+|\./[\w.%~/-]+", value or ""
            )
            continue
        assert "//" not in (value or "")
    assert not re.search(r"@import|url\(|https?://", text)
    return page


def run_page(folder: Path) -> Page:
    return read_page(render_run(RunFiles.read(folder)))
