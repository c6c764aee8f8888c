"""Screens and reports of slow or machine-dependent commands, from fixed facts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from rich.console import Console, RenderableType
from rich.text import Text

from inference_svc.bench.report import tables as engine_bench_tables
from inference_svc.cli.top import FOOTER_LINES, KEYS, top_lines
from inference_svc.demo.report import closing_words, summarise, turn_table
from inference_svc.eval.report import tables as eval_tables
from kvd.bench.report import tables as kvd_bench_tables
from kvd.cli.doctor import print_findings
from kvd.cli.remote import status_table
from kvd.doctor.finding import ok, problem, warning
from kvd.plan.report import tables as plan_tables
from kvd.top.screen import Screen
from kvd.top.views import Snapshot, points, top_view
from shared.pb.inference.v1 import inference_pb2
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal import printing
from tests.cli import fixed_kvd, fixed_reports

NUM_LOOKS = 60
NOW_S = fixed_reports.FOLLOWER.unix_s + 2
HEIGHTS = {80: 24, 120: 40}  # columns of terminals, by their lines


def _tables(made: Callable[[int], Iterator[RenderableType]]) -> Callable[[], None]:
    """Return a command that prints tables one after another."""

    def show() -> None:
        console = printing.console()
        for table in made(console.width):
            console.print(table)
            console.print()

    return show


def _doctor() -> None:
    print_findings(
        [
            ok("state_dir", "state directory /var/lib/kvd"),
            warning(
                "huge_pages",
                "shared memory gets no huge pages (shmem_enabled is never), so copies of large "
                "histories are slower",
                "run: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            ),
            problem(
                "memlock",
                "an engine on a GPU has to lock the arena (16.0 MB) in memory, but its "
                "limit is 8.0 MB",
                "raise the limit: LimitMEMLOCK=infinity in the engine's unit",
            ),
        ]
    )


def _stats(number: int) -> kvd_pb2.GetStatsResponse:
    """Return kvd's statistics of a sample, two seconds after the previous one."""
    stats = kvd_pb2.GetStatsResponse()
    stats.CopyFrom(fixed_kvd.STATS)
    stats.process.uptime_s += 2 * number
    counters = stats.layouts[0].counters
    counters["load_hits"] += sum(3 + look % 5 for look in range(number))
    counters["load_misses"] += sum(look % 3 for look in range(number))
    counters["load_tokens_dram"] += sum(1000 * (look % 7) for look in range(number))
    counters["ssd_read_bytes"] += sum((look % 11) << 20 for look in range(number))
    return stats


def _kvd_top(screen: Screen) -> Callable[[], None]:
    def show() -> None:
        stats = [_stats(number) for number in range(NUM_LOOKS)]
        looks = [points(now, before) for before, now in pairwise(stats)]
        sessions = list(fixed_kvd.SESSIONS)
        detail = kvd_pb2.DescribeSessionResponse(info=sessions[0], history=fixed_kvd.MOVES)
        seen = Snapshot(stats[-1], stats[-2], looks, sessions, len(sessions), detail)
        width = printing.console().width
        console = Console(width=width, height=HEIGHTS[width], highlight=False)
        console.print(top_view(seen, screen, width, HEIGHTS[width]))

    return show


def _service_top() -> None:
    looks = []
    for number in range(NUM_LOOKS):
        look = inference_pb2.Model()
        look.CopyFrom(fixed_kvd.SERVED)
        look.running_turns = number % 4
        look.gauges["uptime_s"] += 2 * number
        look.gauges["timed_turns"] = 3 * number
        look.gauges["ttft_total_s"] = 0.3 * number + 0.01 * (number % 9)
        for name, step in (("output_tokens", 60), ("turns_finished", 3), ("reused_tokens", 900)):
            look.counters[name] += step * number + number % 6
        look.counters["history_tokens"] += 1000 * number
        looks.append(look)
    console = printing.console()
    console.print(
        Text("\n".join([*top_lines(looks, console.width, console.height - FOOTER_LINES), "", KEYS]))
    )


def _demo() -> None:
    console = printing.console()
    console.print(turn_table(fixed_reports.DEMO))
    console.print(closing_words(summarise(fixed_reports.DEMO)), highlight=False)


VIEWS: dict[str, Callable[[], None]] = {
    "kvd-bench": _tables(lambda width: kvd_bench_tables(fixed_reports.KVD_BENCH, width)),
    "kvd-plan": _tables(lambda _: plan_tables(fixed_reports.planned())),
    "kvd-doctor": _doctor,
    "kvd-remote-status": _tables(lambda _: iter([status_table(fixed_reports.FOLLOWER, NOW_S)])),
    "kvd-top": _kvd_top(Screen()),
    "kvd-top-session": _kvd_top(Screen(shows_session=True)),
    "kvd-top-keys": _kvd_top(Screen(shows_help=True)),
    "inference-svc-top": _service_top,
    "inference-svc-bench": _tables(
        lambda width: engine_bench_tables(fixed_reports.ENGINE_BENCH, width)
    ),
    "inference-svc-demo": _demo,
    **{
        f"inference-svc-eval-{report.part}": _tables(partial(eval_tables, report))
        for report in (
            fixed_reports.PERPLEXITY,
            fixed_reports.RETRIEVAL,
            fixed_reports.ROTATION,
            fixed_reports.COMPRESSION,
            fixed_reports.EDITS,
        )
    },
}
ONLY_ON_TERMINALS = frozenset(name for name in VIEWS if "-top" in name)
