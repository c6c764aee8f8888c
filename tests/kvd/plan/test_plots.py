"""The page and the picture of a plan."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvd.plan.plots import capacity_ticks, charts, check_plot, page, plot, ticks
from shared.measuring.plots import NoPlotError
from tests.kvd.plan.plans import plan, result, swept

SVG = "{http://www.w3.org/2000/svg}"


def _pictures(text):
    return [ET.fromstring(found) for found in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)]  # noqa: S314


class _Words(HTMLParser):
    """The cells of the page's tables."""

    def __init__(self, text):
        super().__init__()
        self.cells = []
        self._is_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._is_cell = tag in {"td", "th"}

    def handle_data(self, data):
        if self._is_cell:
            self.cells.append(data)


def test_the_page_is_self_contained():
    """Nothing is loaded from elsewhere, and outside data is escaped."""
    text = page(swept())
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|src=", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<b>" not in text
    assert "a&lt;b&gt;.jsonl" in text


def test_the_page_has_both_charts():
    """A line per policy, all points, the knees ringed, and the line of recomputing."""
    hits, costs = _pictures(page(swept()))
    assert len(hits.findall(f"{SVG}polyline")) == 2
    points = [each for each in hits.iter(f"{SVG}circle") if each.get("class") != "mark"]
    assert len(points) == 8
    rings = [each for each in hits.iter(f"{SVG}circle") if each.get("class") == "mark"]
    places = {(each.get("cx"), each.get("cy")) for each in points}
    assert {(each.get("cx"), each.get("cy")) for each in rings} < places
    titles = [each.text for each in hits.iter(f"{SVG}title")]
    assert "lru, 8 GB + 120 GB: 60.0% of tokens, 0.0% of later turns, queue 37 (knee)" in titles
    assert any("recomputing" in (each.text or "") for each in costs.iter(f"{SVG}text"))
    cheapest = [each.text for each in costs.iter(f"{SVG}title") if "(cheapest)" in each.text]
    assert cheapest[0] == "lru, 16 GB + 240 GB: 5.50, 55.0% of RE's (cheapest)"


def test_axes_grow_to_the_right_and_upwards():
    """Capacities to the right, hit rates upwards, within the picture."""
    hits, _ = _pictures(page(swept()))
    path = hits.find(f"{SVG}polyline").get("points")
    places = [tuple(map(float, each.split(","))) for each in path.split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert all(0 < x < 760 and 0 < y < 360 for x, y in places)


def test_the_page_has_the_tables():
    """They are the terminal's."""
    cells = _Words(page(swept())).cells
    for cell in ("DRAM + SSD", "GPU time", "60.0%", "8 GB + 120 GB", "1.25", "RE"):
        assert cell in cells


def test_one_capacity_can_be_drawn():
    """A single point, even without memory, has a place."""
    for sizes in ((8, 100), (0, 0)):
        hits, _ = _pictures(page(plan(result("lru", *sizes, 0.5, 4.0))))
        assert len(list(hits.iter(f"{SVG}circle"))) == 1


@pytest.mark.parametrize(("smallest", "is_log"), [(512 // 8, True), (512 // 4, False)])
def test_wide_sweeps_have_a_logarithmic_axis(smallest, is_log):
    """From eight times the smallest capacity on."""
    results = [result("lru", 0, size, 0.5, 1.0) for size in (smallest, 512)]
    assert {chart.is_log for chart in charts(plan(*results))} == {is_log}


def test_free_gpus_have_a_chart():
    """All costs are zero: their axis still has a length."""
    free = plan(result("lru", 8, 100, 0.5, 0.0))
    _, costs = charts(free)
    assert costs.top > 0


@pytest.mark.parametrize(
    ("low", "high", "is_log", "found"),
    [
        (0.0, 100.0, False, [0, 20, 40, 60, 80, 100]),
        (0.0, 17.8, False, [0, 5, 10, 15]),
        (3.0, 60.0, True, [5, 10, 20, 50]),
    ],
)
def test_ticks_are_round(low, high, is_log, found):
    """1, 2 or 5 times powers of ten."""
    assert list(ticks(low, high, is_log=is_log)) == pytest.approx(found)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.15, 0.9, ["200 MB", "500 MB"]),
        (30.0, 600.0, ["50 GB", "100 GB", "200 GB", "500 GB"]),
        (900.0, 10300.0, ["1 TB", "2 TB", "5 TB", "10 TB"]),
    ],
)
def test_capacities_are_labelled_in_their_units(low, high, labels):
    """Round in that unit."""
    found = capacity_ticks(low, high, is_log=True)
    assert [label for _, label in found] == labels
    assert all(low <= place <= high for place, _ in found)


@pytest.mark.parametrize("name", ["plan.png", "plan.svg", "plan.html"])
def test_the_files_name_determines_the_format(tmp_path: Path, name):
    """A picture by matplotlib, or a page."""
    path = tmp_path / name
    check_plot(path)
    plot(swept(), path)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}
    assert path.read_bytes().startswith(begins[path.suffix.removeprefix(".")])


@pytest.mark.parametrize("name", ["none/plan.html", "plan.txt", "plan", "."])
def test_an_unwritable_file_is_refused_before_planning(tmp_path: Path, name):
    """Minutes of replaying are not lost."""
    with pytest.raises(NoPlotError) as raised:
        check_plot(tmp_path / name)
    assert raised.value.exit_code == 78
    assert raised.value.remedy
