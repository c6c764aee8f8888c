"""A gateway over a real engine."""

from contextlib import asynccontextmanager

from inference_svc.core.submission import TurnDefaults
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.service.gateway import Gateway
from shared.access.clients import StreamCounts
from tests.turn_service import serving


@asynccontextmanager
async def gateway_of(model, directory, most_streams=2):
    async with serving(model, directory) as service:
        report = TurnReport(service.histograms)
        streams, counters = StreamCounts(most_streams), service.counters
        text = TurnText(model[0].tokenizer, frozenset())
        yield Gateway(
            *(service.turns, "m", None, TurnDefaults(64), streams, counters, report),
            *(None, text, None, None),
        )
