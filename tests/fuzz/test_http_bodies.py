"""Any body of a client is decoded or refused."""

import json

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.http_api.anthropic.bodies import MessagesBody
from inference_svc.http_api.bodies.body import TurnBody, decode
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.openai.completions import CompletionBody
from inference_svc.http_api.openai.conversations import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
)
from inference_svc.http_api.openai.dialect import error_object
from inference_svc.http_api.openai.embeddings import EmbeddingsBody
from inference_svc.http_api.openai.messages import stored_messages
from inference_svc.http_api.openai.responses.compaction import CompactBody
from inference_svc.http_api.openai.responses.input_items import (
    messages_of,
    objects_of,
    pack_summary,
    with_ids,
)
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.openai.stored_chats import ChatMetadataBody
from inference_svc.http_api.replies import json_bytes
from inference_svc.http_api.request_slots import parse_object
from inference_svc.http_api.tokens import TokenizeBody
from inference_svc.service.submissions import chat_input
from tests.fuzz.json_values import NAMES, WORDS, anything

TEXT = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [None, 1.5]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [TEXT], "is_error": True}
THOUGHT = {"type": "thinking", "thinking": "a", "signature": ""}
BLOCKS = {"user": [TEXT, RESULT], "assistant": [TEXT, CALL, THOUGHT], "system": [TEXT]}
OF_TOOLS = sorted({*CALL, *RESULT, *THOUGHT, "cache_control", "input_schema", "description"})
function = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", ""]) | anything},
    optional={
        "arguments": st.sampled_from(["{}", '{"a": 1}', "[", ""]) | anything,
        "parameters": anything,
        "description": anything,
    },
)
called = st.fixed_dictionaries(
    {"function": function, "type": st.just("function") | anything}, optional={"id": anything}
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from([*WORDS, 5]), "content": anything},
    optional={
        "name": anything,
        "type": anything,
        "tool_calls": st.lists(called, max_size=2) | anything,
        "tool_call_id": st.just("c") | anything,
        "call_id": st.just("c") | anything,
        "output": anything,
        "encrypted_content": st.just(pack_summary("What?", "This.")) | anything,
    },
)
bodies = st.dictionaries(st.sampled_from(NAMES), anything, max_size=6).flatmap(
    lambda rest: st.fixed_dictionaries(
        {"model": st.just("m"), "messages": st.lists(message, max_size=3) | anything},
        optional={
            "tools": st.lists(called | function, max_size=2) | anything,
            "tool_choice": called | anything,
        },
    ).map(lambda given: {**rest, **given, "input": given["messages"], "items": given["messages"]})
)
wrong_members = st.dictionaries(st.sampled_from(OF_TOOLS), anything, max_size=2)
few_wrong = st.integers(0, 9).flatmap(lambda n: st.just({}) if n else wrong_members)


def whole(*objects):
    """Draw one of these objects, valid or mutated."""
    return st.builds(lambda one, wrong: {**one, **wrong}, st.sampled_from(objects), few_wrong)


said = st.sampled_from(sorted(BLOCKS)).flatmap(
    lambda role: st.fixed_dictionaries(
        {
            "role": st.just(role),
            "content": st.lists(whole(*BLOCKS[role]), max_size=3) | st.just("a"),
        }
    )
)
conversations = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "max_tokens": st.just(8),
        "messages": st.lists(said, max_size=4).map(
            lambda given: [*given, {"role": "user", "content": "?"}]
        ),
        "tools": st.lists(
            whole(*({"name": name, "input_schema": {"type": "object"}} for name in "fgh")),
            max_size=2,
            unique_by=lambda tool: str(tool["name"]),
        ),
    },
    optional={
        "tool_choice": whole({"type": "any"}, {"type": "tool", "name": "f"}, {"type": "none"}),
        "system": st.lists(whole(TEXT), max_size=2),
    },
)


def check_told(refused):
    """Check that a refusal is an object of its API, and short."""
    assert json.loads(json_bytes({"error": error_object(refused)}))
    assert len(str(refused)) < 1000


def check_listed(given):
    """Check that items can be stored, and shown as items that the service accepts again."""
    items = json.loads(json_bytes({"items": with_ids("resp_a", objects_of(given))}))["items"]
    assert len({item["id"] for item in items}) == len(items)
    again = decode(ItemsBody, {"items": items}).items
    assert messages_of(again) == messages_of(given)
    assert objects_of(again) == objects_of(given)


@given(bodies)
def test_a_body_is_decoded_or_refused(body):
    """No other exception is raised, and a refusal can be encoded."""
    refusals = []
    kinds = (
        ("input", ChatBody),
        ("messages", ResponseBody),
        ("messages", CompactBody),
        ("input", MessagesBody),
        ("input", CompletionBody),
        ("input", TokenizeBody),
        ("messages", EmbeddingsBody),
    )
    others = (ConversationBody, ItemsBody, MetadataBody, ChatMetadataBody)
    for left_out, kind in (
        *(({name, "items"}, kind) for name, kind in kinds),
        *(({*body} - {*kind.model_fields}, kind) for kind in others),
    ):
        given = {key: value for key, value in body.items() if key not in left_out}
        try:
            made = decode(kind, given)
            assert not isinstance(made, TurnBody) or made.tool_use is not None
            assert isinstance(getattr(made, "conversation", ()), tuple)
            if isinstance(made, ResponseBody):
                check_listed(made.input)
            if isinstance(made, ChatBody):
                assert json_bytes({"messages": stored_messages("chatcmpl-a", made.messages)})
            if isinstance(made, ConversationBody | ItemsBody):
                check_listed(made.items)
        except RequestError as refused:
            refusals.append(refused)
    for refused in refusals:
        check_told(refused)


@given(conversations)
def test_a_conversation_with_tools_is_read_or_refused(given):
    """Whatever its blocks are: accepted ones can be written into a prompt, completely."""
    try:
        body = decode(MessagesBody, given)
    except RequestError as refused:
        check_told(refused)
        return
    read = chat_input(body.conversation, body.tool_use.tools)
    assert json_bytes({"messages": read.as_messages(), "tools": read.as_tools()})
    blocks = [
        block
        for one in given["messages"]
        if isinstance(one["content"], list)
        for block in one["content"]
    ]
    for kind, found in (
        ("tool_use", [call for one in body.conversation for call in one.tool_calls]),
        ("tool_result", [one for one in body.conversation if one.role == "tool"]),
    ):
        assert len(found) == sum(block["type"] == kind for block in blocks)


@given(st.binary(max_size=64) | anything.map(lambda value: json.dumps(value).encode()))
def test_bytes_are_decoded_or_refused(data):
    """Whatever they are."""
    try:
        found = parse_object(data)
    except RequestError as refused:
        found = error_object(refused)
    assert isinstance(found, dict)
    assert json_bytes(found)
