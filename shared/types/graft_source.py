"""GraftSource: tokens of one session whose KV another one is to go on with. Pure."""

from dataclasses import dataclass

from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class GraftSource:
    """What a graft gives (docs/glossary.md); the session that it is given to is named apart.

    Attributes:
        key: of the session that has it, of the same tenant and model.
        token_ids: its context from the first token on, at least up to `end`; little-endian uint32.
        lineage: of these tokens.
        start: first token that is given.
        end: behind the last one.
    """

    key: SessionKey
    token_ids: bytes
    lineage: Lineage
    start: int
    end: int

    def lineage_after(self, token_ids: bytes, lineage: Lineage) -> Lineage:
        """Return the lineage of a context of these tokens, once what is given follows them."""
        return lineage.after_graft(token_ids, self.lineage, self.token_ids, self.start, self.end)
