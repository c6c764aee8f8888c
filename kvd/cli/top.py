"""The command `kvd top`: a live view of a running kvd."""

import sys
import time
from typing import Any

from kvd.cli.filters import (
    ORDERS,
    Ended,
    Idle,
    Interval,
    InTier,
    LargerThan,
    OfTenant,
    Pinned,
    Reverse,
    Sort,
    SortName,
    filter_of,
    interval_s,
)
from kvd.cli.options import AsJson, OfModel, RuntimeDir, print_json
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from kvd.errors import NoTerminalError
from kvd.top.loop import MOST_SESSIONS, Top
from kvd.top.screen import Screen, starts_reversed
from kvd.views.views import Rates
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal import printing


def top(
    tenant: OfTenant = None,
    model: OfModel = None,
    tier: InTier = None,
    idle: Idle = None,
    larger_than: LargerThan = None,
    pinned: Pinned = False,
    ended: Ended = False,
    sort: Sort = SortName.IDLE,
    reverse: Reverse = False,
    interval: Interval = "2s",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Watch tiers, hit rates, queues, engines and sessions, live.

    Keys: arrows choose a session, Enter shows it, f flushes, p pins, u unpins (each asks first),
    i, b, t, e sort by last use, bytes, tokens, expiry, r reverses, Space holds still, h helps,
    q quits. Without a terminal --json prints one document, with the rates of one interval.
    """
    filter_ = filter_of(tenant, model, tier, idle, larger_than, pinned=pinned, ended=ended)
    every_s = interval_s(interval)
    order = ORDERS[sort]
    screen = Screen(order=order, is_reversed=reverse != starts_reversed(order))
    with open_client(runtime_dir) as client:
        if as_json:
            print_json(_snapshot(client, filter_, screen, every_s))
        elif _is_terminal():
            Top(client, filter_, screen, every_s).run(printing.console())
        else:
            raise NoTerminalError(
                "kvd top needs a terminal that can move its cursor",
                "add --json to print the state once, or run: kvd stats --watch",
            )


def _is_terminal() -> bool:
    """Return whether a screen can be shown; on a dumb terminal the user would not see it."""
    has_both = sys.stdin.isatty() and sys.stdout.isatty()
    return has_both and not printing.console().is_dumb_terminal


def _snapshot(
    client: OperatorClient, filter_: kvd_pb2.SessionFilter, screen: Screen, every_s: float
) -> dict[str, Any]:
    """Return, as a document, what the screen would show after its first interval."""
    before = client.stats()
    time.sleep(every_s)
    stats = client.stats()
    listing = (MOST_SESSIONS, screen.order)
    sessions, total, _ = client.sessions(filter_, *listing, reverse=screen.is_reversed)
    rates = Rates(stats, before)
    return {
        "stats": printing.plain(stats),
        "interval_s": rates.seconds,
        "rates": [_rates(layout, rates) for layout in stats.layouts],
        "sessions": [printing.plain(info) for info in sessions],
        "total": total,
    }


def _rates(layout: kvd_pb2.LayoutStats, rates: Rates) -> dict[str, Any]:
    key = layout.layout
    return {
        "layout": key,
        "hit_rate": rates.share(key, "load_hits", "load_misses"),
        "per_second": {name: rates.per_second(key, name) for name in sorted(layout.counters)},
    }
