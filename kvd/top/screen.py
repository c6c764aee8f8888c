"""The state of `kvd top`'s screen: a key changes it, and may give a command. Pure.

A question (flush? pin?) is answered by the next key: `y` means yes, any other key no. The help
screen shows the indented lines below.

    ↑ ↓ j k, Page Up and Down, Home, End   choose a session
    i b t e                                sort by use, bytes, tokens, expiry
    r                                      the other way round
    Enter                                  show the session, or the list again
    f p s u                                flush, pin, pin softly, unpin
    Space                                  hold still, or go on
    h ?                                    help
    q                                      quit
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shared.pb.kvd.v1 import kvd_pb2

PAGE = 10  # sessions that Page Up and Page Down skip
ORDERS = {
    "i": kvd_pb2.SESSION_ORDER_IDLE,
    "b": kvd_pb2.SESSION_ORDER_BYTES,
    "t": kvd_pb2.SESSION_ORDER_TOKENS,
    "e": kvd_pb2.SESSION_ORDER_TTL,
}
_STEPS = {
    "up": -1,
    "k": -1,
    "down": 1,
    "j": 1,
    "page_up": -PAGE,
    "page_down": PAGE,
    "home": -(10**9),
    "end": 10**9,
}


class Act(Enum):
    """A command's action on a session; the value is its word in the question."""

    FLUSH = "flush"
    PIN = "pin"
    SOFT_PIN = "soft-pin"
    UNPIN = "unpin"


_ACTS = {"f": Act.FLUSH, "p": Act.PIN, "s": Act.SOFT_PIN, "u": Act.UNPIN}

# Tenant, model and id of a session.
Name = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Command:
    """An action on a session."""

    act: Act
    name: Name


@dataclass(frozen=True, slots=True)
class Screen:
    """The state of the screen.

    Attributes:
        order, is_reversed: the order of the list.
        chosen: the session that commands act on; None: the first one.
        question: the command that the next key confirms or cancels.
        message: the result of the last command.
        shows_session: the chosen session is shown instead of the list.
        shows_help: the help is shown.
        is_paused: polling is paused.
        is_over: the user has quit.
    """

    order: kvd_pb2.SessionOrder = kvd_pb2.SESSION_ORDER_IDLE
    is_reversed: bool = True
    chosen: Name | None = None
    question: Command | None = None
    message: str = ""
    shows_session: bool = False
    shows_help: bool = False
    is_paused: bool = False
    is_over: bool = False


def starts_reversed(order: kvd_pb2.SessionOrder) -> bool:
    """Return whether an order of kvd's lists the most active session last."""
    return order == kvd_pb2.SESSION_ORDER_IDLE


def name_of(info: kvd_pb2.SessionInfo) -> Name:
    """Return a session's tenant, model and id."""
    key = info.session
    return key.tenant, key.model, key.session_id


def index_of(screen: Screen, names: Sequence[Name]) -> int:
    """Return the chosen session's index in the list; 0 if it is gone."""
    return names.index(screen.chosen) if screen.chosen in names else 0


def on_key(screen: Screen, key: str, names: Sequence[Name]) -> tuple[Screen, Command | None]:
    """Handle a key.

    Args:
        screen: the state before it.
        key: a character, or the name of a key without one.
        names: the listed sessions, in order.

    Returns:
        The state after it, and the command to carry out; None: none.
    """
    if screen.question is not None:
        is_yes = key in ("y", "Y")
        answered = replace(screen, question=None, message="" if is_yes else "nothing was done")
        return answered, screen.question if is_yes else None
    screen = replace(screen, message="")
    if key in ("q", "Q"):
        return replace(screen, is_over=True), None
    if screen.shows_help:
        return replace(screen, shows_help=False), None
    return _on_screen(screen, key, names), None


def _on_screen(screen: Screen, key: str, names: Sequence[Name]) -> Screen:
    index = index_of(screen, names)
    if key in _STEPS and names:
        moved = min(max(index + _STEPS[key], 0), len(names) - 1)
        return replace(screen, chosen=names[moved])
    if key in ORDERS:
        order = ORDERS[key]
        return replace(screen, order=order, is_reversed=starts_reversed(order), chosen=None)
    if key == "r":
        return replace(screen, is_reversed=not screen.is_reversed, chosen=None)
    if key in _ACTS and names:
        command = Command(_ACTS[key], names[index])
        return replace(screen, question=command, chosen=names[index])
    if key == "enter" and names:
        return replace(screen, shows_session=not screen.shows_session, chosen=names[index])
    if key == "escape":
        return replace(screen, shows_session=False)
    if key == "space":
        return replace(screen, is_paused=not screen.is_paused)
    if key in ("h", "?"):
        return replace(screen, shows_help=True)
    return screen
