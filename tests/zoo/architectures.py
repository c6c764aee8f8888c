"""The models of the zoo: every causal type with its shrunk config, and variants of some."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.zoo.overrides import NOT_TRIED, UP, VARIANTS
from tests.zoo.tiny_configs import WINDOW, causal_types


@dataclass(frozen=True)
class Architecture:
    """A model of the zoo.

    Attributes:
        name: the type's, followed by the variant's if it is one.
        model_type: its name in Transformers.
        changed: fields of its config in which a variant differs from its type.
        up: see `Stock.after_discard`.
    """

    name: str
    model_type: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    up: int = 0


def architectures() -> dict[str, Architecture]:
    """Return every architecture of the installed Transformers by name, sorted."""
    installed = [name for name in causal_types() if name not in NOT_TRIED]
    found: dict[str, tuple[str, Mapping[str, Any]]] = {name: (name, {}) for name in installed}
    found |= {name: variant for name, variant in VARIANTS.items() if variant[0] in installed}
    return {
        name: Architecture(name, *found[name], up=WINDOW // 4 if found[name][0] in UP else 0)
        for name in sorted(found)
    }
