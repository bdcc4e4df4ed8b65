"""Tables as HTML: escaped, aligned, and silent when empty."""

from paceline.report.html import html_pairs, html_table
from paceline.report.tables import Table


def test_a_table() -> None:
    table = Table("Samples", ("name", "times"), (("a", "1"),), frozenset({0}), "2 more not shown")
    assert html_table(table) == (
        '<div class="scroll"><table><caption>Samples</caption>'
        '<thead><tr><th scope="col" class="text">name</th><th scope="col">times</th></tr></thead>'
        '<tbody><tr><td class="text">a</td><td>1</td></tr></tbody></table></div>'
        '<p class="note">2 more not shown</p>'
    )


def test_without_title_and_without_heads() -> None:
    text = html_table(Table("Versions", ("", ""), (("torch", "2.13"),)), titled=False)
    assert "<caption>" not in text
    assert "<thead>" not in text


def test_an_empty_table_is_nothing() -> None:
    assert html_table(Table("Samples", ("name",), ())) == ""
    assert html_pairs([], "tiles") == ""


def test_pairs() -> None:
    assert html_pairs([("top-1", "90 %")], "tiles") == (
        '<dl class="tiles"><div><dt>top-1</dt><dd>90 %</dd></div></dl>'
    )


def test_every_cell_is_escaped() -> None:
    hostile = "<script>&\"'"
    table = Table(hostile, (hostile,), ((hostile,),), note=hostile)
    for text in (html_table(table), html_pairs([(hostile, hostile)], "tiles")):
        assert "<script" not in text
        assert "&lt;script&gt;&amp;&quot;&#x27;" in text
