"""Measure kvd push and pull with a store: python -m kvd.remote.rates SESSION --url URL.

Compare them with the store's own package (obstore, or Mooncake's client), moving the same objects
with as many requests at once. Each round writes below a prefix of its own, which is removed after
it. The session is one of the running kvd. A pull replaces it with itself. Then it is cut to seven
eighths, as if another server had computed the rest, and the rest is pulled.
"""

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvd.client.connection import open_client
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog, PushedSession
from kvd.remote.manifest import Owner
from kvd.remote.pulling import Puller
from kvd.remote.pushing import THREADS, Pusher
from shared.blobs.blob_store import BlobStore
from shared.blobs.mooncake_store import MooncakeBlobStore
from shared.blobs.opening import open_store
from shared.pb.kvd.v1 import kvd_pb2 as pb

OWNER = Owner("rates", "rates")


def rates(
    session: Annotated[str, typer.Argument(help="Session id, of the default tenant.")],
    url: Annotated[str, typer.Option("--url", help="Store; nothing is left in it.")],
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 5,
    runtime_dir: Annotated[Path | None, typer.Option("--runtime-dir")] = None,
) -> None:
    """Print medians of push, pull, and of the package alone with the same objects, in MB/s.

    And how many bytes a pull fetches of which seven eighths are here, in which time.
    """
    seconds: dict[str, list[float]] = {"push": [], "bare put": [], "pull": [], "bare get": []}
    seconds |= {"rest": [], "all": []}
    num_bytes, fetched = 0, {"rest": 0, "all": 0}
    with open_client(runtime_dir) as client:
        for number in range(rounds):
            store = open_store(f"{url.rstrip('/')}/rates-{secrets.token_hex(4)}")
            put, get = _raw_calls(store)
            info = client.describe(pb.SessionKey(session_id=session)).info
            pusher = Pusher(store, client, OWNER, SharedPace())
            puller = Puller(store, client, OWNER, SharedPace())
            num_bytes = pusher.push(info).num_bytes  # and the SSD's pages are in memory now
            names = [blob.name for page in store.list("v1/") for blob in page]
            objects = [store.get(name) for name in names]
            found = Catalog(store).find(info.session.tenant, session)
            push = partial(pusher.push, info)
            steps: list[tuple[str, Callable[[], object]]] = [
                ("push", push),
                ("bare put", partial(_for_each, put, names, objects)),
                ("pull", partial(puller.pull, found, time.time(), copies=True, replaces=True)),
                ("bare get", partial(_for_each, get, names)),
            ]
            for name, do in reversed(steps) if number % 2 else steps:
                store.delete(names)
                if name in ("pull", "bare get"):
                    push()
                seconds[name].append(_time_call(do))
            for name, pushed in (("rest", found), ("all", _without_tokens(found))):
                fetched[name], took_s = _pull_rest(puller, pushed)
                seconds[name].append(took_s)
            store.delete(names)
    typer.echo(f"{num_bytes / 1e6:.0f} MB, {rounds} rounds, medians:")
    for name, bare in (("push", "bare put"), ("pull", "bare get")):
        ours_s, alone_s = (statistics.median(seconds[label]) for label in (name, bare))
        ratios = [alone / ours for ours, alone in zip(seconds[name], seconds[bare], strict=True)]
        typer.echo(
            f"{name} {num_bytes / ours_s / 1e6:.0f} MB/s, {bare} {num_bytes / alone_s / 1e6:.0f}"
            f" MB/s, ratio {statistics.median(ratios):.2f}"
        )
    for name, some in fetched.items():
        took_s = statistics.median(seconds[name])
        typer.echo(f"pull with 7/8 here, {name}: {some / 1e6:.1f} MB in {took_s:.3f} s")


def _pull_rest(puller: Puller, found: PushedSession) -> tuple[int, float]:
    """Cut the session to seven eighths, pull what was pushed; return its bytes and seconds."""
    part = pb.SessionManifest()
    part.CopyFrom(found.manifest)
    del part.chunks[len(part.chunks) * 7 // 8 :]
    part.num_tokens = part.chunks[-1].end_token
    puller.pull(replace(found, manifest=part), time.time(), copies=True, replaces=True)
    begun_s = time.perf_counter()
    pulled = puller.pull(
        found, time.time(), copies=True, replaces_up_to=part.num_tokens, grows=True
    )
    return pulled.num_bytes, time.perf_counter() - begun_s


def _without_tokens(found: PushedSession) -> PushedSession:
    """Return a session as older releases push it: without token ids, so all of it is fetched."""
    manifest = pb.SessionManifest()
    manifest.CopyFrom(found.manifest)
    manifest.ClearField("token_ids")
    return replace(found, manifest=manifest)


def _time_call(do: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    do()
    return time.perf_counter() - begun_s


def _raw_calls(store: BlobStore) -> tuple[Callable[[str, bytes], object], Callable[[str], object]]:
    """Return put and get of the store's own package; for obstore our store's are these already."""
    if not isinstance(store, MooncakeBlobStore):
        return store.put, store.view
    client, prefix = store.client, store.prefix
    return (lambda name, data: client.put(prefix + name, data)), (
        lambda n: client.get_buffer(prefix + n)
    )


def _for_each(do: Callable[..., object], *columns: Sequence[object]) -> None:
    """Call `do` for each row of the columns, with as many threads as a push and a pull have."""

    def call(*row: object) -> None:
        do(*row)  # its result is dropped: it holds memory, of which a store may have little

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(call, *columns))


if __name__ == "__main__":
    typer.run(rates)
