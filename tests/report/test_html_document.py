"""The frame of a page: nothing empty in it, everything escaped."""

from paceline.report.chart import Chart, Line
from paceline.report.html import document, figures, remarks, section
from paceline.report.tables import Table

HOSTILE = "<script>&"


def test_a_document_leaves_empty_parts_out_and_escapes_its_title() -> None:
    page = document(HOSTILE, ["<p>a</p>", "", "<p>b</p>"])
    assert page.startswith("<!doctype html>\n")
    assert "<title>&lt;script&gt;&amp;</title>" in page
    assert "<main>\n<p>a</p>\n<p>b</p>\n</main>" in page


def test_figures_carry_title_and_note() -> None:
    text = figures([Chart(HOSTILE, "epoch", [Line("a", [(0, 1)])], note="median")])
    assert "<figcaption>&lt;script&gt;&amp; <span>median</span></figcaption><svg" in text


def test_sections_and_remarks_without_content_are_nothing() -> None:
    assert section("Runs", [Table("", ("a",), ())]) == ""
    assert remarks("Remarks", []) == ""


def test_sections_and_remarks() -> None:
    full, empty = Table("Title", ("a",), (("1",),)), Table("Empty", ("a",), ())
    assert section(HOSTILE, [full, empty]).count('class="card"') == 1
    assert "<h2>&lt;script&gt;&amp;</h2>" in section(HOSTILE, [full])
    assert "<caption>Title</caption>" in section("Runs", [full], titled=True)
    assert "<li>&lt;script&gt;&amp;</li>" in remarks("Remarks", [HOSTILE])
