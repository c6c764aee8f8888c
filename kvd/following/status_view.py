"""What a follower says of itself, for people. Pure."""

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from kvd.following.status import FollowerStatus
from shared.terminal.printing import counted
from shared.types.units import format_bytes, format_duration

_STORE = {None: "was not asked yet", True: "answers", False: "FAILS"}


def status_table(status: FollowerStatus, now_unix_s: float) -> Table:
    """Return it as lines of a word, and what there is to say of it."""
    table = Table.grid(padding=(0, 2))
    for word, said in _lines(status, now_unix_s):
        table.add_row(word, Text(said))
    return table


def _lines(status: FollowerStatus, now_unix_s: float) -> Iterator[tuple[str, str]]:
    def ago(unix_s: float) -> str:
        return format_duration(max(0.0, now_unix_s - unix_s))

    age, said = ago(status.started_unix_s), ago(status.unix_s)
    yield "follower", f"pid {status.pid}, runs for {age}; it said this {said} ago"
    yield "kvd", "is followed" if status.kvd_up else "DOES NOT ANSWER"
    is_off = "none: remote.url is not set"
    yield "store", f"{status.url} {_STORE[status.store_up]}" if status.url else is_off
    oldest = f", the oldest for {format_duration(status.oldest_s)}" if status.oldest_s else ""
    yield "to push", f'{counted(status.num_unpushed, "session")}{oldest} (write: "{status.write}")'
    yield "to drop", counted(status.num_drops, "session")
    fetched = f"{counted(status.num_wanted, 'session')}, {status.num_pulling} under way"
    yield "to fetch", f"{fetched} (pull: {'on' if status.pull else 'off'})"
    yield "pushes", _counts(status.pushes)
    yield "pulls", _counts(status.pulls)
    yield "drops", _counts(status.drops)
    yield "bytes", ", ".join(f"{format_bytes(n)} {way}" for way, n in status.num_bytes.items())
    yield "requests", _counts(status.requests)
    for failure in reversed(status.failures):
        yield "failure", f"{ago(failure.unix_s)} ago, {failure.event}: {failure.why}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {word}" for word, count in counts.items()) or "none"
