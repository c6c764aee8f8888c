"""Measures kvd push and pull on a store: python -m kvd.remote.rates SESSION --url URL.

Against the store's package alone (obstore, or Mooncake's client) with the very objects that a push
leaves, as many at once; every round writes below a prefix of its own, which is removed. The session
is one of the running kvd. A pull replaces it with itself.
"""

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvd.client.connection import open_client
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog
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
    """Print medians of push, pull, and of the package alone with the same objects, in MB/s."""
    seconds: dict[str, list[float]] = {"push": [], "bare put": [], "pull": [], "bare get": []}
    num_bytes = 0
    with open_client(runtime_dir) as client:
        for number in range(rounds):
            store = open_store(f"{url.rstrip('/')}/rates-{secrets.token_hex(4)}")
            put, get = _bare(store)
            info = client.describe(pb.SessionKey(session_id=session)).info
            pusher = Pusher(store, client, OWNER, SharedPace())
            puller = Puller(store, client, OWNER, SharedPace())
            num_bytes = pusher.push(info).num_bytes  # the disk is warmed up
            names = [blob.name for page in store.list("v1/") for blob in page]
            objects = {name: store.get(name) for name in names}
            found = Catalog(store).find(info.session.tenant, session)
            push = partial(pusher.push, info)
            steps: list[tuple[str, Callable[[], object]]] = [
                ("push", push),
                ("bare put", partial(_each, lambda name: put(name, objects[name]), names)),  # noqa: B023
                ("pull", partial(puller.pull, found, time.time(), copies=True, replaces=True)),
                ("bare get", partial(_each, get, names)),
            ]
            for what, do in reversed(steps) if number % 2 else steps:
                store.delete(names)
                if what in ("pull", "bare get"):
                    push()
                seconds[what].append(_timed(do))
            store.delete(names)
    typer.echo(f"{num_bytes / 1e6:.0f} MB, {rounds} rounds, medians:")
    for what, bare in (("push", "bare put"), ("pull", "bare get")):
        ours_s, alone_s = (statistics.median(seconds[one]) for one in (what, bare))
        ratios = [alone / ours for ours, alone in zip(seconds[what], seconds[bare], strict=True)]
        typer.echo(
            f"{what} {num_bytes / ours_s / 1e6:.0f} MB/s, {bare} {num_bytes / alone_s / 1e6:.0f}"
            f" MB/s, ratio {statistics.median(ratios):.2f}"
        )


def _timed(do: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    do()
    return time.perf_counter() - begun_s


def _bare(store: BlobStore) -> tuple[Callable[[str, bytes], object], Callable[[str], object]]:
    """Return the calls of the store's own package: ours over obstore are these already."""
    if not isinstance(store, MooncakeBlobStore):
        return store.put, store.view
    client, prefix = store.client, store.prefix
    return (lambda name, data: client.put(prefix + name, data)), (
        lambda n: client.get_buffer(prefix + n)
    )


def _each(do: Callable[[str], object], names: Sequence[str]) -> None:
    def drop(name: str) -> None:
        do(name)  # what comes of it is memory, of which a store may have little

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(drop, names))


if __name__ == "__main__":
    typer.run(rates)
