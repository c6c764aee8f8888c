"""Why a turn missed the cache: what is answered where none did."""

from pathlib import Path

import pytest

from inference_svc.core.errors import UnknownTurnError
from inference_svc.core.transcript_format import Header, Transcript
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.misses import MissExplainer
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.worker_thread import WorkerThread


@pytest.mark.parametrize(
    ("turn", "said"),
    [(None, r"no turn .* has missed"), (3, r"turn 3 .* has not missed")],
)
async def test_a_turn_that_missed_nothing_is_not_said_to_have_missed(
    tmp_path: Path, turn: int | None, said: str
) -> None:
    """Whichever turn was asked for."""
    transcripts = TranscriptStore(tmp_path)
    explainer = MissExplainer(transcripts, TurnText(None, frozenset()), WorkerThread("unused"))
    with pytest.raises(UnknownTurnError, match=said):
        await explainer.explain(Transcript(Header("default", "m", "s"), ()), turn)
