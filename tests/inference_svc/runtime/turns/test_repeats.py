"""A turn that is submitted again: whether it is the same one."""

import pytest

from inference_svc.core.errors import RequestIdReusedError
from inference_svc.runtime.turns.turn import check_same
from tests.turn_service import make_turn


def test_a_repeat_has_the_same_digest():
    """Of its input and sampling, unless its request id contains it already."""
    check_same(make_turn([1], digest="d"), "d")
    check_same(make_turn([1], digest=""), "of another release")
    with pytest.raises(RequestIdReusedError, match="another input"):
        check_same(make_turn([1], digest="d"), "")
