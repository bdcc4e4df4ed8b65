"""The chart puts known values at known places, and speaks to those who cannot see it."""

import xml.etree.ElementTree as ElementTree

import pytest

from paceline.report.chart import (
    HEIGHT,
    LEFT,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    TOP,
    WIDTH,
    Chart,
    Line,
    Marker,
    line_chart,
)

FOOT, RIGHT_END = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH


def parsed(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(chart))


def places(svg: ElementTree.Element, place: int = 0) -> list[tuple[float, float]]:
    polyline = svg.findall("polyline")[place]
    pairs = [pair.split(",") for pair in polyline.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def titles(svg: ElementTree.Element, tag: str) -> list[str | None]:
    return [element.findtext("title") for element in svg.findall(tag)]


def test_known_values_lie_at_known_places() -> None:
    svg = parsed(Chart("Loss", "epoch", [Line("a", [(0, 0), (5, 25), (10, 100)])]))
    assert places(svg) == [
        (LEFT, FOOT),
        (LEFT + PLOT_WIDTH / 2, FOOT - PLOT_HEIGHT / 4),
        (RIGHT_END, TOP),
    ]


def test_the_given_range_of_x_moves_the_points() -> None:
    svg = parsed(Chart("Loss", "epoch", [Line("a", [(5, 0), (10, 100)])], x_range=(0, 20)))
    assert [x for x, _ in places(svg)] == [LEFT + PLOT_WIDTH / 4, LEFT + PLOT_WIDTH / 2]


def test_a_logarithmic_chart_spaces_decades_evenly() -> None:
    svg = parsed(Chart("Loss", "epoch", [Line("a", [(0, 1), (1, 10), (2, 100)])], log=True))
    assert [y for _, y in places(svg)] == [FOOT, FOOT - PLOT_HEIGHT / 2, TOP]


def test_from_zero_shows_the_foot() -> None:
    values = [(0.0, 1000.0), (1.0, 2000.0)]
    (_, high), _ = places(parsed(Chart("Speed", "epoch", [Line("a", values)], from_zero=True)))
    assert high == FOOT - PLOT_HEIGHT / 2


def test_each_point_tells_its_value() -> None:
    chart = Chart(
        "Accuracy", "epoch", [Line("top-1", [(1, 80), (2, 90)])], show_value=lambda v: f"{v:.1f} %"
    )
    assert titles(parsed(chart), "circle") == [
        "epoch 1: top-1 80.0 %",
        "epoch 2: top-1 90.0 %",
    ]


def test_a_dense_line_has_strips_instead_of_dots() -> None:
    points = [(float(x), float(x)) for x in range(600)]
    svg = parsed(Chart("Loss", "step", [Line("a", points), Line("b", points, colour=2)]))
    assert svg.findall("circle") == []
    strips = svg.findall("rect")
    assert 0 < len(strips) <= 75
    assert titles(svg, "rect")[0] == "step 0\na 7\nb 7"
    ends = [float(s.attrib["x"]) + float(s.attrib["width"]) for s in strips]
    assert max(ends) == pytest.approx(RIGHT_END, abs=0.2)


def test_everything_drawn_lies_inside_the_picture() -> None:
    lines = [Line("a", [(x, (x * 37) % 11 - 5) for x in range(50)])]
    svg = parsed(Chart("Loss", "step", lines))
    assert svg.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT}"
    assert all(LEFT <= x <= RIGHT_END and TOP <= y <= FOOT for x, y in places(svg))


def test_legend_names_lines_with_their_last_value_but_no_empty_ones() -> None:
    svg = parsed(
        Chart("Loss", "epoch", [Line("training", [(0, 2), (1, 1.5)]), Line("validation", [])])
    )
    legends = ["".join(t.itertext()) for t in svg.iter("text") if t.get("class") == "legend"]
    assert legends == ["training 1.5"]


def test_faint_lines_lie_behind_and_have_neither_dots_nor_a_last_value() -> None:
    bold, faint = Line("bold", [(0, 1), (1, 2)]), Line("raw", [(0, 1), (1, 3)], faint=True)
    svg = parsed(Chart("Loss", "epoch", [bold, faint]))
    assert [p.attrib["class"] for p in svg.findall("polyline")] == ["line c1 faint", "line c1"]
    assert len(svg.findall("circle")) == 2
    legends = ["".join(t.itertext()) for t in svg.iter("text") if t.get("class") == "legend"]
    assert legends == ["bold 2", "raw"]


def test_markers_stand_at_their_moment() -> None:
    marks = [Marker(5, "resumed at step 5"), Marker(10, "step 10 skipped", "skip")]
    svg = parsed(Chart("Loss", "epoch", [Line("a", [(0, 0), (10, 1)])], markers=marks))
    drawn = {p.attrib["class"]: p for p in svg.findall("path") if p.find("title") is not None}
    assert drawn["resume"].attrib["d"] == f"M{LEFT + PLOT_WIDTH / 2:.1f} {TOP}V{FOOT}"
    assert drawn["skip"].attrib["d"].startswith(f"M{RIGHT_END:.1f} {FOOT}")
    assert drawn["skip"].findtext("title") == "step 10 skipped"


def test_one_point_alone_is_seen() -> None:
    svg = parsed(Chart("Accuracy", "epoch", [Line("top-1", [(1, 50)])], x_range=(0, 1)))
    (circle,) = svg.findall("circle")
    assert float(circle.attrib["cx"]) == RIGHT_END
    assert TOP < float(circle.attrib["cy"]) < FOOT


def test_nothing_to_draw_says_so() -> None:
    svg = parsed(Chart("Accuracy", "epoch", [Line("top-1", [])]))
    assert [text.text for text in svg.findall("text")] == ["nothing recorded"]
    assert "nothing recorded" in svg.attrib["aria-label"]


def test_the_chart_speaks() -> None:
    svg = parsed(Chart("Loss", "epoch", [Line("training", [(0, 2.5), (1, 0.5)])]))
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "Loss by epoch: training from 2.5 to 0.5"


def test_names_are_escaped() -> None:
    hostile = '</svg><script>"&'
    text = line_chart(
        Chart(hostile, hostile, [Line(hostile, [(0, 1), (1, 2)])], markers=[Marker(0, hostile)])
    )
    assert "<script" not in text
    ElementTree.fromstring(text)


def test_colours_come_from_the_page() -> None:
    text = line_chart(Chart("Loss", "epoch", [Line("a", [(0, 1), (1, 2)], colour=2)]))
    assert "#" not in text
    assert "style=" not in text
    assert 'class="line c2"' in text


def test_a_line_without_a_name_is_drawn_and_told_of_nowhere() -> None:
    bold, seed = Line("mean", [(0, 1), (1, 2)]), Line("", [(0, 0), (1, 3)], faint=True)
    svg = parsed(Chart("Loss", "epoch", [seed, bold]))
    assert len(svg.findall("polyline")) == 2
    assert titles(svg, "rect") == ["epoch 0\nmean 1", "epoch 1\nmean 2"]
    legends = ["".join(t.itertext()) for t in svg.iter("text") if t.get("class") == "legend"]
    assert legends == ["mean 2"]


def test_a_chart_may_go_without_legend_and_a_line_may_be_dashed() -> None:
    line = Line("a", [(0, 1), (1, 2)], colour=3, dashed=True)
    svg = parsed(Chart("Loss", "epoch", [line], legend=False))
    assert [t for t in svg.iter("text") if t.get("class") == "legend"] == []
    assert svg.findall("polyline")[0].attrib["class"] == "line c3 dashed"
