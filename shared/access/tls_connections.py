"""TLS connections to gRPC's servers on which nobody ever called.

gRPC tells nobody of a handshake that fails. What it does tell: that a connection begins, when it
asks for the certificates, and each call's peer. A connection on which no call has come within
CALL_S has failed its handshake (a client without a certificate, one that does not trust ours,
something that does not speak TLS), or is of somebody who only knocks: gRPC's clients connect to
call. So the count is of failures, give or take a client that connected long before it called.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from shared.access.refusals import RefusalLog

CALL_S = 15.0  # gRPC ends a handshake after 10 s: shared/access/server_options.py
MAX_PEERS = 4096  # remembered: more than may be connected


class TlsConnections:
    """Of all ports of a process; for any thread."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._begun: deque[float] = deque()  # without a call yet, oldest first
        self._called: OrderedDict[str, None] = OrderedDict()  # peers, the last one to call last
        self._num_unused = 0
        self._log = RefusalLog("tls_connection_unused")

    def begun(self) -> None:
        """Note that a connection begins."""
        with self._lock:
            self._begun.append(self._clock_s())
        self.count_unused()

    def called(self, peer: str) -> None:
        """Note a call; `peer` is as gRPC names it, another one for each connection."""
        with self._lock:
            is_new = peer not in self._called
            self._called[peer] = None
            self._called.move_to_end(peer)
            if len(self._called) > MAX_PEERS:
                self._called.popitem(last=False)
            if is_new and self._begun:
                self._begun.pop()  # the newest: calls come right after their handshake

    def count_unused(self) -> int:
        """How many connections had no call in their time, so far."""
        with self._lock:
            until_s = self._clock_s() - CALL_S
            before = self._num_unused
            while self._begun and self._begun[0] <= until_s:
                self._begun.popleft()
                self._num_unused += 1
            num_new = self._num_unused - before
        if num_new:
            self._log.note("no_call", connections=str(num_new))
        return self._num_unused
