"""Pictures of reports. They need matplotlib, which is imported when one is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.types.errors import ConfigError

DOTS_PER_INCH = 120


class NoPlotError(ConfigError):
    """matplotlib is missing, or the picture cannot be written."""

    reason = "no_plot"


def check_plot(path: Path) -> None:
    """Raise NoPlotError if a picture could not be written: checked before minutes of measuring."""
    pyplot = load_pyplot()
    if path.is_dir():
        raise NoPlotError(f"--plot {path} is a directory", "give the path of a file")
    if not path.resolve().parent.is_dir():
        raise NoPlotError(
            f"the directory {path.parent} of --plot does not exist",
            "give a file in an existing directory",
        )
    figure = pyplot.figure()
    formats = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    if path.suffix.removeprefix(".") not in formats:
        raise NoPlotError(f"--plot {path} has an unknown file type", "give a .png or .svg file")


@contextmanager
def picture(path: Path, rows: int, columns: int, **how: Any) -> Iterator[tuple[Any, Any]]:
    """Make a figure and its axes, and write the picture when the block has drawn them.

    Args:
        path: the file; its suffix determines the format.
        rows: number of rows of axes.
        columns: number of columns of axes.
        how: further arguments of `pyplot.subplots`.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(rows, columns, layout="constrained", **how)
    try:
        yield figure, axes
        # Text stays text, and equal pictures give equal files.
        is_svg = path.suffix == ".svg"
        with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "measured"}):
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Date": None} if is_svg else None)
    except (OSError, ValueError) as error:
        raise NoPlotError(
            f"the plot {path} cannot be written ({error})", "give a .png file"
        ) from error
    finally:
        pyplot.close(figure)


def load_pyplot() -> Any:
    """Import matplotlib's pyplot, for pictures in files. Raise NoPlotError if it is missing."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise NoPlotError(
            "--plot needs matplotlib, which is not installed",
            "run: pip install 'cachedattention[bench]'; or leave out --plot",
        ) from error
    mpl.use("agg")  # no display is needed
    from matplotlib import pyplot as plt

    return plt
