"""Pages of lists of objects, and the query parameters that select one.

*Source:* OpenAI API reference, the lists of input items, conversations' items and chats.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from inference_svc.http_api.errors import (
    RequestError,
    UnknownParameterError,
    UnsupportedValueError,
)

LOGPROBS = "message.output_text.logprobs"  # a value of `include`
REASONING = "reasoning.encrypted_content"  # a value of `include`; accepted: thoughts are readable
DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # OpenAI's bounds
INCLUDE = frozenset({"include", "include[]"})  # clients write lists in query strings both ways
BETA = "beta"  # a parameter that OpenAI's client adds to the paths of its beta API
ASCENDING, DESCENDING = ORDERS = ("asc", "desc")


@dataclass(frozen=True)
class Page:
    """The page of a list that a client asks for.

    Attributes:
        limit: most objects of the page.
        after: id of the object before the page; "": from the beginning.
        order: "asc" (the oldest first) or "desc".
    """

    limit: int = DEFAULT_LIMIT
    after: str = ""
    order: str = DESCENDING

    def of(self, objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the page of a list that begins with the oldest object.

        Raises:
            RequestError: the list has no object `after`.
        """
        ordered = list(objects if self.is_ascending else reversed(objects))
        ids = [each["id"] for each in ordered]
        if self.after and self.after not in ids:
            raise self.unknown_after_error()
        first = ids.index(self.after) + 1 if self.after else 0
        end = first + self.limit
        return list_object(ordered[first:end], has_more=end < len(ids))

    @property
    def is_ascending(self) -> bool:
        """Whether the oldest objects come first."""
        return self.order == ASCENDING

    def unknown_after_error(self) -> RequestError:
        """Make the error of a page whose object `after` does not exist."""
        return RequestError(
            f"there is no item {self.after[:80]!r}", "send the last_id of a page", "after"
        )


def list_object(objects: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """Return the object of a list, or of a page of it."""
    return {
        "object": "list",
        "data": list(objects),
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def read_page(request: web.Request, *names: str, order: str = DESCENDING) -> Page:
    """Read the page that a request asks for.

    Args:
        request: the request.
        names: names of its other query parameters.
        order: the list's order if the client names none.

    Raises:
        RequestError: a parameter is invalid or unknown.
    """
    query = request.query
    check_query(request, "limit", "after", "order", *names)
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", order)
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(MAX_LIMIT))
    if not is_number or not 1 <= int(limit) <= MAX_LIMIT:
        raise RequestError(
            f"limit {limit[:20]!r} is not valid", f"send a number from 1 to {MAX_LIMIT}", "limit"
        )
    if order not in ORDERS:
        raise RequestError(f"order {order[:20]!r} is not valid", "send asc or desc", "order")
    return Page(int(limit), query.get("after", ""), order)


def check_query(request: web.Request, *names: str) -> None:
    """Check the names of a request's query parameters, and the values of `include`.

    Raises:
        RequestError: a parameter is unknown, or a value of `include` is not supported.
    """
    query = request.query
    for name in query:
        if name not in {*names, *INCLUDE, BETA}:
            raise UnknownParameterError(
                f"there is no parameter {name[:80]!r}", "leave it out", name[:80]
            )
    check_included(value for name in INCLUDE for value in query.getall(name, ()))


def check_included(names: Iterable[object]) -> None:
    """Check the values of `include`.

    Raises:
        UnsupportedValueError: naming the first value that is not supported.
    """
    for name in names:
        if name not in (LOGPROBS, REASONING):  # a tuple: a client's value may not be hashable
            raise UnsupportedValueError(
                f"include {str(name)[:60]!r} is not supported", f"send only {LOGPROBS!r}", "include"
            )
