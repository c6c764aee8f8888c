"""A callback gets each request before it is made, and may forbid it."""

from random import Random

import pytest

from kvd.following.paced_store import PacedStore
from shared.blobs.blob_store import BlobMissingError
from tests.faulty_store import FaultyStore, View


class Heard:
    """A store, its requests, and the objects that existed at the last one."""

    def __init__(self) -> None:
        self.store = FaultyStore(Random(1))  # noqa: S311
        self.kinds: list[str] = []
        self.there: list[str] = []
        self.paced = PacedStore(View(self.store, is_calm=True), self.hear)

    def hear(self, kind: str) -> None:
        self.kinds.append(kind)
        self.there = sorted(self.store.blobs)


def test_each_request_is_reported_before_it_is_made() -> None:
    """The store behaves as it does without."""
    heard = Heard()
    paced = heard.paced
    paced.put("v1/a", b"0123", if_absent=True)
    assert (heard.kinds, heard.there) == (["put"], [])
    assert paced.get("v1/a", 1, 2) == b"12"
    assert paced.find("v1/a").num_bytes == 4
    paced.put("v1/b", b"")
    paced.delete(["v1/a", "v1/b", "v1/never"])
    assert heard.there == []
    with pytest.raises(BlobMissingError):
        paced.get("v1/a")
    assert heard.kinds == ["put", "get", "find", "put", "delete", "delete", "delete", "get"]


@pytest.mark.parametrize(("num_blobs", "num_pages"), [(0, 1), (3, 1), (7, 3)])
def test_each_page_is_a_request(num_blobs: int, num_pages: int) -> None:
    """So is an empty listing."""
    heard = Heard()
    for number in range(num_blobs):
        heard.paced.put(f"v1/{number}", b"")
    heard.kinds.clear()
    assert sum(len(page) for page in heard.paced.list("v1/")) == num_blobs
    assert heard.kinds == ["list"] * num_pages


def test_a_forbidden_request_is_not_made() -> None:
    """An exception of the callback prevents the request."""
    heard = Heard()

    def refuse(_: str) -> None:
        raise BlobMissingError("no", "not now")

    refusing = PacedStore(View(heard.store, is_calm=True), refuse)
    with pytest.raises(BlobMissingError):
        refusing.put("v1/a", b"")
    assert heard.store.blobs == {}


def test_it_reports_whether_its_store_is_durable() -> None:
    """For one that may lose objects it says so."""

    class Loses(View):
        keeps = False

    heard = Heard()
    assert heard.paced.keeps
    assert not PacedStore(Loses(heard.store), heard.hear).keeps
