"""The commands `kvd push` and `kvd pull`: sessions to an object store, and from it to this kvd."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvd.cli.filters import DEFAULT_TENANT, Named, check_chosen, name_of, parse_option
from kvd.cli.options import AsJson, RuntimeDir, print_json, warn_of_unavailable
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from kvd.errors import NotAllMovedError, SessionExistsError, UnclearSelectionError
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog
from kvd.remote.manifest import Owner
from kvd.remote.pulling import Puller, PullResult
from kvd.remote.pushing import Outcome, Pusher, PushResult, in_order
from shared.blobs.blob_store import BlobStore, StoreUrlError
from shared.blobs.opening import open_store
from shared.blobs.release import claim
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import counted
from shared.types.errors import (
    ConfigError,
    DeniedError,
    NotFoundError,
    ReportedError,
    UnavailableError,
)
from shared.types.units import format_bytes, parse_bytes

LINE_EVERY_S = 0.2  # between two updates of the progress line

Sessions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SESSION]...", help="Session ids, or unique beginnings of them."),
]
WholeSessions = Annotated[list[str], typer.Argument(metavar="SESSION...", help="Session ids.")]
OfTenant = Annotated[
    str, typer.Option("--tenant", help="Tenant of the sessions, or all of this tenant's.")
]
To = Annotated[str, typer.Option("--to", metavar="URL", help="Store. Default: remote.url.")]
From = Annotated[str, typer.Option("--from", metavar="URL", help="Store. Default: remote.url.")]
Rate = Annotated[
    str, typer.Option("--rate", metavar="SIZE", help='Most bytes per second: "100MB".')
]
Model = Annotated[
    str, typer.Option("--model", help="Only models whose fingerprint starts with this.")
]


def push(
    sessions: Sessions = None,
    tenant: OfTenant = "",
    everything: Annotated[bool, typer.Option("--all", help="Every session.")] = False,
    to: To = "",
    model: Model = "",
    take: Annotated[
        bool,
        typer.Option(
            "--take",
            help="Include sessions that another server owns there, or whose manifest is damaged.",
        ),
    ] = False,
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix", help="If kvd does not know its discards, push what precedes them."
        ),
    ] = False,
    resend: Annotated[
        bool,
        typer.Option("--resend", help="Send all chunks again, where some are damaged or missing."),
    ] = False,
    rate: Rate = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Store sessions in an object store, for other kvds to pull.

    Sessions that are only in memory are sent first, then those that cost most to recompute. Chunks
    that the store has are not sent again, so an interrupted push can be repeated. With [encryption]
    chunks are sealed with the tenant's key, which stays here.
    """
    named = sessions or []
    check_chosen("push", named, tenant, everything=everything)
    pace = SharedPace(_bytes_of(rate))
    with open_client(runtime_dir) as client:
        stats = client.stats()
        url, store = open_named_store(to, client, "--to")
        found = _selected(client, named, tenant, model)
        progress = _Progress("pushed", len(found), sum(info.bytes for info in found), as_json)
        owner = Owner(stats.server_id, stats.server_name)
        pusher = Pusher(store, client, owner, pace, progress.add)
        moved = [
            (
                info.session,
                lambda info=info: pusher.push(info, takes=take, prefix=prefix, resends=resend),
            )
            for info in in_order(found)
        ]
        results, failed = _move_each(moved, progress)
    if as_json:
        print_json({"url": url, "sessions": results, "failed": failed})
    else:
        typer.echo(_summary(results, url))
    _check_all_moved(failed, len(found), "pushed")


def pull(
    sessions: WholeSessions,
    from_: From = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the sessions.")] = (
        DEFAULT_TENANT
    ),
    model: Model = "",
    copy: Annotated[
        bool,
        typer.Option(
            "--copy", help="Do not become the owner; the session is not pushed from here."
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing session.")
    ] = False,
    new_layout: Annotated[
        bool, typer.Option("--new-layout", help="Accept a layout that no engine has used here.")
    ] = False,
    rate: Rate = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch sessions from an object store, and become their owner.

    Their previous owner can no longer push them, until it pulls them itself. Their TTLs and pins
    are fetched with them.
    """
    pace = SharedPace(_bytes_of(rate))
    with open_client(runtime_dir) as client:
        stats = client.stats()
        url, store = open_named_store(from_, client, "--from")
        progress = _Progress("pulled", len(sessions), 0, as_json)
        owner = Owner(stats.server_id, stats.server_name)
        puller = Puller(store, client, owner, pace, progress.add)
        catalog = Catalog(store)

        def pull_one(session: str) -> PullResult:
            found = catalog.find(tenant, session, model)
            if not replace and _is_stored(client, found.manifest.session):
                raise SessionExistsError(
                    f"session {name_of(found.manifest.session)} is already stored",
                    "add --replace to replace it",
                )
            return puller.pull(
                found, time.time(), copies=copy, replaces=replace, may_add_layout=new_layout
            )

        moved = [
            (
                kvd_pb2.SessionKey(tenant=tenant, session_id=session),
                lambda session=session: pull_one(session),
            )
            for session in sessions
        ]
        results, failed = _move_each(moved, progress)
    if as_json:
        print_json({"url": url, "sessions": results, "failed": failed})
    else:
        num_bytes = sum(result["num_bytes"] for result in results)
        typer.echo(f"pulled {counted(len(results), 'session')} ({format_bytes(num_bytes)})")
    _check_all_moved(failed, len(sessions), "pulled")


def open_named_store(url: str, client: OperatorClient | None, option: str) -> tuple[str, BlobStore]:
    """Open the store that the command line or the settings name.

    Args:
        url: the URL on the command line; "": use the setting.
        client: the client of the kvd whose setting counts; None: there is none.
        option: the option that names a store, for messages.

    Returns:
        The store's URL, and the store.
    """
    if not url and client is not None:
        url = _setting(client)
    if not url:
        raise StoreUrlError(
            "no object store is configured",
            f"give its URL with {option}, or set remote.url in kvd's settings",
        )
    store = open_store(url)
    claim(store)
    return url, store


# -------------------------------------------------------------------------------------- internal


def _setting(client: OperatorClient) -> str:
    settings = client.settings().settings
    return next((str(json.loads(s.json)) for s in settings if s.key == "remote.url"), "")


def _bytes_of(rate: str) -> int:
    if not rate:
        return 0
    found = parse_option("--rate", rate, parse_bytes, '"100MB"')
    if not found:
        raise UnclearSelectionError("--rate 0 moves nothing", "leave --rate out for no limit")
    return found


def _selected(
    client: OperatorClient, named: Sequence[str], tenant: str, model: str
) -> list[kvd_pb2.SessionInfo]:
    """Return the sessions that a command line selects."""
    if named:
        return [
            Named(name, tenant, model).call(client, lambda key: client.describe(key).info)[1]
            for name in named
        ]
    listed = client.sessions(kvd_pb2.SessionFilter(tenant=tenant, model=model))
    warn_of_unavailable(listed.num_unavailable, "pushed")
    return listed.sessions


def _is_stored(client: OperatorClient, key: kvd_pb2.SessionKey) -> bool:
    try:
        client.describe(key)
    except NotFoundError:
        return False
    return True


Move = tuple[kvd_pb2.SessionKey, Callable[[], PushResult | PullResult]]


def _move_each(
    moves: Sequence[Move], progress: "_Progress"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Move one session after the other.

    An error of one session does not stop the others, unless it is the only session. Other errors
    (the store does not answer, access is denied) are raised at once.

    Returns:
        A document for each session that was moved, and one for each that failed.
    """
    results: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for key, move in moves:
        try:
            result = asdict(move())
        except (UnavailableError, DeniedError, ConfigError):
            progress.clear()
            raise
        except ReportedError as error:
            progress.clear()
            if len(moves) == 1:
                raise
            sys.stderr.write(f"kvd: {name_of(key)}: {error}\n")
            failed.append({**_key_document(key), "reason": error.reason, "message": str(error)})
            continue
        finally:
            progress.session_done()
        results.append({**_key_document(result.pop("session", key)), **result})
    progress.clear()
    return results, failed


def _key_document(key: kvd_pb2.SessionKey) -> dict[str, str]:
    return {"tenant": key.tenant, "model": key.model, "session": key.session_id}


def _summary(results: Sequence[dict[str, Any]], url: str) -> str:
    num_bytes = sum(result["num_bytes"] for result in results)
    sent = sum(result["sent_bytes"] for result in results)
    unchanged = sum(result["outcome"] is not Outcome.PUSHED for result in results)
    more = f", {unchanged} unchanged" if unchanged else ""
    what = f"{format_bytes(sent)} sent of {format_bytes(num_bytes)}{more}"
    return f"pushed {counted(len(results), 'session')} to {url} ({what})"


def _check_all_moved(failed: Sequence[dict[str, Any]], num_sessions: int, done: str) -> None:
    if failed:
        raise NotAllMovedError(
            f"{len(failed)} of {num_sessions} sessions were not {done}",
            "the lines above say what each one needs; then run the command again, which does "
            "not send anything twice",
        )


class _Progress:
    """A progress line on stderr's terminal. Any thread may update it.

    Args:
        done: the verb, in the past tense.
        num_sessions: all sessions.
        num_bytes: about how many bytes they have; 0: unknown.
        is_quiet: show nothing.
    """

    def __init__(self, done: str, num_sessions: int, num_bytes: int, is_quiet: bool) -> None:
        self._done = done
        self._num_sessions = num_sessions
        self._all_bytes = num_bytes
        self._is_shown = sys.stderr.isatty() and not is_quiet
        self._begun_s = self._shown_s = time.monotonic()
        self._num_bytes = 0
        self._num_done = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes, and update the line."""
        self._num_bytes += num_bytes
        now_s = time.monotonic()
        if self._is_shown and now_s >= self._shown_s + LINE_EVERY_S:
            self._shown_s = now_s
            self._show(now_s)

    def session_done(self) -> None:
        """Count a session, moved or failed."""
        self._num_done += 1

    def clear(self) -> None:
        """Erase the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self, now_s: float) -> None:
        whole = f" of {format_bytes(self._all_bytes)}" if self._all_bytes else ""
        rate = format_bytes(int(self._num_bytes / max(0.001, now_s - self._begun_s)))
        line = f"{self._done} {self._num_done} of {self._num_sessions} sessions, "
        line += f"{format_bytes(self._num_bytes)}{whole}, {rate}/s"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
