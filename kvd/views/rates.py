"""What was counted between two looks at a kvd, by its own clock. Pure."""

from collections.abc import Mapping

from shared.pb.kvd.v1 import kvd_pb2


class Rates:
    """Differences of two statistics.

    Without an earlier one, or if kvd was restarted between them, everything since its start.

    Attributes:
        seconds: between them.
        is_of_interval: whether they are of the time between two looks, not since the start.
    """

    def __init__(
        self, now: kvd_pb2.GetStatsResponse, before: kvd_pb2.GetStatsResponse | None = None
    ) -> None:
        self.is_of_interval = (
            before is not None
            and before.process.pid == now.process.pid
            and before.process.uptime_s < now.process.uptime_s
        )
        earlier = before if before is not None and self.is_of_interval else None
        self.seconds = now.process.uptime_s - (earlier.process.uptime_s if earlier else 0.0)
        self._cpu_s = now.process.cpu_s - (earlier.process.cpu_s if earlier else 0.0)
        self._now = _counters(now)
        self._before = _counters(earlier) if earlier else {}

    def count(self, layout: str, counter: str) -> int:
        """How much was counted."""
        now = self._now.get(layout, {}).get(counter, 0)
        return now - self._before.get(layout, {}).get(counter, 0)

    def per_second(self, layout: str, *counters: str) -> float:
        """How much of them together a second."""
        count = sum(self.count(layout, counter) for counter in counters)
        return count / self.seconds if self.seconds > 0 else 0.0

    def share(self, layout: str, part: str, rest: str) -> float | None:
        """A part of the whole; None: there is nothing of either."""
        num_part = self.count(layout, part)
        whole = num_part + self.count(layout, rest)
        return num_part / whole if whole else None

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self._cpu_s / self.seconds if self.seconds > 0 else 0.0


def _counters(stats: kvd_pb2.GetStatsResponse) -> dict[str, Mapping[str, int]]:
    return {layout.layout: layout.counters for layout in stats.layouts}
