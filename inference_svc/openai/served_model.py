"""The one model that is served, as /v1/models shows it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_svc.openai.errors import UnknownModelNameError

OWNER = "cachedattention"


@dataclass(frozen=True)
class ServedModel:
    """What clients may call it, and what they see of it.

    Attributes:
        name: of the model.
        aliases: other names for it.
        fingerprint: of the model.
        created_s: when the service started, in seconds of the epoch.
        context_window: in tokens.
    """

    name: str
    aliases: tuple[str, ...]
    fingerprint: str
    created_s: int
    context_window: int

    def check(self, name: str) -> None:
        """Refuse a request for another model.

        Raises:
            UnknownModelNameError: it is not served here.
        """
        if name != self.name and name not in self.aliases:
            raise UnknownModelNameError(
                f"the model {name[:80]!r} is not served here", f"use {self.name!r}"
            )

    def as_list(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self.shown(name) for name in (self.name, *self.aliases)]}

    def shown(self, name: str) -> Mapping[str, Any]:
        """GET /v1/models/NAME."""
        self.check(name)
        return {
            "id": name,
            "object": "model",
            "created": self.created_s,
            "owned_by": OWNER,
            "fingerprint": self.fingerprint,
            "context_window": self.context_window,
        }
