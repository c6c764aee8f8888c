"""A turn that a request asks for, as far as it does not matter by which API it came. Pure."""

from dataclasses import dataclass

from inference_svc.openai.known import KnownResponse
from inference_svc.openai.messages import Message
from inference_svc.openai.places import Caller, Place
from inference_svc.openai.response_objects import ResponseFacts
from shared.pb.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class WantedTurn:
    """See the module docstring.

    Attributes:
        messages: that tell the history, or follow `previous`.
        session_id: that the client named; "" for none.
        is_kept: whether the session may stay when the turn is over.
        overflow: policy; "" for the service's.
        request_id: of the turn.
        body: digest of the request's body.
        repeat_key: of an idempotency key; None if there is none.
        previous: the response that it follows.
        response_id: under which it is remembered; "" for a chat's answer.
        facts: of that response.
    """

    messages: tuple[Message, ...]
    sampling: pb.Sampling
    session_id: str
    is_kept: bool
    overflow: str
    request_id: str
    body: bytes
    repeat_key: bytes | None = None
    previous: KnownResponse | None = None
    response_id: str = ""
    facts: ResponseFacts | None = None

    def as_turn(self, caller: Caller, place: Place) -> pb.SubmitTurnRequest:
        """As it is submitted at its place."""
        messages = [
            pb.ChatMessage(role=message.role, content=message.content)
            for message in self.messages[place.first :]
        ]
        return pb.SubmitTurnRequest(
            tenant=caller.tenant,
            session_id=place.session_id,
            chat=pb.ChatMessages(messages=messages),
            sampling=self.sampling,
            request_id=self.request_id,
            expected_turn=place.turns,
            final=not self.is_kept,
            overflow=pb.Overflow(policy=self.overflow),
        )
