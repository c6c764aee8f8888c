"""A report of part `compression` as a picture; needs matplotlib."""

from pathlib import Path
from typing import Any

from inference_svc.bench.plot import NoPlotError, check_plot, load_pyplot
from inference_svc.eval.figures import CompressedQuality, CompressionReport
from inference_svc.eval.intervals import Interval

NO_DATE = {"Date": None}  # the same figures are the same file

__all__ = ["check_plot", "plot"]


def plot(report: CompressionReport, model: str, path: Path) -> None:
    """Write the picture; its format follows from the file's name.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    figure.suptitle(
        f"inference-svc eval compression: {model}, contexts of {report.context_tokens} tokens"
    )
    whole, *others = report.rows
    for policy in dict.fromkeys(row.policy for row in others):
        rows = [whole, *(row for row in others if row.policy == policy)]
        _draw(axes[0], rows, policy, [row.to_whole for row in rows])
        _draw(axes[1], rows, policy, [row.asked_before for row in rows])
        _draw(axes[2], rows, policy, [row.asked_after for row in rows])
    axes[0].set_ylabel("perplexity behind it, to the whole's")
    axes[1].set_ylabel("right answers, asked before")
    axes[2].set_ylabel("right answers, asked after")
    for each in axes:
        each.set_xlabel("KV kept")
        each.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    try:
        with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "compression"}):
            figure.savefig(path, dpi=120, metadata=NO_DATE if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise NoPlotError(f"{path} cannot be written ({error})", "name a .png file") from error
    finally:
        pyplot.close(figure)


def _draw(axes: Any, rows: list[CompressedQuality], policy: str, figures: list[Interval]) -> None:
    """One policy's line, with its intervals."""
    axes.errorbar(
        [row.kept for row in rows],
        [figure.value for figure in figures],
        yerr=[
            [figure.value - figure.low for figure in figures],
            [figure.high - figure.value for figure in figures],
        ],
        label=policy,
        marker="o",
        capsize=2,
    )
