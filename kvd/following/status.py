"""The follower's status file: rewritten every few seconds, read by `kvd remote status`.

It is in the runtime directory that systemd gives the follower, or else in kvd's own. Everyone who
can enter that directory may read it: it has numbers, reasons and the store's messages, nothing of
sessions. The follower removes it at its end. A follower that was killed leaves it behind; then its
process does not exist, and its time is old.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvd.errors import NotFollowedError
from kvd.host.process_identity import process_state, start_ticks_of

FILE = "remote-status.json"
FRESH_S = 30.0  # as long as kvd-remote.service's watchdog waits before it ends a silent follower
_READABLE = 0o644


@dataclass(frozen=True)
class Failure:
    """A failure that the follower met.

    Attributes:
        unix_s: when it happened.
        event: the name of its log event; the log has more.
        why: the error's reason, or the store's message.
    """

    unix_s: float
    event: str
    why: str


@dataclass(frozen=True)
class FollowerStatus:
    """The state of a follower at the moment `unix_s`.

    Attributes:
        pid: its process.
        started_unix_s, unix_s: when it started, and when it wrote this.
        url: the store; "": none.
        write: sessions that it pushes: none, drain, evicted, all.
        pull: whether it fetches wanted sessions.
        kvd_up: whether it follows kvd's events.
        store_up: whether the store's last call succeeded; None: none was made.
        num_unpushed: sessions to push.
        oldest_s: seconds for which the oldest of them has waited.
        num_drops, num_wanted, num_pulling: sessions to drop, to pull, and being pulled.
        num_evicted: sessions evicted, wholly or in part, before they were pushed, since its start.
        pushes, pulls, drops: sessions by result, since its start.
        num_bytes: bytes of sessions by direction.
        requests: requests of the store by kind.
        failures: the last failures, newest last.
        start_ticks: start of its process since boot, as in `ProcessIdentity`; 0: not known.
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
    start_ticks: int = 0

    @property
    def is_well(self) -> bool:
        """Whether kvd is followed and the store has not failed."""
        return self.kvd_up and self.store_up is not False


def own_place(runtime_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the path of the status file that this process writes."""
    return Path(environ.get("RUNTIME_DIRECTORY") or runtime_dir) / FILE


def write_status(path: Path, status: FollowerStatus) -> None:
    """Write the status file, atomically: a reader sees the old or the new one.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{status.pid}")
    new.write_text(json.dumps(asdict(status)), encoding="utf-8")
    new.chmod(_READABLE)
    new.replace(path)


def read_status(runtime_dir: Path, now_unix_s: float) -> FollowerStatus:
    """Return the status of the follower of the kvd in a runtime directory.

    Raises:
        NotFollowedError: no follower runs, or it hangs.
    """
    places = (runtime_dir / FILE, runtime_dir.with_name(f"{runtime_dir.name}-remote") / FILE)
    found = [status for path in places if (status := _read(path)) is not None]
    if not found:
        raise _not_followed(f"the kvd in {runtime_dir} has no follower running")
    newest = max(found, key=lambda status: status.unix_s)
    silent_s = now_unix_s - newest.unix_s
    if silent_s > FRESH_S or not _lives(newest):
        ago = f"{max(0.0, silent_s):.0f} s ago"
        raise _not_followed(
            f"the follower of the kvd in {runtime_dir} has died, or hangs: it last reported {ago}"
        )
    return newest


def _read(path: Path) -> FollowerStatus | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads(path.read_text(encoding="utf-8"))
        values["failures"] = [Failure(**failure) for failure in values["failures"]]
        return FollowerStatus(**values)
    return None


def _lives(status: FollowerStatus) -> bool:
    """Return whether the process that wrote a status runs: it, not another one with its pid."""
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    started = start_ticks_of(status.pid)
    is_other = 0 not in (started, status.start_ticks) and started != status.start_ticks
    # A killed process has its pid until its parent has waited for it.
    return not is_other and process_state(status.pid) != "zombie"


def _not_followed(what: str) -> NotFollowedError:
    return NotFollowedError(
        what,
        "start it with: kvd remote follow, or systemctl start kvd-remote; its log may say more",
    )
