"""Pictures, and errors where none can be drawn."""

import sys

import pytest

from shared.measuring.plots import NoPlotError, check_plot, picture


def _draw(path):
    with picture(path, 1, 2, figsize=(4, 2)) as (figure, axes):
        figure.suptitle("a title")
        for each in axes:
            each.plot([1, 2], [1, 2])
    return path.read_bytes()


@pytest.mark.parametrize("name", ["found.png", "found.svg"])
def test_the_files_name_determines_the_format(tmp_path, name):
    """And equal figures give equal files."""
    check_plot(tmp_path / name)
    first = _draw(tmp_path / name)
    assert first.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")
    assert _draw(tmp_path / name) == first


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none/found.png", "does not exist"),
        ("found.txt", "unknown file type"),
        (".", "a directory"),
    ],
)
def test_an_unwritable_picture_is_refused_before_measuring(tmp_path, name, problem):
    """With a remedy."""
    with pytest.raises(NoPlotError, match=problem) as raised:
        check_plot(tmp_path / name)
    assert raised.value.remedy


def test_an_unknown_format_is_refused_when_drawing_too(tmp_path):
    """Without a traceback."""
    with pytest.raises(NoPlotError, match=r"\.png"):
        _draw(tmp_path / "found.nonsense")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_remedy_names_it(tmp_path, monkeypatch):
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoPlotError, match=r"cachedattention\[bench\]"):
        check_plot(tmp_path / "found.png")
