"""GraftSource: tokens of one session whose KV another session reuses. Pure."""

from dataclasses import dataclass

from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class GraftSource:
    """The source of a graft (docs/glossary.md). The session that receives it is named elsewhere.

    Attributes:
        key: the session that has the KV; of the same tenant and model as the receiver.
        token_ids: its context from the first token, at least up to `end`; little-endian uint32.
        lineage: lineage of these tokens.
        start: position of the first token whose KV is given.
        end: position after the last one.
    """

    key: SessionKey
    token_ids: bytes
    lineage: Lineage
    start: int
    end: int

    def lineage_after(self, token_ids: bytes, lineage: Lineage) -> Lineage:
        """Return the lineage of a context after the graft has been appended to it.

        Args:
            token_ids: tokens of the context before the graft; little-endian uint32.
            lineage: lineage of these tokens.
        """
        return lineage.after_graft(token_ids, self.lineage, self.token_ids, self.start, self.end)
