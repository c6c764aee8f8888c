"""Predicted outputs do not change the answer; by OpenAI's client and by gRPC.

Whether they are drafted from depends on the time of a step on this machine: the engine's tests
cover that.
"""

import openai
import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.http_api.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 40  # tokens of an answer
ASKED = [{"role": "user", "content": "Say something long that nobody has said before."}]


async def ask(client, prediction=None, **options):
    extra = {} if prediction is None else {"prediction": prediction}
    return await client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=LENGTH,
        store=False,
        extra_body={"ignore_eos": True},
        **options,
        **extra,
    )


def check_counted(usage):
    """Check that accepted and rejected prediction tokens are no more than there are tokens."""
    details = usage.completion_tokens_details
    assert 0 <= details.accepted_prediction_tokens < usage.completion_tokens == LENGTH
    assert details.rejected_prediction_tokens >= 0


@pytest.mark.parametrize("in_parts", [False, True])
async def test_a_right_prediction_changes_nothing(api, in_parts):
    """As a text, or as a list of parts."""
    async with api.client() as client:
        plain = await ask(client)
        text = plain.choices[0].message.content
        half = len(text) // 2
        parts = [{"type": "text", "text": part} for part in (text[:half], text[half:])]
        content = parts if in_parts else text
        answer = await ask(client, {"type": "content", "content": content})
    assert answer.choices[0].message.content == text
    check_counted(plain.usage)
    check_counted(answer.usage)


async def test_a_wrong_prediction_changes_nothing_either(api):
    """Of sampled answers, whole and streamed."""
    async with api.client() as client:
        plain = await ask(client, temperature=0.7, seed=4)
        text = plain.choices[0].message.content
        wrong = {"type": "content", "content": text[: len(text) // 3] + " Something else. " * 9}
        drawn = await ask(client, wrong, temperature=0.7, seed=4)
        stream = await ask(
            client,
            {"type": "content", "content": text},
            temperature=0.7,
            seed=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        shown = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert drawn.choices[0].message.content == shown == text
    check_counted(chunks[-1].usage)


async def test_by_grpc_a_prediction_is_no_part_of_a_repeats_identity(api):
    """A repeated turn gets the recorded answer, with any prediction."""
    chat = [pb.ChatMessage(**message) for message in ASKED]
    sampling = pb.Sampling(max_tokens=LENGTH, ignore_eos=True)
    async with api.service.client() as client:

        async def turn(session, prediction, request_id):
            request = turn_request(chat, session, tenant="globex", sampling=sampling)
            request.prediction, request.request_id = prediction, request_id
            return await client.submit(request)

        plain = await turn("unpredicted", "", "a")
        predicted = await turn("predicted", plain.text, "b")
        again = await turn("predicted", "", "b")
    assert predicted.token_ids == plain.token_ids == again.token_ids
    assert predicted.usage.drafted_tokens >= predicted.usage.accepted_tokens >= 0
    assert again.accepted.replayed


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ("text", "prediction"),
        ({"type": "file", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "is not supported"),
    ],
)
async def test_bad_predictions_are_refused(api, prediction, said):
    """By OpenAI's error, with the member's name."""
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError, match=said):
            await ask(client, prediction)
