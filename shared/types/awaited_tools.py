"""Names of tools that a session waits for, as both processes bound them. Pure.

The name is what a model was offered, and what an operator reads: of printable characters, few of
them, and few names.
"""

from collections.abc import Iterable

from shared.types.errors import InvalidInputError

MAX_AWAITED_TOOLS = (
    32  # of one answer; latencies are learned by name, and one waits for the slowest
)
MAX_TOOL_NAME = 128  # characters


class InvalidToolNamesError(InvalidInputError):
    """Names of tools that cannot be awaited."""

    reason = "invalid_tool_names"


def awaited_tools(names: Iterable[str]) -> tuple[str, ...]:
    """Check names, and return each of them once, in their order.

    Raises:
        InvalidToolNamesError: there are too many, or one is empty, too long or not printable.
    """
    tools = tuple(dict.fromkeys(names))
    if len(tools) > MAX_AWAITED_TOOLS:
        raise InvalidToolNamesError(
            f"{len(tools)} tools are awaited", f"name up to {MAX_AWAITED_TOOLS} different ones"
        )
    for name in tools:
        if not (0 < len(name) <= MAX_TOOL_NAME and name.isprintable()):
            raise InvalidToolNamesError(
                f"a tool cannot be named {name[:40]!r}",
                f"send 1 to {MAX_TOOL_NAME} printable characters",
            )
    return tools


def possible_tools(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names that can be awaited, each once: for hints of what models write."""
    possible = (name for name in names if 0 < len(name) <= MAX_TOOL_NAME and name.isprintable())
    return tuple(dict.fromkeys(possible))[:MAX_AWAITED_TOOLS]
