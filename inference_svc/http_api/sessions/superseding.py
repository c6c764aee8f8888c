"""Whether a conversation that was answered takes the place of the session that it resembles. Pure.

A client that edits its conversation (messages, results of tools, what the model had thought) goes
on in another session, and nobody comes back to the one before: what is stored of it need not be
kept. *Superseded* is the session that gave the conversation's newest known answer, if

    1. the conversation was answered in another session than that;
    2. that answer is the session's newest, and no turn of it is under way: it was left where the
       other one begins. One that has gone on since is a branch of its own, as where somebody goes
       back to an earlier answer and tries again;
    3. no client named it: who names a session means to come back;
    4. no sub-agent asks: it is given what its agent knows, which goes on beside it.

A conversation that only begins as a session does, with nothing of it edited, resembles none: forks
of a common beginning, several answers to one question, and clients that take turns with it are
branches, and live. The guess may be wrong, as where two clients have copied one conversation: then
the other's next turn ends it (it is used), and until then its KV has had a worse place in the order
of eviction, and nothing else.
"""

from inference_svc.core.misses import Resembled
from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.sessions.http_turn import HttpTurn
from inference_svc.http_api.sessions.lookup import Route


def supersedes(turn: HttpTurn, route: Route, resembled: Resembled, found: Transcript) -> bool:
    """Whether a turn's session takes the place of the one that the conversation resembles.

    Args:
        turn: that was answered.
        route: the session where.
        resembled: the other one, as it was when the turn came.
        found: what it has by now; no turn of it is under way.
    """
    is_left = len(found.turns) == resembled.turns and not found.has_ended
    is_other = route.session_id != resembled.session_id
    return is_left and is_other and not (resembled.is_named or turn.is_subagent)
