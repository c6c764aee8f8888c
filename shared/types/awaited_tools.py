"""Names of the tools that a session awaits, and the limits of them in both processes. Pure.

A name is what the model was offered, and what an operator reads. So it consists of printable
characters, names are short, and there are few of them.
"""

from collections.abc import Iterable

from shared.types.errors import InvalidInputError

MAX_AWAITED_TOOLS = (
    32  # of one answer: return times are learned by name, and a session waits for the slowest tool
)
MAX_TOOL_NAME = 128  # characters


class InvalidToolNamesError(InvalidInputError):
    """The names of tools are too many, or one of them is invalid."""

    reason = "invalid_tool_names"


def awaited_tools(names: Iterable[str]) -> tuple[str, ...]:
    """Check names, and return each of them once, in their order.

    Raises:
        InvalidToolNamesError: there are too many, or one is empty, too long or not printable.
    """
    tools = tuple(dict.fromkeys(names))
    if len(tools) > MAX_AWAITED_TOOLS:
        raise InvalidToolNamesError(
            f"{len(tools)} different tools are awaited, which is too many",
            f"name at most {MAX_AWAITED_TOOLS}",
        )
    for name in tools:
        if not (0 < len(name) <= MAX_TOOL_NAME and name.isprintable()):
            raise InvalidToolNamesError(
                f"{name[:40]!r} is not a valid name of a tool",
                f"send 1 to {MAX_TOOL_NAME} printable characters",
            )
    return tools


def possible_tools(names: Iterable[str]) -> tuple[str, ...]:
    """Return the valid ones of the names, each once, up to the limit: for names a model wrote."""
    possible = (name for name in names if 0 < len(name) <= MAX_TOOL_NAME and name.isprintable())
    return tuple(dict.fromkeys(possible))[:MAX_AWAITED_TOOLS]
