"""All figures in one call: draw the sessions, run the replays, make the tables."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.plan.paper import ablations, end_to_end
from kvd.plan.paper.runs import Run, Sample, Workload, cell_of, sessions_of
from kvd.plan.paper.tables import PaperReport
from kvd.plan.sweep import run_cells
from kvd.plan.trace import Session

if TYPE_CHECKING:
    from kvd.plan.outcome import Outcome

_FIGURES = (end_to_end, ablations)


def all_runs() -> tuple[Run, ...]:
    """Return the replays that all figures need, each once."""
    return tuple(dict.fromkeys(run for figures in _FIGURES for run in figures.runs()))


class Reproduction:
    """All replays of one sample.

    Attributes:
        num_turns: number of turns to replay.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._runs: dict[Workload, list[Run]] = {}
        for run in all_runs():
            self._runs.setdefault(run.workload, []).append(run)
        self._sessions = {workload: sessions_of(workload, sample) for workload in self._runs}
        self.num_turns = sum(
            len(runs) * _num_turns(self._sessions[workload])
            for workload, runs in self._runs.items()
        )

    def make(self, num_workers: int, on_progress: Callable[[int], None]) -> PaperReport:
        """Run all replays, and return the tables.

        Args:
            num_workers: processes; 1: only this one.
            on_progress: called with the number of turns replayed.

        Raises:
            WorkerEndedError: a worker was killed, or has a bug.
        """
        outcomes: dict[Run, Outcome] = {}
        num_before = 0
        for workload, runs in self._runs.items():
            sessions = self._sessions[workload]

            def on_turn(num_done: int, num_before: int = num_before) -> None:
                on_progress(num_before + num_done)

            cells = [cell_of(run, self._sample) for run in runs]
            found = run_cells(sessions, cells, num_workers, on_turn)
            outcomes.update(zip(runs, found, strict=True))
            num_before += len(runs) * _num_turns(sessions)
        tables = [table for figures in _FIGURES for table in figures.tables(outcomes.__getitem__)]
        return PaperReport(self._sample, len(outcomes), self.num_turns, tuple(tables))


def _num_turns(sessions: list[Session]) -> int:
    return sum(len(session.turns) for session in sessions)
