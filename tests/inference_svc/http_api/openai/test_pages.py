"""Pages of a response's input."""

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.pages import Page, read_page

ITEMS = [{"id": name} for name in "abcde"]


def read_query(query=""):
    return read_page(make_mocked_request("GET", f"/v1/responses/resp_1/input_items?{query}"))


def ids(page):
    return "".join(item["id"] for item in page["data"])


def test_the_newest_come_first_by_default():
    """Twenty of them, as in OpenAI's API."""
    assert read_query() == Page(20, "", "desc")
    assert ids(read_query().of(ITEMS)) == "edcba"
    assert ids(read_query("order=asc").of(ITEMS)) == "abcde"


def test_a_page_has_its_ends():
    """And whether there is another."""
    page = read_query("order=asc&limit=2&after=b").of(ITEMS)
    assert page == {
        "object": "list",
        "data": [{"id": "c"}, {"id": "d"}],
        "first_id": "c",
        "last_id": "d",
        "has_more": True,
    }
    last = read_query("order=asc&limit=2&after=d").of(ITEMS)
    assert (ids(last), last["has_more"]) == ("e", False)
    full = read_query("order=asc&limit=2&after=c").of(ITEMS)
    assert (ids(full), full["has_more"]) == ("de", False)
    none = read_query("order=asc&after=e").of(ITEMS)
    assert (ids(none), none["first_id"], none["has_more"]) == ("", None, False)


def test_optional_contents_are_absent():
    """They may be requested as for a response, but an input has none."""
    assert read_query("include[]=message.output_text.logprobs") == Page()
    assert read_query("include=reasoning.encrypted_content") == Page()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=1.0", "limit"),
        ("limit=٣", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("limit=", "limit"),
        ("order=up", "order"),
        ("before=a", "before"),
        ("include[]=file_search_call.results", "include"),
        ("after=z", "after"),
    ],
)
def test_invalid_parameters_are_refused(query, param):
    """By name."""
    with pytest.raises(RequestError) as refused:
        read_query(query).of(ITEMS)
    assert refused.value.param == param
    assert len(str(refused.value)) < 200


@given(st.integers(0, 30), st.integers(1, 100), st.sampled_from(["asc", "desc"]))
def test_all_pages_together_have_everything_once(number, limit, order):
    """With any length of a page."""
    items = [{"id": f"i{index}"} for index in range(number)]
    found, after, has_more = [], "", True
    while has_more:
        page = Page(limit, after, order).of(items)
        found += page["data"]
        after, has_more = page["last_id"], page["has_more"]
    assert found == (items if order == "asc" else items[::-1])
