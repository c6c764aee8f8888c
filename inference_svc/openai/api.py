"""What the handlers of the API stand on."""

from dataclasses import dataclass

from inference_svc.openai.answers import Answers
from inference_svc.openai.endings import Endings
from inference_svc.openai.remembered import Remembered
from inference_svc.openai.request_places import RequestPlaces
from inference_svc.openai.served_model import ServedModel
from inference_svc.openai.token_text import TokenText
from inference_svc.openai_settings import OpenAISettings
from inference_svc.service.gateway import Front
from shared.access.clients import ClientBook
from shared.access.identity import Identity


@dataclass(frozen=True)
class Api:
    """Parts; one for the life of the service.

    Attributes:
        own: identity of whoever may open the Unix socket; None on TCP.
    """

    settings: OpenAISettings
    front: Front
    model: ServedModel
    token_text: TokenText
    remembered: Remembered
    endings: Endings
    answers: Answers
    places: RequestPlaces
    book: ClientBook
    own: Identity | None
