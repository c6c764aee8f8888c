"""Many replays of the same sessions: one after another, or in several processes.

Each worker is a new interpreter. It gets the sessions once, and then one cell after the other
through its pipe; it sends back counts of turns, and outcomes. A worker whose parent is gone ends
at its next message. Only the parent handles Ctrl-C, and ends its workers however it ends. Workers
never get the signal: they are started with it blocked.

A replay depends only on its cell, so results do not depend on which process computed them, or when.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from kvd.plan.fleet import ONE_SERVER, FleetOptions
from kvd.plan.hardware import Hardware, ReplayOptions
from kvd.plan.outcome import Outcome
from kvd.plan.replay import replay
from kvd.plan.trace import Session, sampled
from shared.types.errors import ReportedError

JOIN_S = 10.0  # the longest wait for a worker to end
OnProgress = Callable[[int], None]


class WorkerEndedError(ReportedError):
    """A worker process ended before it sent its result."""

    reason = "worker_ended"


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay.

    Attributes:
        hardware, options, fleet: see kvd.plan.replay.replay.
        share: the share of the sessions that come to the replayed servers.
    """

    hardware: Hardware
    options: ReplayOptions
    fleet: FleetOptions = ONE_SERVER
    share: float = 1.0

    def replay(self, sessions: Sequence[Session], on_progress: OnProgress) -> Outcome:
        """Replay the cell's share of the sessions; progress counts turns of all sessions."""
        if self.share >= 1:
            return replay(sessions, self.hardware, self.options, on_progress, self.fleet)
        taken = sampled(sessions, self.share)
        part = _num_turns(taken) / _num_turns(sessions)
        options = replace(self.options, warmup_turns=round(self.options.warmup_turns * part))
        return replay(
            taken, self.hardware, options, lambda done: on_progress(round(done / part)), self.fleet
        )


def _num_turns(sessions: Sequence[Session]) -> int:
    return sum(len(session.turns) for session in sessions)


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process, as its parent sees it."""

    process: BaseProcess
    connection: Connection


def run_cells(
    sessions: Sequence[Session], cells: Sequence[Cell], num_workers: int, on_progress: OnProgress
) -> list[Outcome]:
    """Replay the sessions once for each cell; return the outcomes in the cells' order.

    Args:
        sessions: sessions in the order of their begin.
        cells: the replays.
        num_workers: processes; 1: only this one.
        on_progress: called now and then with the number of turns replayed, over all cells.

    Raises:
        WorkerEndedError: a worker was killed, or has a bug.
    """
    num_workers = min(num_workers, len(cells))
    if num_workers <= 1:
        return list(_run_here(sessions, cells, on_progress))
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # if it started later, it would unblock SIGINT again
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_worker(context, sessions, number)) for number in range(num_workers)
        ]
        return _run_in_workers(workers, cells, on_progress)


def _run_here(
    sessions: Sequence[Session], cells: Sequence[Cell], on_progress: OnProgress
) -> Iterator[Outcome]:
    num_turns = _num_turns(sessions)
    for index, cell in enumerate(cells):
        before = index * num_turns

        def on_turn(num_done: int, before: int = before) -> None:
            on_progress(before + num_done)

        yield cell.replay(sessions, on_turn)


def _run_in_workers(
    workers: Sequence[_Worker], cells: Sequence[Cell], on_progress: OnProgress
) -> list[Outcome]:
    """Give each idle worker a cell, until all outcomes are there."""
    waiting = iter(range(len(cells)))
    busy: dict[Connection, tuple[_Worker, int]] = {}
    num_done = [0] * len(cells)
    outcomes: dict[int, Outcome] = {}
    for worker in workers:
        _assign(worker, cells, waiting, busy)
    while busy:
        for ready in wait(list(busy)):
            connection = cast("Connection", ready)
            worker, index = busy[connection]
            found = _receive(worker)
            if isinstance(found, int):
                num_done[index] = found
                on_progress(sum(num_done))
            else:
                outcomes[index] = found
                del busy[connection]
                _assign(worker, cells, waiting, busy)
    return [outcomes[index] for index in range(len(cells))]


def _assign(
    worker: _Worker,
    cells: Sequence[Cell],
    waiting: Iterator[int],
    busy: dict[Connection, tuple[_Worker, int]],
) -> None:
    index = next(waiting, None)
    if index is None:
        return
    busy[worker.connection] = (worker, index)
    try:
        worker.connection.send(cells[index])
    except OSError as error:
        raise _ended_error(worker) from error


def _receive(worker: _Worker) -> int | Outcome:
    try:
        found: int | Outcome = worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _ended_error(worker) from error
    return found


def _ended_error(worker: _Worker) -> WorkerEndedError:
    worker.process.join(JOIN_S)
    return WorkerEndedError(
        f"a process of the plan ended with code {worker.process.exitcode}",
        "its output above may say why; if it was killed because memory was full, use --jobs 1",
    )


@contextmanager
def _worker(
    context: multiprocessing.context.SpawnContext, sessions: Sequence[Session], number: int
) -> Iterator[_Worker]:
    """Start a worker for the block inside, and end it afterwards."""
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_work, args=(theirs, sessions), name=f"kvd-plan-{number}", daemon=True
    )
    with ours:
        try:
            with theirs, _no_interrupts():
                process.start()
            yield _Worker(process, ours)
        finally:
            if process.pid is not None:
                process.terminate()
                process.join(JOIN_S)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Postpone Ctrl-C in the block inside; processes started there never get it.

    They inherit the blocked signal. Blocking is not enough in this process: numpy's threads would
    get the signal too, and an interrupted start would leave a process that nothing ends.
    """
    pending: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    usual = (
        signal.signal(signal.SIGINT, lambda number, _: pending.append(number)) if is_main else None
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, usual)
    if pending:
        raise KeyboardInterrupt


def _work(connection: Connection, sessions: Sequence[Session]) -> None:
    """Replay each cell that the parent sends, until the parent closes the connection."""
    try:
        while True:
            cell: Cell = connection.recv()
            connection.send(cell.replay(sessions, connection.send))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
