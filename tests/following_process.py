"""`kvd remote follow` as a process, and queries of its store."""

import asyncio
import os
from pathlib import Path

from kvd.remote.catalog import Catalog
from kvd.remote.names import session_place
from shared.blobs.opening import open_store
from shared.types.session_key import SessionKey
from tests.kvd_polling import eventually
from tests.processes import KvdProcess
from tests.synthetic_engine import key_of
from tests.warm_python import WarmPython, wait_ended

FOLLOWING = WarmPython("kvd.cli.main", "kvd.following.process", "obstore", "obstore.store")


class Following:
    """`kvd remote follow` for one kvd; it can be ended and started again."""

    def __init__(self, kvd: KvdProcess) -> None:
        self._kvd = kvd
        self._log = kvd.log_path.with_name("follow.log")
        self._process = None

    def start(self) -> None:
        options = ("remote", "follow", "--runtime-dir", str(self._kvd.runtime_dir))
        with self._log.open("ab") as log:
            self._process = FOLLOWING.spawn("kvd.cli.main", options, dict(os.environ), log.fileno())

    async def end(self, number: int) -> int:
        self._process.send_signal(number)
        async with asyncio.timeout(60):
            return await wait_ended(self._process)

    def said(self, event: str) -> int:
        """Return how often it has logged an event."""
        return self._log.read_text().count(f'"event": "{event}"')

    async def until_said(self, event: str, times: int = 1) -> None:
        async def has_said() -> bool:
            return self.said(event) >= times

        await eventually(has_said, wanted=True)


def url_of(store: Path | str) -> str:
    """Return the URL of a directory; a URL is returned unchanged."""
    return store if isinstance(store, str) else f"file://{store}"


def remote_settings(store: Path | str, **settings: str) -> dict[str, str]:
    """Return the environment of a kvd that pushes sessions to a store, and pulls them, at once."""
    values = {"url": url_of(store), "write": "all", "quiet": "0s", "pull": "true", **settings}
    return {f"KVD_REMOTE__{name.upper()}": value for name, value in values.items()}


def manifest_of(store: Path | str, session: str | SessionKey):
    """Return the store's manifest of a session; None if there is none or it was dropped."""
    key = key_of(session) if isinstance(session, str) else session
    found = Catalog(open_store(url_of(store))).read(session_place(key))
    return None if found is None or found.manifest.dropped else found.manifest


async def until_there(
    store: Path | str, session: str | SessionKey, num_tokens: int | None, epoch: int = 1
) -> None:
    """Return when the store has so many tokens of a session; None: when it has none any more."""

    async def there():
        found = await asyncio.to_thread(manifest_of, store, session)
        return found and (found.num_tokens, found.epoch)

    await eventually(there, num_tokens and (num_tokens, epoch))
