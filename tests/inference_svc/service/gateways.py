"""A gateway over a real engine."""

from contextlib import asynccontextmanager

from inference_svc.core.submission import TurnDefaults
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.service.gateway import Gateway
from shared.access.clients import StreamCounts
from tests.turn_service import serving


@asynccontextmanager
async def gateway_of(model, directory, most_streams=2):
    async with serving(model, directory) as service:
        yield gateway_to(service, "m", most_streams)


def gateway_to(service, name, most_streams=2):
    """Make a gateway to a running service, whose model has this fingerprint."""
    report = TurnReport(service.histograms)
    streams, counters = StreamCounts(most_streams), service.counters
    return Gateway(
        *(service.turns, name, None, TurnDefaults(64), streams, counters, report),
        *(service.prompts, service.text, None, None),
    )
