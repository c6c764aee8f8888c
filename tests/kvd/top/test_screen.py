"""The keys of kvd top."""

import pytest

from kvd.top.screen import PAGE, Act, Command, Screen, index_of, on_key
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.keyboard import split_keys

NAMES = [("default", "m", str(number)) for number in range(30)]


def after(keys, screen=None, names=NAMES):
    """Return the screen after some keys, and the commands on the way."""
    screen, commands = screen or Screen(), []
    for key in keys:
        screen, command = on_key(screen, key, names)
        if command is not None:
            commands.append(command)
    return screen, commands


@pytest.mark.parametrize(
    ("keys", "index"),
    [
        (["down", "j", "k"], 1),
        (["up"], 0),
        (["page_down", "down"], PAGE + 1),
        (["end", "down"], len(NAMES) - 1),
        (["end", "page_up", "home"], 0),
    ],
)
def test_a_session_is_chosen(keys, index):
    """By steps, pages and ends, never beyond them."""
    screen, commands = after(keys)
    assert (index_of(screen, NAMES), commands) == (index, [])


def test_the_selection_follows_its_session():
    """When the list changes the same session stays selected; if it is gone, the first one is."""
    screen, _ = after(["down", "down"])
    assert index_of(screen, NAMES[1:]) == 1
    assert index_of(screen, NAMES[3:]) == 0


@pytest.mark.parametrize(
    ("key", "act"), [("f", Act.FLUSH), ("p", Act.PIN), ("s", Act.SOFT_PIN), ("u", Act.UNPIN)]
)
def test_changes_need_confirmation(key, act):
    """Only y confirms, for the selected session; any other key cancels, also q."""
    asked, commands = after(["down", key])
    assert (asked.question, commands) == (Command(act, NAMES[1]), [])
    done, commands = after(["y"], asked)
    assert (commands, done.question) == ([Command(act, NAMES[1])], None)
    for other in ("n", "q", "enter", key):
        left, commands = after([other], asked)
        assert (commands, left.question, left.is_over) == ([], None, False)
        assert left.message == "nothing was done"


def test_a_question_is_about_the_session_selected_then():
    """It does not change if the list changes before the answer."""
    asked, _ = after(["down", "f"])
    _, command = on_key(asked, "y", NAMES[5:])
    assert command == Command(Act.FLUSH, NAMES[1])


def test_sorting_selects_the_top():
    """Each order has its key; r reverses, and another order begins unreversed."""
    screen, _ = after(["down", "b"])
    assert (screen.order, screen.chosen) == (kvd_pb2.SESSION_ORDER_BYTES, None)
    assert after(["r"], screen)[0].is_reversed
    again, _ = after(["r", "t"], screen)
    assert (again.order, again.is_reversed) == (kvd_pb2.SESSION_ORDER_TOKENS, False)
    for busiest in (Screen(), after(["t", "i"], screen)[0]):  # the session used last is first
        assert (busiest.order, busiest.is_reversed) == (kvd_pb2.SESSION_ORDER_IDLE, True)
    assert after(["e"])[0].order == kvd_pb2.SESSION_ORDER_TTL
    assert after(["b", "i"])[0].order == kvd_pb2.SESSION_ORDER_IDLE


def test_views_are_opened_and_closed():
    """Enter shows a session and the list again, ? the help until any key, Space pauses, q ends."""
    assert after(["enter"])[0].shows_session
    assert not after(["enter", "enter"])[0].shows_session
    assert not after(["enter", "escape"])[0].shows_session
    assert after(["?"])[0].shows_help
    left, commands = after(["?", "f"])
    assert (left.shows_help, left.question, commands) == (False, None, [])
    assert after(["space"])[0].is_paused
    assert not after(["space", "space"])[0].is_paused
    assert after(["?", "q"])[0].is_over


def test_an_empty_list_has_nothing_to_choose():
    """No key asks about a missing session, and none fails."""
    keys = ["down", "f", "p", "enter", "end", "unknown", "x", "escape"]
    assert after(keys, names=[]) == (Screen(), [])


def test_terminal_input_is_split_into_keys():
    """Arrows and pages in both of their forms, characters, a paste, and unknown sequences."""
    assert split_keys("\x1b[A\x1bOBq\r \x1b[6~") == [
        "up",
        "down",
        "q",
        "enter",
        "space",
        "page_down",
    ]
    assert split_keys("\x1b") == ["escape"]
    assert split_keys("\x1b[99;5u\x1b[") == ["unknown", "unknown"]
    assert split_keys("") == []
