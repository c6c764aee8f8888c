"""Reading the members of a body, and reporting wrong ones."""

from typing import ClassVar

import pytest
from pydantic import Field

from inference_svc.http_api.bodies.body import Body, Refused, decode
from inference_svc.http_api.errors import RequestError, UnknownParameterError, UnsupportedValueError
from inference_svc.http_api.openai.chats import ChatBody


class Inner(Body):
    word: str = ""


class Outer(Body):
    """One member of each type."""

    refused: ClassVar = {"n": Refused((1,), "send it twice")}
    ignored: ClassVar = frozenset({"user"})

    word: str = "default"
    number: float = Field(default=0.0, ge=0, le=2)
    whole: int | None = Field(default=None, ge=0, le=3)
    flag: bool = False
    items: list[str] = Field(default_factory=list)
    inner: Inner = Inner()


def test_members_are_read_by_type():
    """A null is an absent member."""
    given = {
        "number": 1,
        "whole": 3,
        "flag": True,
        "items": ["a"],
        "inner": {"word": "text", "nothing": None},
        "word": None,
        "nothing": None,
        "user": "me",
    }
    body = decode(Outer, given)
    assert (body.number, body.whole, body.flag) == (1.0, 3, True)
    assert (body.items, body.inner.word, body.word) == (["a"], "text", "default")
    assert decode(Outer, {}).whole is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"word": 3}, "word"),
        ({"flag": 1}, "flag"),
        ({"flag": "yes"}, "flag"),
        ({"whole": True}, "whole"),
        ({"whole": 0.5}, "whole"),
        ({"whole": 3.0}, "whole"),
        ({"whole": 4}, "whole"),
        ({"whole": -1}, "whole"),
        ({"whole": 10**4000}, "whole"),
        ({"number": True}, "number"),
        ({"number": "1"}, "number"),
        ({"number": 3}, "number"),
        ({"number": 10**4000}, "number"),
        ({"number": 1e999}, "number"),
        ({"items": {}}, "items"),
        ({"items": ["a", 5]}, "items[1]"),
        ({"inner": [1]}, "inner"),
        ({"inner": {"word": 5}}, "inner.word"),
    ],
)
def test_a_wrong_type_or_bound_is_reported_with_its_path(given, param):
    """The remedy has the accepted values."""
    with pytest.raises(RequestError) as refused:
        decode(Outer, given)
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    assert refused.value.remedy.startswith("send ")
    assert refused.value.remedy != "send another value"


def test_unknown_members_are_refused():
    """With the probably intended name, at any depth; ignorable ones are not."""
    with pytest.raises(UnknownParameterError, match="did you mean 'number'"):
        decode(Outer, {"nunber": 1, "user": "me"})
    with pytest.raises(UnknownParameterError, match=r"inner\.wort'.*did you mean 'word'"):
        decode(Outer, {"inner": {"wort": 1}})
    with pytest.raises(UnknownParameterError, match="leave it out"):
        decode(Outer, {"": 1})


def test_a_missing_feature_is_refused():
    """Unless its value asks for nothing; true is not 1."""
    assert decode(Outer, {"n": 1}) == decode(Outer, {"n": None}) == decode(Outer, {})
    for value in (2, True, "1", [1], {"a": 1}):
        with pytest.raises(UnsupportedValueError, match="send it twice"):
            decode(Outer, {"n": value})


def test_missing_members_are_reported_first():
    """Then wrong values, and last unknown names."""
    with pytest.raises(UnsupportedValueError):
        decode(Outer, {"unknown": 1, "flag": 1, "n": 2})
    with pytest.raises(RequestError) as refused:
        decode(Outer, {"inner": {"unknown": 1}, "flag": 1})
    assert refused.value.param == "flag"


def test_a_long_value_is_not_repeated_completely():
    """An error's message is short."""
    for value in ("x" * 100_000, 10**300, ["x"] * 10_000):
        with pytest.raises(RequestError) as refused:
            decode(Outer, {"flag": value})
        assert len(str(refused.value)) < 200
    with pytest.raises(UnknownParameterError) as unknown:
        decode(Outer, {"x" * 100_000: 1})
    assert len(str(unknown.value)) < 200


def test_only_the_first_of_very_many_errors_is_reported():
    """No list is built from megabytes of errors."""
    messages = [{"role": "user", "content": [{"type": "image"}] * 4}] * 1000
    with pytest.raises(UnsupportedValueError) as refused:
        decode(ChatBody, {"model": "m", "messages": messages})
    assert refused.value.param == "messages[0].content[0].type"
    assert refused.value.__cause__.error_count() == 1
    with pytest.raises(UnknownParameterError) as unknown:
        decode(Outer, {f"name{number}": 1 for number in range(1000)})
    assert unknown.value.param == "name0"
