"""The descriptors that systemd keeps for us (D4): its fd store.

Does nothing outside systemd. Descriptors in the store come back after a restart, whatever became of
the process; a full stop closes them, unless the unit says FileDescriptorStorePreserve=yes.

*Source:* sd_listen_fds(3), sd_pid_notify_with_fds(3).
"""

import os
from collections.abc import Iterable, Mapping, MutableMapping

from shared.process.systemd import send

STORE_S = 1.0  # how long a busy supervisor may take: what it misses here would be lost
FIRST_FD = 3  # SD_LISTEN_FDS_START
_LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def store_fds(fds: Mapping[str, int], environ: Mapping[str, str] = os.environ) -> bool:
    """Have descriptors kept by name; False if there is nobody to keep them.

    systemd drops what does not fit FileDescriptorStoreMax= without telling us.
    """
    # Polled descriptors are dropped once they hang up; memory never does, and cannot be polled.
    return all(
        send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,), environ, STORE_S)
        for name, fd in fds.items()
    )


def remove_fds(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> None:
    """Have descriptors dropped; a name nobody knows is ignored."""
    for name in names:
        send(f"FDSTOREREMOVE=1\nFDNAME={name}", (), environ, STORE_S)


def stored_fds(environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
    """Take over the descriptors that an earlier process had kept, by name. The caller owns them.

    Children do not inherit them, nor the variables that announce them; a second call finds none.
    """
    ours = environ.get("LISTEN_PID") == str(os.getpid())
    count = environ.get("LISTEN_FDS", "")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    for variable in _LISTEN_VARIABLES:
        environ.pop(variable, None)
    if not ours or not count.isdigit():
        return {}
    stored: dict[str, int] = {}
    for index in range(int(count)):
        fd = FIRST_FD + index
        try:
            os.set_inheritable(fd, False)
        except OSError:  # announced, but not there
            continue
        name = names[index] if index < len(names) else ""
        if name in stored:  # systemd puts the newest of a name first
            os.close(fd)
        else:
            stored[name] = fd
    return stored
