"""Every store behaves alike: a directory, memory, S3, Mooncake, and the faulty one of tests."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest

from shared.blobs.blob_store import (
    BlobExistsError,
    BlobMissingError,
    BlobStore,
    StoreFailedError,
    StoreUrlError,
    UnfitStoreError,
)
from shared.blobs.object_store import ObjectBlobStore
from shared.blobs.opening import open_store
from shared.blobs.release import claim
from tests.blob_servers import SECRET, mooncake_server, s3_server
from tests.faulty_store import FaultyStore, Odds, View

obstore_store = pytest.importorskip("obstore.store")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as server:
        yield server.url


@pytest.fixture(scope="module")
def mooncake() -> Iterator[str]:
    with mooncake_server() as server:
        yield server.url


@pytest.fixture(params=["directory", "memory", "s3", "mooncake", "faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "directory":
        return open_store(f"file://{tmp_path}/made/here")
    if request.param == "memory":
        return ObjectBlobStore(obstore_store.MemoryStore())
    if request.param in {"s3", "mooncake"}:
        return open_store(request.getfixturevalue(request.param))
    return View(FaultyStore(Random(1)), is_calm=True)  # noqa: S311


def _names(store: BlobStore, prefix: str) -> list[str]:
    return sorted(blob.name for page in store.list(prefix) for blob in page)


def test_objects_are_stored_and_removed(store: BlobStore) -> None:
    """They are read whole or in part, found, listed by prefix and removed, twice if necessary."""
    store.put("v1/x/one", b"0123456789")
    store.put("v1/x/one", b"9876543210")
    store.put("v1/xy/two", b"")
    assert store.get("v1/x/one") == b"9876543210"
    assert store.view("v1/x/one") == b"9876543210"
    assert store.get("v1/x/one", 2, 3) == b"765"
    assert (store.get("v1/x/one", 8, 9), store.get("v1/x/one", 20, 2)) == (b"10", b"")
    assert (store.get("v1/x/one", 7), store.get("v1/x/one", 3, 0)) == (b"210", b"")
    found = store.find("v1/x/one")
    assert found is not None
    assert (found.name, found.num_bytes, found.stored_unix_s > 0) == ("v1/x/one", 10, True)
    assert (_names(store, "v1/x/"), _names(store, "v1/none/")) == (["v1/x/one"], [])
    store.delete(["v1/x/one", "v1/x/never", "v1/x/one"])
    assert (store.find("v1/x/one"), _names(store, "v1/x/")) == (None, [])
    with pytest.raises(BlobMissingError):
        store.get("v1/x/one")
    with pytest.raises(BlobMissingError):
        store.view("v1/x/one")
    store.delete(["v1/xy/two"])


def test_only_one_creates_an_absent_object(store: BlobStore) -> None:
    """One of many simultaneous calls does; the others fail, and change nothing."""
    won, lost = [], []

    def make(number: int) -> None:
        try:
            store.put("v1/race", bytes([number]) * 1000, if_absent=True)
            won.append(number)
        except BlobExistsError:
            lost.append(number)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert store.get("v1/race") == bytes(won) * 1000
    store.delete(["v1/race"])


def test_the_size_of_a_page_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long listings come in several."""
    monkeypatch.setattr("shared.blobs.object_store.PAGE", 4)
    store = open_store(f"file://{tmp_path}")
    for number in range(10):
        store.put(f"v1/many/{number}", b"x")
    pages = [len(page) for page in store.list("v1/many/")]
    assert (sum(pages), max(pages)) == (10, 4)


def test_a_store_is_marked(store: BlobStore) -> None:
    """Once; one of another release, or without conditions, is refused."""
    claim(store)
    claim(store)
    store.put("v1/format", b"KVDREMOT 2\n")
    with pytest.raises(UnfitStoreError, match="another release"):
        claim(store)
    store.delete(["v1/format"])


def test_a_store_without_conditions_is_refused() -> None:
    """Two servers could overwrite each other."""
    careless = View(FaultyStore(Random(1), odds=Odds(forgetful=1.0)), is_calm=True)  # noqa: S311
    with pytest.raises(UnfitStoreError, match="If-None-Match"):
        claim(careless)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "has the unknown scheme ''"),
        ("/a/directory", "has the unknown scheme ''"),
        ("ftp://host/x", "has the unknown scheme 'ftp'"),
        ("s3://", "names no bucket"),
        ("file:///", "does not name a directory"),
        ("file://host/x", "does not name a directory"),
        (f"s3://me:{SECRET}@bucket/x", "credentials in the environment"),
        (f"s3://bucket/x?token={SECRET}", "credentials in the environment"),
        ("s3://[", "is not valid"),
        ("mooncake:///x", "names no master"),
        ("mooncake://host:port/x", "names no port"),
        ("mooncake://host/x%0Ay", "has a prefix with characters other"),
    ],
)
def test_invalid_urls(url: str, said: str) -> None:
    """They are refused before any call, and no secret is repeated."""
    with pytest.raises(StoreUrlError, match=said.replace("[", r"\[")) as refused:
        open_store(url)
    assert SECRET not in str(refused.value)


def test_errors_contain_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable store is one line, with the remedy."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = ObjectBlobStore(
        obstore_store.S3Store(
            "bucket",
            endpoint="http://127.0.0.1:1",
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )
    )
    with pytest.raises(StoreFailedError, match="check that the object store works") as failed:
        store.get("v1/format")
    assert SECRET not in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_directory_is_private(tmp_path: Path) -> None:
    """A new one has mode 0700."""
    open_store(f"file://{tmp_path}/a%20b")
    assert (tmp_path / "a b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_an_empty_directory_has_no_objects(tmp_path: Path, ahead_s: float) -> None:
    """Whatever the clock of its file system is."""
    store = open_store(f"file://{tmp_path}/made")
    assert _names(store, "v1/x/") == []
    store.put("v1/x/0", b"0")
    store.delete(["v1/x/0"])
    (tmp_path / "made/v1/x").mkdir(exist_ok=True)
    changed_s = time.time() + ahead_s
    os.utime(tmp_path / "made/v1/x", (changed_s, changed_s))
    assert _names(store, "v1/x/") == []


def test_an_object_that_is_replaced_during_a_listing_is_not_missed(tmp_path: Path) -> None:
    """So nothing that existed all the time is taken for absent."""
    url, is_over = f"file://{tmp_path}/made", threading.Event()
    store = open_store(url)
    store.put("v1/x/0", b"0")

    def replace() -> None:
        other, number = open_store(url), 0
        while not is_over.is_set():
            other.put(f"v1/x/{number + 1}", b"1", if_absent=True)
            other.delete([f"v1/x/{number}"])
            number += 1

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        assert all(_names(store, "v1/x/") for _ in range(3000))
    finally:
        is_over.set()
        writer.join()
