"""Compacted conversations, and how they continue, by the official client."""

import openai
import pytest

from inference_svc.http_api.openai.responses.compaction import ASKED
from tests.http_api.conftest import MODEL


async def test_a_conversation_is_compacted(api, opening):
    """Cached tokens are not computed again; the item replaces the history as input."""
    client = api.client()
    first = await client.responses.create(model=MODEL, input=opening, max_output_tokens=8)
    await api.until_saved(first)
    compacted = await client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert compacted.object == "response.compaction"
    (item,) = compacted.output
    assert item.type == "compaction"
    assert compacted.usage.input_tokens > first.usage.input_tokens
    assert compacted.usage.input_tokens_details.cached_tokens > 0
    assert await api.num_turns(first.session_id) == 1
    said = [item.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
    after = await client.responses.create(model=MODEL, input=said, max_output_tokens=4)
    assert after.status in {"completed", "incomplete"}
    asked = len(ASKED.split())
    assert asked < after.usage.input_tokens
    items = await client.responses.input_items.list(after.id, order="asc")
    assert items.data[0].encrypted_content == item.encrypted_content
    conversation = await client.conversations.create(items=said)
    held = await client.responses.create(
        model=MODEL, input=[], conversation=conversation.id, max_output_tokens=4
    )
    assert held.usage.input_tokens == after.usage.input_tokens


@pytest.mark.parametrize(
    "num_messages", [4, *(pytest.param(count, marks=pytest.mark.long) for count in (3, 0))]
)
async def test_an_input_is_compacted(api, opening, num_messages):
    """Any input can be compacted; the last question stays in it."""
    said = [*opening, {"role": "assistant", "content": "Keys."}, {"role": "user", "content": "?"}]
    compacted = await api.client().responses.compact(
        model=MODEL, input=said[:num_messages] or "What is kept?", instructions="Be brief."
    )
    assert [item.type for item in compacted.output] == ["compaction"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": [{"type": "compaction", "encrypted_content": "gAAAAA=="}]},
        {"input": [{"type": "compaction"}]},
        {"input": [{"type": "compaction", "encrypted_content": "summary.v1.eyJhIjoxfQ=="}]},
        {"input": "Hi", "extra_body": {"stream": True}},
        {"input": "Hi", "extra_body": {"session_id": "s"}},
        {"input": "Hi", "image": {"context_compression": "enabled"}},
    ],
)
async def test_requests_that_cannot_be_compacted_are_refused(api, fields):
    """The refusal names a remedy."""
    with pytest.raises(openai.BadRequestError) as refused:
        await api.client().responses.compact(model=MODEL, **fields)
    assert ": " in refused.value.message
