"""Consistent hashing: a session's server depends on the names of both, and nothing else. Pure.

Each server has its points on a ring. A session belongs to the server of the first point after its
own. So all routers with the same servers choose alike, without talking to each other. If one of N
servers comes or goes, 1/N of the sessions move, and no others.

*Source:* Karger et al., Consistent Hashing and Random Trees (STOC 1997).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from xxhash import xxh3_64_intdigest

POINTS = 160  # per server; shares of the sessions then have a standard deviation of 8 %


def name_hash(name: str) -> int:
    """Return a 64-bit hash of the name of a session or a point."""
    return xxh3_64_intdigest(name.encode())


class HashRing:
    """The points of all servers, in order."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._servers: frozenset[str] = frozenset()
        self._points: list[tuple[int, str]] = []
        self.set_servers(servers)

    @property
    def servers(self) -> frozenset[str]:
        """Names of the servers that have points."""
        return self._servers

    def set_servers(self, servers: Iterable[str]) -> None:
        """Replace the servers. Those that stay keep their sessions."""
        names = frozenset(servers)
        if self._servers - names:
            self._points = [point for point in self._points if point[1] in names]
        if new := names - self._servers:
            self._points += [
                (name_hash(f"{server}/{i}"), server) for server in new for i in range(POINTS)
            ]
            self._points.sort()
        self._servers = names

    def owners(self, session: str) -> Iterator[str]:
        """Yield each server once: the session's own first, then those that get it if it is gone."""
        start = bisect_right(self._points, (name_hash(session), ""))
        seen: set[str] = set()
        for index in range(len(self._points)):
            server = self._points[(start + index) % len(self._points)][1]
            if server not in seen:
                seen.add(server)
                yield server
