"""What differs between the APIs for the same thing: bodies of errors, objects of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inference_svc.http_api.errors import UnknownModelNameError
from shared.types.errors import ReportedError


@dataclass(frozen=True)
class ServedModel:
    """The model that is served: its names, and what clients see of it.

    Attributes:
        name: the model's own name.
        aliases: other names by which clients may ask for it.
        fingerprint: the model's fingerprint.
        created_s: Unix time in seconds when the service started.
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
            UnknownModelNameError: the name is none of the served model's.
        """
        if name not in self.names:
            raise UnknownModelNameError(
                f"the model {name[:80]!r} is not served here", f"send {self.name!r} as the model"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which clients may ask for the model."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Dialect:
    """How one API words errors and models.

    Attributes:
        error_body: returns the body of an error's response.
        models: returns the answer to GET /v1/models.
        model: returns the answer to GET /v1/models/NAME.
    """

    error_body: Callable[[ReportedError], Mapping[str, Any]]
    models: Callable[[ServedModel], Mapping[str, Any]]
    model: Callable[[ServedModel, str], Mapping[str, Any]]
