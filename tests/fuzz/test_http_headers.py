"""Any request headers: no made-up text is returned in a header."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.http_api.cross_origin import MAX_REQUESTED, check_local, requested_header_names
from inference_svc.http_api.errors import RequestError
from inference_svc.openai_settings import OpenAISettings
from shared.types.errors import DeniedError

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
pieces = st.sampled_from(["authorization", "x-a", ",", " ", "\t", ";", "\r\n", "\0", "é", "a" * 99])
texts = st.text(max_size=12) | st.lists(pieces, max_size=40).map("".join)


@given(st.lists(texts, max_size=3))
def test_header_names_are_valid_or_refused(sent):
    """And bounded."""
    try:
        names = requested_header_names(sent)
    except RequestError:
        return
    assert len(names) <= MAX_REQUESTED
    assert names.isprintable() or "\t" in names
    assert all(TOKEN.fullmatch(name.strip(" \t")) for name in names.split(",") if names)


@given(st.text(alphabet="htps:/a.*[]0189 @\n", max_size=16))
def test_origins_are_valid_or_refused(text):
    """The settings accept what browsers send: a single plain origin."""
    try:
        (taken,) = OpenAISettings(cors_origins=[text]).cors_origins
    except ValueError:
        return
    scheme, _, authority = taken.partition("://")
    assert taken == "*" or (scheme and authority and not set("/@* \n") & set(authority))


@given(texts)
def test_pages_are_local_or_denied(origin):
    """Whatever their origin looks like."""
    if not re.fullmatch(r"https?://(localhost|127\..*|\[::1\]).*", origin, re.DOTALL):
        with pytest.raises(DeniedError):
            check_local("127.0.0.1", ["localhost"], [origin])
