"""The examination of one architecture: build it, calibrate it, check it, and its findings."""

import copy
from dataclasses import dataclass, field

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.transfer.compaction import can_compact
from tests.zoo.architectures import Architecture
from tests.zoo.checks import (
    AFTER_DISCARD,
    ALWAYS,
    DROPPED,
    HISTORY,
    OVER_STATES,
    Case,
    Check,
    distance,
    other_state,
    shifted,
)
from tests.zoo.direct_service import Served
from tests.zoo.explicit import ExplicitStock
from tests.zoo.models import build_model
from tests.zoo.overrides import EXPLICIT
from tests.zoo.reference import Stock

TOLERANCE = 1e-4  # relative, float32; rounding gives 2e-6, in models of large values 2e-5
SENSITIVE = 2e-3  # relative; keys at stale positions have to be off by at least this


@dataclass(frozen=True)
class Findings:
    """What an examination found.

    Attributes:
        name: the architecture's.
        class_name: its model's class.
        mode: the calibration's; empty if the model is
        refused. positions: likewise.
        distances: by check, each to be at most TOLERANCE.
        stale: the distance that stale keys cause in the stock model; None: rows have no
            position, or keep it.
        other_state: the distance that the state of another position causes; None: the model has no
            states, or refuses such a state.
        is_one_by_one: see `Calibration`.
        refusal: the reason's slug; empty if it is served.
        reason: why it is refused, in a sentence.
    """

    name: str
    class_name: str
    mode: str = ""
    positions: str = ""
    distances: dict[str, float] = field(default_factory=dict)
    stale: float | None = None
    other_state: float | None = None
    is_one_by_one: bool = False
    refusal: str = ""
    reason: str = ""

    @property
    def worst(self) -> float:
        """Return the largest distance of any check; 0 if there was none."""
        return max(self.distances.values(), default=0.0)

    @property
    def failed(self) -> list[str]:
        """Return the names of failed checks."""
        failed = [
            f"{name}: {off:.1e} off the stock model's logits"
            for name, off in self.distances.items()
            if not off <= TOLERANCE  # so that NaN fails
        ]
        if self.stale is not None and not self.stale >= SENSITIVE:
            failed.append(f"stale keys change the logits by {self.stale:.1e} only")
        if self.other_state is not None and not self.other_state > TOLERANCE:
            failed.append(f"another state changes the logits by {self.other_state:.1e} only")
        return failed


def examine(architecture: Architecture, positions: str = "auto") -> Findings:
    """Examine an architecture from scratch.

    Raises:
        whatever building or running it raises, but for a refusal.
    """
    model = build_model(architecture)
    stock_class = ExplicitStock if architecture.model_type in EXPLICIT else Stock
    stock = stock_class(copy.deepcopy(model))
    class_name = type(model).__name__
    try:
        served = Served(model, architecture.name, positions)
    except UnsupportedModelError as error:
        return Findings(architecture.name, class_name, refusal=error.reason, reason=error.message)
    case = Case(served, stock, served.loaded.vocab_size, architecture.up)
    checks: list[Check] = [*ALWAYS, *AFTER_DISCARD[served.positions]]
    if shifted in checks and not can_compact(served.calibration):
        checks.remove(shifted)
    has_states = bool(served.calibration.state_shapes)
    if has_states:
        checks += OVER_STATES
    return Findings(
        architecture.name,
        class_name,
        served.calibration.mode,
        served.positions,
        {check.__name__: check(case) for check in checks},
        _stale(case) if served.embeds_positions else None,
        other_state(case) if has_states and not served.calibration.own_layers else None,
        served.calibration.is_one_by_one,
    )


def _stale(case: Case) -> float:
    """Return how much re-embedding of keys matters to the stock model."""
    kept = [(DROPPED, HISTORY)]
    stale = case.stock.with_stale_keys(case.history, kept, case.new)
    return distance(stale, case.stock.after_discard(case.history, kept, case.new, up=case.up))
