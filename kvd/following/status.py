"""What a follower says of itself: a file that it writes anew every few seconds, and its readers.

It is in the runtime directory that systemd gives the follower, else in kvd's own. Whoever gets
there may read it: it has numbers, reasons and the store's own words, and nothing of sessions. It
goes with the follower; one that was killed leaves it, but its process is not there then, and its
time is old.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvd.errors import NotFollowedError

FILE = "remote-status.json"
FRESH_S = 30.0  # kvd-remote.service's watchdog: one that is silent for so long is ended, too
_READABLE = 0o644


@dataclass(frozen=True)
class Failure:
    """Something that went wrong.

    Attributes:
        unix_s: when.
        event: of the log, which has more.
        why: the reason, or the store's own words.
    """

    unix_s: float
    event: str
    why: str


@dataclass(frozen=True)
class FollowerStatus:
    """What a follower does; ages in seconds are of the moment `unix_s`.

    Attributes:
        pid: of its process.
        started_unix_s, unix_s: when it began, and when it said this.
        url: of the store; "": none.
        write: what it pushes: none, drain, evicted, all.
        pull: whether it fetches what turns want.
        kvd_up: whether it follows kvd.
        store_up: whether the store's last call succeeded; None: none was made.
        num_unpushed, oldest_s: sessions to push, and for how long the oldest has been one.
        num_drops, num_wanted, num_pulling: sessions to drop, to fetch, and being fetched.
        num_evicted: sessions that were evicted, or a part of them was, before they were pushed;
            since it began.
        pushes, pulls, drops: since it began, by what became of them.
        num_bytes: of sessions, by direction.
        requests: of the store, by kind.
        failures: the last ones, newest last.
    """

    pid: int
    started_unix_s: float
    unix_s: float
    url: str
    write: str
    pull: bool
    kvd_up: bool
    store_up: bool | None
    num_unpushed: int
    oldest_s: float
    num_drops: int
    num_wanted: int
    num_pulling: int
    num_evicted: int = 0
    pushes: Mapping[str, int] = field(default_factory=dict)
    pulls: Mapping[str, int] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[Failure] = ()

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong just now."""
        return self.kvd_up and self.store_up is not False


def own_place(runtime_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return where a follower of the kvd of a runtime directory has its file."""
    return Path(environ.get("RUNTIME_DIRECTORY") or runtime_dir) / FILE


def write_status(path: Path, status: FollowerStatus) -> None:
    """Write what a follower says of itself.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{status.pid}")
    new.write_text(json.dumps(asdict(status)), encoding="utf-8")
    new.chmod(_READABLE)
    new.replace(path)


def read_status(runtime_dir: Path, now_unix_s: float) -> FollowerStatus:
    """Return what the follower of a kvd says of itself.

    Raises:
        NotFollowedError: none runs.
    """
    places = (runtime_dir / FILE, runtime_dir.with_name(f"{runtime_dir.name}-remote") / FILE)
    found = [status for path in places if (status := _read(path)) is not None]
    if not found:
        raise _not_followed(f"no follower of the kvd in {runtime_dir} runs")
    newest = max(found, key=lambda status: status.unix_s)
    silent_s = now_unix_s - newest.unix_s
    if silent_s > FRESH_S or not _lives(newest.pid):
        ago = f"{max(0.0, silent_s):.0f} s ago"
        raise _not_followed(f"the follower of the kvd in {runtime_dir} has died, or hangs, {ago}")
    return newest


def _read(path: Path) -> FollowerStatus | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads(path.read_text(encoding="utf-8"))
        values["failures"] = [Failure(**one) for one in values["failures"]]
        return FollowerStatus(**values)
    return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _not_followed(what: str) -> NotFollowedError:
    return NotFollowedError(
        what, "start it with: kvd remote follow, or systemctl start kvd-remote; its log says more"
    )
