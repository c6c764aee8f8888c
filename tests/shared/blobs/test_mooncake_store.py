"""Failures of a Mooncake Store: masters that die or hang, full memory, and damage."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from shared.blobs import mooncake_client
from shared.blobs.blob_store import (
    BlobDamagedError,
    BlobExistsError,
    BlobMissingError,
    StoreFailedError,
    StoreSettingsError,
)
from shared.blobs.mooncake_client import Connection, settings_of
from shared.blobs.mooncake_store import MooncakeBlobStore
from shared.blobs.opening import open_store
from tests.blob_servers import MIB, MooncakeServer, mooncake_server

PATIENCE_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[MooncakeServer]:
    with mooncake_server() as started:
        yield started


@pytest.fixture
def connection(server: MooncakeServer) -> Connection:
    open_store(server.url)  # configures Mooncake's package
    parts = urlsplit(server.url)
    return Connection(settings_of(parts.hostname, parts.port, os.environ))


@pytest.fixture
def store(connection: Connection, request: pytest.FixtureRequest) -> MooncakeBlobStore:
    return MooncakeBlobStore(connection, f"{request.node.name}/", patience_s=PATIENCE_S)


def _key(request: pytest.FixtureRequest, name: str) -> str:
    return f"{request.node.name}/{name}"


def test_damage_is_detected(
    store: MooncakeBlobStore, connection: Connection, request: pytest.FixtureRequest
) -> None:
    """Of the stamp or of the bytes: reported, listed without size and age, and repairable."""
    store.put("v1/chunk", b"0123456789")
    bare, key = connection.connect().client, _key(request, "v1/chunk")
    sound = bytes(memoryview(bare.get_buffer(key)))
    for damaged in (sound[:-1] + b"x", b"x" + sound[1:], b"short"):
        assert bare.upsert_parts(key, damaged) == 0
        with pytest.raises(BlobDamagedError, match="store it there again"):
            store.get("v1/chunk")
    [[blob]] = store.list("v1/")
    assert (blob.name, blob.num_bytes, blob.stored_unix_s) == ("v1/chunk", 0, 0.0)
    store.put("v1/chunk", b"9876543210")
    assert store.get("v1/chunk") == b"9876543210"
    view = store.view("v1/chunk")
    assert (view, view.format) == (b"9876543210", "B")


def test_an_object_that_another_client_is_storing(
    store: MooncakeBlobStore, connection: Connection, request: pytest.FixtureRequest
) -> None:
    """It does not exist yet; creating it fails, and nothing waits for ever; a replacement wins."""
    bare, key = connection.connect().client, _key(request, "v1/slow")
    assert bare.batch_put_session_start([key], [100]) == [0]
    assert store.find("v1/slow") is None
    assert list(store.list("v1/")) == []
    with pytest.raises(StoreFailedError, match="another process is storing it"):
        store.put("v1/slow", b"mine", if_absent=True)
    with pytest.raises(StoreFailedError, match="another process is storing it"):
        store.get("v1/slow")
    store.delete(["v1/slow"])
    store.put("v1/slow", b"mine")
    assert store.get("v1/slow") == b"mine"


def test_simultaneous_creators(
    connection: Connection, server: MooncakeServer, request: pytest.FixtureRequest
) -> None:
    """Each has its own client; one of them creates it, and all read the same."""
    parts = urlsplit(server.url)
    others = [Connection(settings_of(parts.hostname, parts.port, os.environ)) for _ in range(2)]
    stores = [MooncakeBlobStore(one, f"{request.node.name}/") for one in (connection, *others)]
    for number in range(20):
        name, won, start = f"v1/{number}", [], threading.Barrier(len(stores))

        def make(index: int) -> None:
            start.wait()  # noqa: B023  # called now
            try:
                stores[index].put(name, bytes([index]) * 9, if_absent=True)  # noqa: B023
                won.append(index)  # noqa: B023
            except BlobExistsError:
                pass

        threads = [threading.Thread(target=make, args=(index,)) for index in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert {store.get(name) for store in stores} == {bytes(won) * 9}


def test_full_memory_keeps_important_objects(store: MooncakeBlobStore) -> None:
    """Chunks are evicted, and are missing then; objects created only if absent stay."""
    store.put("v1/manifest", b"who owns it", if_absent=True)
    patient = MooncakeBlobStore(store._connection, store.prefix)
    for number in range(20):  # 80 MiB; there are 64
        patient.put(f"v1/chunks/{number:02}", os.urandom(4 * MIB))
    there = {blob.name for page in store.list("v1/chunks/") for blob in page}
    assert 0 < len(there) < 20
    with pytest.raises(BlobMissingError):
        store.get(f"v1/chunks/{min({f'{n:02}' for n in range(20)} - {n[-2:] for n in there})}")
    assert all(len(store.get(name)) == 4 * MIB for name in there)
    assert store.get("v1/manifest") == b"who owns it"
    with pytest.raises(StoreFailedError, match="its memory is full"):
        store.put("v1/large", bytes(65 * MIB))
    store.delete(sorted(there))


def test_a_read_that_outlasts_its_lease() -> None:
    """It is repeated; of a page of many objects, each one that needs it."""
    with mooncake_server(lease_ms=1) as slow:
        store = open_store(slow.url)
        names = [f"v1/{number:03}" for number in range(1000)]
        for name in names:
            store.put(name, b"x")
        blobs = [blob for page in store.list("v1/") for blob in page]
    assert sorted((blob.name, blob.num_bytes) for blob in blobs) == [(name, 1) for name in names]


def test_an_object_larger_than_the_buffer_is_refused(store: MooncakeBlobStore) -> None:
    """The error names the buffer, and the store continues."""
    with pytest.raises(StoreFailedError, match="the buffer of this process is full"):
        store.put("v1/large", bytes(129 * MIB))
    store.put("v1/small", b"x")
    assert store.get("v1/small") == b"x"


def test_a_master_that_dies_and_comes_back(
    server: MooncakeServer, store: MooncakeBlobStore
) -> None:
    """Every call fails instead of reporting a missing object; then the same store works, empty."""
    store.put("v1/one", b"x")
    server.interrupt()
    calls = (
        lambda: store.put("v1/two", b"x"),
        lambda: store.put("v1/two", b"x", if_absent=True),
        lambda: store.get("v1/one"),
        lambda: store.find("v1/one"),
        lambda: store.delete(["v1/one"]),
        lambda: list(store.list("v1/")),
        lambda: open_store(server.url).get("v1/one"),
    )
    with ThreadPoolExecutor(len(calls)) as threads:  # each tries for some seconds
        answers = [threads.submit(call) for call in calls]
    assert {type(answer.exception()) for answer in answers} == {StoreFailedError}
    server.resume()
    assert list(store.list("v1/")) == []
    MooncakeBlobStore(store._connection, store.prefix).put("v1/two", b"x")
    with pytest.raises(BlobMissingError):
        store.get("v1/one")
    assert store.get("v1/two") == b"x"


def test_a_master_that_hangs(monkeypatch: pytest.MonkeyPatch, server: MooncakeServer) -> None:
    """Each call ends all the same."""
    monkeypatch.setattr(mooncake_client, "CONNECT_S", 0.2)
    server.freeze_master(frozen=True)
    try:
        with pytest.raises(StoreFailedError, match="no Mooncake master answers"):
            open_store(server.url).get("v1/one")
    finally:
        server.freeze_master(frozen=False)


@pytest.mark.parametrize("name", ["MOONCAKE_MASTER_METRICS_PORT", "MOONCAKE_LOCAL_BUFFER_SIZE"])
def test_an_environment_that_says_what_cannot_be(name: str) -> None:
    """It is named, and what it could be."""
    with pytest.raises(StoreSettingsError, match=f"{name} is not a number: write it as {name}="):
        settings_of("host", 1, {name: "many"})


def test_the_environment_is_that_of_mooncake() -> None:
    """Its names are those of Mooncake's other clients; an empty value counts as absent."""
    found = settings_of(
        "host",
        1,
        {
            "MOONCAKE_PROTOCOL": "rdma",
            "MOONCAKE_DEVICE": "mlx5_0",
            "MOONCAKE_LOCAL_BUFFER_SIZE": "1gb",
            "MOONCAKE_TE_META_DATA_SERVER": "",
        },
    )
    assert (found.protocol, found.device, found.buffer_bytes) == ("rdma", "mlx5_0", 1 << 30)
    assert (found.metadata, found.admin_port) == ("P2PHANDSHAKE", 9003)
