"""Settings that a running service changes: who gets told of them (`config.LIVE_KEYS`)."""

import time
from functools import partial

from inference_svc.assembly import ServiceParts
from inference_svc.config import InferenceSettings
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.core.submission import TurnDefaults
from inference_svc.service.turn_defaults import turn_defaults
from shared.config.reload import LiveSettings
from shared.config.settings import warn_of_overridden
from shared.process.log import configure_logging


def follow(live: LiveSettings[InferenceSettings], parts: ServiceParts) -> None:
    """Have the service follow its settings from now on."""
    live.check_with(lambda settings: _check(settings, parts.front.defaults))
    live.on_change(partial(_apply, parts))
    live.on_change(lambda _: warn_of_overridden(live.loaded))


def _check(settings: InferenceSettings, now: TurnDefaults) -> None:
    """See what only the model can say.

    Raises:
        UnsupportedModelError: the compression policy does not go with it.
    """
    turn_defaults(settings, now.model)


def _apply(parts: ServiceParts, settings: InferenceSettings) -> None:
    """Put settings into force; turns under way keep what they were submitted with."""
    configure_logging(settings.log.level, json=settings.log.json_lines)
    front = parts.front
    now = front.defaults
    front.defaults = turn_defaults(settings, now.model)
    front.streams.most = settings.limits.max_streams_per_client
    parts.limits.set_bounds(*settings.tenant_bounds(), time.monotonic_ns())
    parts.engine_parts.histograms.name_tenants(settings.tenants)
    parts.engine.scheduler.queue.weights = settings.scheduler.tenant_weights
    parts.engine_parts.loads.policy = LoadPolicy(settings.cache.load_policy)
