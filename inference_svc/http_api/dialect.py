"""What every API has, each in its own words: errors, and the model that is served."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inference_svc.http_api.errors import UnknownModelNameError
from shared.types.errors import ReportedError


@dataclass(frozen=True)
class ServedModel:
    """The one model that is served: what clients may call it, and what they see of it.

    Attributes:
        name: the model's own name.
        aliases: other names for it.
        fingerprint: the model's fingerprint.
        created_s: Unix time when the service started.
        context_window: most tokens of a context.
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
        if name not in self.names:
            raise UnknownModelNameError(
                f"the model {name[:80]!r} is not served here", f"use {self.name!r}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may call it."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Dialect:
    """The words of one API.

    Attributes:
        error_body: makes the body of an error's response.
        models: makes the answer of GET /v1/models.
        model: makes that of GET /v1/models/NAME.
    """

    error_body: Callable[[ReportedError], Mapping[str, Any]]
    models: Callable[[ServedModel], Mapping[str, Any]]
    model: Callable[[ServedModel, str], Mapping[str, Any]]
