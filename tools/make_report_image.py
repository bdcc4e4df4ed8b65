"""Makes docs/images/report.svg, the picture in the README, from the report of a real run.

    python tools/make_report_image.py RUN/report.html

It takes the title, the figures and the first charts from the page and arranges them in one SVG file.
"""

from __future__ import annotations

import html
import re
import sys
import textwrap
from pathlib import Path

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "report.svg"
CHART_WIDTH, CHART_HEIGHT, GAP, CHARTS = 520, 290, 16, 4
TITLE_LETTERS = 82
WIDTH = 2 * CHART_WIDTH + 3 * GAP
FRAME = """
.card { fill: var(--card); stroke: var(--rule); }
.head { fill: var(--ink); font-weight: 600; font-size: 22px; }
.soft { fill: var(--soft); font-size: 13px; }
.figure { fill: var(--ink); font-weight: 600; font-size: 22px; }
.caption { fill: var(--ink); font-weight: 600; font-size: 15px; }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
"""


def main(page: str) -> str:
    """The SVG for the HTML of a report."""
    title = _text(re.search(r"<h1>(.*?)</h1>", page, re.S)[1])  # type: ignore[index]
    facts = _text(re.search(r"<header><p>(.*?)</p>", page, re.S)[1])  # type: ignore[index]
    tiles = re.search(r'<dl class="tiles">(.*?)</dl>', page, re.S)[1]  # type: ignore[index]
    figures = re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", tiles, re.S)
    charts = re.findall(r"<figure>\s*<figcaption>(.*?)</figcaption>\s*(<svg.*?</svg>)", page, re.S)[
        :CHARTS
    ]
    parts, y = [], 34
    parts.append(_label("soft", GAP, y, facts))
    for line in textwrap.wrap(title, TITLE_LETTERS):
        y += 30
        parts.append(_label("head", GAP, y, line))
    y += 18
    tile = (WIDTH - GAP) / len(figures) - GAP
    for at, (name, value) in enumerate(figures):
        x = GAP + at * (tile + GAP)
        parts.append(_card(x, y, tile, 62))
        parts.append(_label("soft", x + 12, y + 22, _text(name)))
        parts.append(_label("figure", x + 12, y + 49, _text(value)))
    y += 62 + GAP
    for at, (caption, svg) in enumerate(charts):
        x, top = GAP + at % 2 * (CHART_WIDTH + GAP), y + at // 2 * (CHART_HEIGHT + 34 + GAP)
        name = _text(re.sub(r"<span.*?</span>", "", caption, flags=re.S))
        parts.append(_card(x, top, CHART_WIDTH, CHART_HEIGHT + 34))
        parts.append(_label("caption", x + 14, top + 24, name))
        place = f'<svg x="{x}" y="{top + 32}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}" '
        parts.append(_still(svg).replace("<svg ", place, 1))
    height = y + -(-len(charts) // 2) * (CHART_HEIGHT + 34 + GAP)
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]  # type: ignore[index]
    colours = re.search(r":root \{.*?\}", style, re.S)[0]  # type: ignore[index]
    rules = "\n".join(line for line in style.splitlines() if line.startswith(".chart"))
    rules = re.sub(r" \.key .*", "", rules)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{html.escape(title)}">'
        f"<style>{colours}\n{rules}\n{FRAME}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="var(--page)"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _card(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="card" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="10"/>'


def _label(look: str, x: float, y: float, text: str) -> str:
    return f'<text class="{look}" x="{x:.0f}" y="{y}">{html.escape(text)}</text>'


def _still(svg: str) -> str:
    """The chart without what only a pointer shows."""
    svg = re.sub(r'<rect class="strip".*?</rect>', "", svg, flags=re.S)
    return re.sub(r"<title>.*?</title>", "", svg, flags=re.S)


def _text(markup: str) -> str:
    """Plain text of a piece of the page."""
    plain = html.unescape(re.sub(r"<[^>]+>", " ", markup)).replace("\xa0", " ")
    return " ".join(plain.split())


if __name__ == "__main__":
    IMAGE.parent.mkdir(exist_ok=True)
    IMAGE.write_text(main(Path(sys.argv[1]).read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {IMAGE.name}, {IMAGE.stat().st_size:,} bytes")
