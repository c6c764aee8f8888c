"""Which session a command line means: by its id, or by how the id of only one begins.

An id of the default tenant (or of the one that is named) is taken as it stands, without a look at
any other. Only if kvd has no such session is it looked for elsewhere: as an id of any tenant, then
as the beginning of one. Several are never guessed between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvd.cli.options import key_of
from kvd.client.operator_client import OperatorClient
from kvd.errors import AmbiguousSessionError
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import NotFoundError, StateError

DEFAULT_TENANT = "default"
MOST_LOOKED_AT = 200  # sessions whose ids begin so
MOST_NAMED = 6  # in the message that says which there are

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """What a command line says of a session; what is empty it does not say."""

    session: str
    tenant: str = ""
    model: str = ""

    def call(
        self,
        client: OperatorClient,
        do: Callable[[kvd_pb2.SessionKey], T],
        approve: Callable[[kvd_pb2.SessionKey], None] = lambda _: None,
    ) -> tuple[kvd_pb2.SessionKey, T]:
        """Call for the session that is meant; returns its key, too.

        Args:
            client: of the kvd that has it.
            do: what asks kvd; it raises if kvd has no such session.
            approve: asked before `do` where the command line has only the beginning of an id.

        Raises:
            NotFoundError: no id begins so.
            AmbiguousSessionError: several do.
        """
        key = key_of(self.session, self.tenant, self.model)
        try:
            return key, do(key)
        except (NotFoundError, StateError) as error:
            if not _names_no_one(error):
                raise
            found = self._found(client)
            if not found:
                raise
        if len(found) > 1:
            raise _several(self.session, found)
        if found[0].session_id != self.session:
            approve(found[0])
        return found[0], do(found[0])

    def _found(self, client: OperatorClient) -> list[kvd_pb2.SessionKey]:
        """Sessions of exactly this id; if there are none those whose ids begin so."""
        wanted = kvd_pb2.SessionFilter(tenant=self.tenant, model=self.model, id_prefix=self.session)
        listed = client.sessions(wanted, MOST_LOOKED_AT, reverse=True)
        keys = [info.session for info in listed.sessions]
        return [key for key in keys if key.session_id == self.session] or keys


def name_of(key: kvd_pb2.SessionKey) -> str:
    """A session for people: with its tenant, if that is not the default one."""
    is_other = key.tenant and key.tenant != DEFAULT_TENANT
    return f"{key.tenant}/{key.session_id}" if is_other else key.session_id


def _names_no_one(error: NotFoundError | StateError) -> bool:
    return isinstance(error, NotFoundError) or error.reason == AmbiguousSessionError.reason


def _several(said: str, found: Sequence[kvd_pb2.SessionKey]) -> AmbiguousSessionError:
    names = [f"{name_of(key)} (model {key.model[:12]})" for key in found]
    if len({key.model for key in found}) == 1:
        names = [name_of(key) for key in found]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return AmbiguousSessionError(
        f"{said!r} may be any of {', '.join(names[:MOST_NAMED])}{more}",
        "name one by its whole id, with --tenant or --model where ids are the same",
    )
