"""Pictures, and what is said where there can be none."""

import sys

import pytest

from shared.measuring.plots import NoPlotError, check_plot, picture


def _drawn(path):
    with picture(path, 1, 2, figsize=(4, 2)) as (figure, axes):
        figure.suptitle("a title")
        for each in axes:
            each.plot([1, 2], [1, 2])
    return path.read_bytes()


@pytest.mark.parametrize("name", ["found.png", "found.svg"])
def test_the_file_s_name_says_the_format(tmp_path, name):
    """And the same figures are the same file."""
    check_plot(tmp_path / name)
    first = _drawn(tmp_path / name)
    assert first.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")
    assert _drawn(tmp_path / name) == first


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none/found.png", "does not exist"),
        ("found.txt", "unknown file type"),
        (".", "a directory"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, name, problem):
    """With a remedy."""
    with pytest.raises(NoPlotError, match=problem) as raised:
        check_plot(tmp_path / name)
    assert raised.value.remedy


def test_an_unknown_format_is_refused_when_it_is_drawn_too(tmp_path):
    """Without a trace of it."""
    with pytest.raises(NoPlotError, match=r"\.png"):
        _drawn(tmp_path / "found.nonsense")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_remedy_says_how_to_get_it(tmp_path, monkeypatch):
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoPlotError, match=r"cachedattention\[bench\]"):
        check_plot(tmp_path / "found.png")
