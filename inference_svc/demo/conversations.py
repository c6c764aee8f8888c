"""The shipped conversations: who says what in the demo. Origin and licences: data/README.md."""

import json
from dataclasses import dataclass
from pathlib import Path

DATA_DIR = Path(__file__).parent / "data"
MODEL_DIR = Path(__file__).parent / "model"


@dataclass(frozen=True)
class Conversation:
    """The users' turns of one dialogue; the first one opens with a document.

    Attributes:
        session_id: the session it is replayed as.
        title: of the document.
        turns: what the user says, in order.
    """

    session_id: str
    title: str
    turns: tuple[str, ...]


def shipped_conversations() -> tuple[Conversation, ...]:
    """Read the sample that comes with the package."""
    rows = json.loads((DATA_DIR / "conversations.json").read_text(encoding="utf-8"))
    return tuple(Conversation(row["session"], row["title"], tuple(row["turns"])) for row in rows)
