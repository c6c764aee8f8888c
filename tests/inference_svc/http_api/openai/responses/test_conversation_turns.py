"""The place of a conversation's next turn."""

from dataclasses import replace

import pytest

from inference_svc.core.chat import Tool
from inference_svc.core.submission import ChatInput
from inference_svc.core.transcript_format import Header, Transcript
from inference_svc.core.turn_record import TurnRecord, Usage
from inference_svc.http_api.openai.responses.conversation_turns import next_place, without_turn
from inference_svc.http_api.sessions.lookup import Conversation, Point

NEW = "conv_a-2"
TOOLS = (Tool("look"),)
CONVERSATION = Conversation("conv_a", 1.0, {}, "Be brief.", "conv_a", 2, "r-2")
AT = Point("conv_a", 2, "r-2", is_named=True)


def session(num_turns, **fields):
    digest = ChatInput((), TOOLS).tools_digest
    turns = tuple(
        TurnRecord(
            *(number, f"r-{number + 1}", "", (1,), (2,), ("a",), (), (), 1, "stop"),
            usage=Usage(),
            created_unix_s=1.0,
            tools_digest=digest,
        )
        for number in range(num_turns)
    )
    return Transcript(Header("acme", "m", "conv_a"), turns, **fields)


def place(found, instructions="", tools=(), **changes):
    return next_place(replace(CONVERSATION, **changes), found, instructions, tools, NEW)


@pytest.mark.parametrize("instructions", ["", "Be brief."])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_session_is_continued(instructions, tools):
    """If the conversation's items are those of the session."""
    assert place(session(2), instructions, tools) == (AT, "conv_a")


def test_a_fork_replaces_a_session_with_more_turns():
    """A turn was abandoned or deleted, or the session has ended."""
    assert place(session(3)) == (AT, NEW)
    assert place(session(2, has_ended=True)) == (AT, NEW)


@pytest.mark.parametrize(
    ("found", "options"),
    [
        (session(2), {"instructions": "Be long."}),
        (session(2), {"tools": (Tool("see"),)}),
        (session(1), {}),
        (session(2), {"request_id": "r-9"}),
        (session(2), {"turns": 0, "request_id": ""}),
        (session(0, has_ended=True), {}),
    ],
)
def test_a_new_session_reads_everything(found, options):
    """What the other session has read does not begin the conversation, or is not its own."""
    assert place(found, **options) == (None, NEW)


def test_a_conversation_begins_in_the_session_of_its_name():
    """So does one whose session is lost."""
    assert place(None) == (None, "conv_a")
    assert place(None, turns=0, request_id="") == (None, "conv_a")
    assert place(session(0), turns=0, request_id="") == (None, "conv_a")


def test_turns_before_a_deleted_item_count():
    """As long as the session has them."""
    left = without_turn(CONVERSATION, session(2), 2)
    assert (left.turns, left.request_id) == (1, "r-1")
    at = Point("conv_a", 1, "r-1", is_named=True)
    assert place(session(2), turns=1, request_id="r-1") == (at, NEW)
    for found, turn in ((session(2), 1), (None, 2), (session(1), 2)):
        left = without_turn(CONVERSATION, found, turn)
        assert (left.turns, left.request_id) == (0, "")
    assert without_turn(replace(CONVERSATION, request_id="r-9"), session(2), 2).turns == 0


def test_unread_items_change_no_turns():
    """They are new, or behind a deleted one."""
    assert without_turn(CONVERSATION, session(4), 3) == CONVERSATION
    assert without_turn(CONVERSATION, None, 3) == CONVERSATION
