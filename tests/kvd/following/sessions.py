"""Session descriptions as kvd gives them."""

from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey
from tests.synthetic_engine import key_of

A, B, C = key_of("a"), key_of("b"), key_of("c")


def info_of(key: SessionKey, num_tokens: int = 100, **values) -> pb.SessionInfo:
    """Return a listing's entry of a session."""
    named = pb.SessionKey(tenant=key.tenant, model=key.model, session_id=key.session_id)
    return pb.SessionInfo(session=named, num_tokens=num_tokens, **values)
