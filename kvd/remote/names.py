"""Object names in a remote store. Tenants' and sessions' names are digested: any name fits. Pure.

    v1/sessions/TENANT/SESSION/MODEL/NUMBER     versions of a session's manifest, a register
    v1/chunks/TENANT/BLAKE3[-SUFFIX]            session data, named by its content
    v1/condemned/TENANT/ID                      names of chunks that a sweep will remove
    v1/sweeper/NUMBER                           the lease of the sweep, a register

TENANT, SESSION and MODEL are the BLAKE2b-128 of their names, in hex.
"""

from shared.blobs.release import stored_name
from shared.types.session_key import SessionKey

SESSIONS = "v1/sessions"
SWEEPER = "v1/sweeper"
_CHUNKS = "v1/chunks"
_CONDEMNED = "v1/condemned"


def session_place(key: SessionKey) -> str:
    """Return the place of the versions of a session's manifest."""
    return f"{sessions_named(key.tenant, key.session_id)}/{stored_name(key.model)}"


def sessions_named(tenant: str, session_id: str) -> str:
    """Return the place of the sessions of an id, of all models."""
    return f"{SESSIONS}/{stored_name(tenant)}/{stored_name(session_id)}"


def tenant_sessions(tenant: str) -> str:
    """Return the place of a tenant's sessions."""
    return f"{SESSIONS}/{stored_name(tenant)}"


def chunks_place(tenant: str) -> str:
    """Return the place of a tenant's chunks."""
    return f"{_CHUNKS}/{stored_name(tenant)}"


def condemned_place(tenant: str) -> str:
    """Return the place of the lists of a tenant's condemned chunks."""
    return f"{_CONDEMNED}/{stored_name(tenant)}"


def all_chunks() -> str:
    """Return the place of all tenants' chunks."""
    return _CHUNKS


def all_condemned() -> str:
    """Return the place of all lists of condemned chunks."""
    return _CONDEMNED


def place_of(name: str) -> str:
    """Return the place of an object: its name without the last part."""
    return name.rpartition("/")[0]
