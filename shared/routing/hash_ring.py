"""Consistent hashing: a session's server depends on the names of both, and nothing else. Pure.

Each server has its points on a ring; a session belongs to the server of the first point behind its
own. So every router that knows the same servers gives the same answer, without a word between them,
and of N servers one that comes or goes moves 1/N of the sessions, and no other.

*Source:* Karger et al., Consistent Hashing and Random Trees (STOC 1997).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from xxhash import xxh3_64_intdigest

POINTS = 160  # of each server: shares of the sessions then differ by 8 % of a share (one deviation)


def name_hash(name: str) -> int:
    """Return 64 bits that stand for the name of a session or a point."""
    return xxh3_64_intdigest(name.encode())


class HashRing:
    """The servers' points, in order."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._servers: frozenset[str] = frozenset()
        self._points: list[tuple[int, str]] = []
        self.set_servers(servers)

    @property
    def servers(self) -> frozenset[str]:
        """Names of the servers that have points."""
        return self._servers

    def set_servers(self, servers: Iterable[str]) -> None:
        """Have these servers, and no others; what stays keeps its sessions."""
        wanted = frozenset(servers)
        if self._servers - wanted:
            self._points = [point for point in self._points if point[1] in wanted]
        if new := wanted - self._servers:
            self._points += [
                (name_hash(f"{server}/{i}"), server) for server in new for i in range(POINTS)
            ]
            self._points.sort()
        self._servers = wanted

    def owners(self, session: str) -> Iterator[str]:
        """Yield each server once, the session's own first: who has it if those before are gone."""
        start = bisect_right(self._points, (name_hash(session), ""))
        seen: set[str] = set()
        for index in range(len(self._points)):
            server = self._points[(start + index) % len(self._points)][1]
            if server not in seen:
                seen.add(server)
                yield server
