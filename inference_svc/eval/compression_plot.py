"""A report of part `compression` as a picture; needs matplotlib."""

from pathlib import Path
from typing import Any

from inference_svc.eval.figures import CompressedQuality, CompressionReport
from shared.measuring.plots import picture
from shared.measuring.statistics import Interval


def plot(report: CompressionReport, model: str, path: Path) -> None:
    """Write the picture; its format follows from the file's name.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    with picture(path, 1, 3, figsize=(12, 4)) as (figure, axes):
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
