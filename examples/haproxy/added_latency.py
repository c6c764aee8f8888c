"""How much later an answer comes through the balancer: two addresses, asked in turns.

    python examples/haproxy/added_latency.py https://10.0.0.11:8000 https://balancer.example \
        --direct-ca servers-ca.pem --balanced-ca balancer-ca.pem --token-file acme.token

Needs Python's standard library alone. Each address has one connection that is kept; the first
requests of each, by which it is opened, do not count. `/v1/models` costs the service next to
nothing; with --model NAME a turn of one token is asked for, whose own time varies by more than is
added.
"""

import argparse
import json
import ssl
import statistics
import sys
import time
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

NUM_OPENING = 5


class Asked:
    """One address, and how long it took to answer, in seconds."""

    def __init__(self, url: str, authority: str | None, token: str, model: str) -> None:
        parts = urlsplit(url)
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=authority)
            context.check_hostname = authority is None  # an address is asked, not a name
            self._connection: HTTPConnection = HTTPSConnection(parts.netloc, context=context)
        else:
            self._connection = HTTPConnection(parts.netloc)
        self._headers = {"X-Session-Id": "added-latency", "Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._model = model
        self.times_s: list[float] = []

    def ask(self) -> None:
        """Ask once, and note how long it took."""
        body = None
        if self._model:
            messages = [{"role": "user", "content": "How long does this take?"}]
            body = json.dumps({"model": self._model, "messages": messages, "max_tokens": 1})
        begun_s = time.perf_counter()
        path = "/v1/chat/completions" if body else "/v1/models"
        self._connection.request("POST" if body else "GET", path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        self.times_s.append(time.perf_counter() - begun_s)
        if response.status != 200:
            sys.exit(f"{path} answered {response.status}: {answer[:300].decode(errors='replace')}")


def main() -> None:
    """Ask both in turns, and print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("direct", help="the address of a service")
    parser.add_argument("balanced", help="the balancer's")
    parser.add_argument("--direct-ca", help="who signed the service's certificate, PEM")
    parser.add_argument("--balanced-ca", help="who signed the balancer's certificate, PEM")
    parser.add_argument("--token-file", type=Path, help="a client's token")
    parser.add_argument("--model", default="", help="ask for a turn of this model")
    parser.add_argument("--count", type=int, default=500, help="requests to each")
    given = parser.parse_args()
    token = given.token_file.read_text().strip() if given.token_file else ""
    direct = Asked(given.direct, given.direct_ca, token, given.model)
    balanced = Asked(given.balanced, given.balanced_ca, token, given.model)
    for _ in range(NUM_OPENING + given.count):
        direct.ask()
        balanced.ask()
    medians_ms = []
    for name, asked in (("direct", direct), ("balanced", balanced)):
        counted = sorted(1000 * time_s for time_s in asked.times_s[NUM_OPENING:])
        medians_ms.append(statistics.median(counted))
        p90 = counted[int(0.9 * (len(counted) - 1))]
        print(f"{name:9} median {medians_ms[-1]:7.2f} ms   90 % below {p90:7.2f} ms")
    print(f"added     median {medians_ms[1] - medians_ms[0]:7.2f} ms")


if __name__ == "__main__":
    main()
