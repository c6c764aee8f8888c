"""Where things lie in a remote store. Names of tenants and sessions are digests: they fit anywhere.

    v1/sessions/TENANT/SESSION/MODEL/NUMBER     versions of a session's manifest, a register
    v1/chunks/TENANT/BLAKE3[-SUFFIX]            session data, named by its content
    v1/condemned/TENANT/ID                      names of chunks that a sweep will remove
    v1/sweeper/NUMBER                           who sweeps, a register

TENANT, SESSION and MODEL are the BLAKE2b-128 of their names, in hex. Pure.
"""

from shared.blobs.release import stored_name
from shared.types.session_key import SessionKey

SESSIONS = "v1/sessions"
SWEEPER = "v1/sweeper"
_CHUNKS = "v1/chunks"
_CONDEMNED = "v1/condemned"


def session_place(key: SessionKey) -> str:
    """Return where versions of a session's manifest are."""
    return f"{sessions_named(key.tenant, key.session_id)}/{stored_name(key.model)}"


def sessions_named(tenant: str, session_id: str) -> str:
    """Return where the sessions of an id are, of whichever model."""
    return f"{SESSIONS}/{stored_name(tenant)}/{stored_name(session_id)}"


def tenant_sessions(tenant: str) -> str:
    """Return where the sessions of a tenant are."""
    return f"{SESSIONS}/{stored_name(tenant)}"


def chunks_place(tenant: str) -> str:
    """Return where a tenant's chunks are."""
    return f"{_CHUNKS}/{stored_name(tenant)}"


def condemned_place(tenant: str) -> str:
    """Return where lists of a tenant's condemned chunks are."""
    return f"{_CONDEMNED}/{stored_name(tenant)}"


def all_chunks() -> str:
    """Return where all tenants' chunks are."""
    return _CHUNKS


def all_condemned() -> str:
    """Return where all lists of condemned chunks are."""
    return _CONDEMNED


def place_of(name: str) -> str:
    """Return the place that an object is in."""
    return name.rpartition("/")[0]
