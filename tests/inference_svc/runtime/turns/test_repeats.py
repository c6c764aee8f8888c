"""A turn that is submitted again: whether it is the same."""

import pytest

from inference_svc.core.errors import RequestIdReusedError
from inference_svc.runtime.turns.turn import check_same
from tests.turn_service import asked


def test_a_repeat_asks_for_the_same():
    """By the digest of what it asks for, unless its request id says that already."""
    check_same(asked([1], digest="d"), "d")
    check_same(asked([1], digest=""), "of another release")
    with pytest.raises(RequestIdReusedError, match="another input"):
        check_same(asked([1], digest="d"), "")
