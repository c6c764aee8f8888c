"""What all requests have in common: the names of their turns."""

from types import SimpleNamespace

import pytest

from inference_svc.core.tools.formats import FORMATS
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.requests import TurnRequest
from inference_svc.http_api.sessions.history_chain import HistoryChain
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.openai_settings import OpenAISettings
from shared.access.identity import Identity


class Headers:
    """The headers of a request that a turn needs."""

    path = "/v1/chat/completions"

    def __init__(self, **headers):
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Templateless:
    """What a request needs of the gateway, for a model whose template writes no tools."""

    text = SimpleNamespace(
        tool_format=FORMATS["json"], thoughts=None, named_roles=frozenset({"user"})
    )

    def heads_of_calls(self, use):
        return {tool.name: f'{{"name": "{tool.name}", "arguments": ' for tool in use.tools}

    def binds_calls(self, use):
        return not use.is_forced


MODEL = Templateless()


ANN = Caller(Identity("ann", "token", ("acme",), frozenset({"client"})), "acme")


def turn_of(headers=None, digest=b"body", trusted=(), by_key=(), **fields):
    body = decode(
        ChatBody, {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    )
    chain = HistoryChain(b"k" * 32, "acme", "model")
    asked = TurnRequest(
        Headers(**(headers or {})),
        ANN,
        body,
        digest,
        chain,
        OpenAISettings(
            temperature=0.5,
            unstored="deleted",
            named_by_header=trusted,
            named_by_cache_key=by_key,
        ),
        MODEL,
    )
    return asked.turn(body.conversation)


def test_a_session_may_be_named_in_the_body():
    """Only if it is to stay; agents' headers are a hint."""
    assert turn_of().session_id == ""
    assert turn_of(session_id="s").session_id == "s"
    assert turn_of({"X_Session_Id": "s"}).session_id == ""
    assert not turn_of({"X_Session_Id": "s"}).is_final
    assert turn_of({"X_Dynamo_Session_Final": "true"}).is_final
    with pytest.raises(RequestError, match="but store is false"):
        turn_of(session_id="s", store=False)


def test_headers_of_a_trusted_client_name_the_session():
    """A gateway's may be trusted; the body has precedence, and a cache key names nothing."""
    named = {"X_Session_Id": "s"}
    assert turn_of(named, trusted=("ann",)).session_id == "s"
    assert turn_of(named, trusted=("bob",)).session_id == ""
    assert turn_of(named, trusted=("ann",), session_id="t").session_id == "t"
    assert turn_of(trusted=("ann",), prompt_cache_key="s").session_id == ""
    with pytest.raises(RequestError, match="but store is false"):
        turn_of(named, trusted=("ann",), store=False)


def test_the_cache_key_of_a_trusted_client_names_the_session():
    """After the body's name and the headers, as far as these are trusted."""
    key, named = {"prompt_cache_key": "k"}, {"X_Session_Id": "s"}
    assert turn_of(by_key=("ann",), **key).session_id == "k"
    assert turn_of(by_key=("bob",), **key).session_id == ""
    assert turn_of(named, by_key=("ann",)).session_id == ""
    assert turn_of(named, by_key=("ann",), **key).session_id == "k"
    assert turn_of(named, trusted=("ann",), by_key=("ann",), **key).session_id == "s"
    assert turn_of(by_key=("ann",), session_id="t", **key).session_id == "t"
    with pytest.raises(RequestError, match="but store is false"):
        turn_of(by_key=("ann",), store=False, **key)


def test_a_repeat_has_the_same_request_id():
    """If its body is the same, too; without a key each request is new."""
    key = {"Idempotency_Key": "again"}
    first, second, other = turn_of(key), turn_of(key), turn_of(key, digest=b"other")
    assert first.request_id == second.request_id != other.request_id
    assert first.repeat_key == second.repeat_key == other.repeat_key
    assert turn_of().request_id != turn_of().request_id
    assert turn_of().repeat_key is None


def test_the_settings_temperature_is_the_default():
    """0 is a value."""
    assert turn_of().sampling["temperature"] == 0.5
    assert turn_of(temperature=0).sampling["temperature"] == 0


def test_unused_names_are_dropped():
    """Templates do not write them, but histories would differ; tools keep theirs."""
    said = [
        {"role": "system", "content": "a", "name": "Ann"},
        {"role": "user", "content": "b", "name": "Bo"},
        {"role": "tool", "content": "c", "name": "look", "tool_call_id": "c1"},
    ]
    assert [one.name for one in turn_of(messages=said).messages] == ["", "Bo", "look"]


def test_a_continued_answer_is_no_forced_call():
    """It cannot be forced; it may call a tool."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    begun = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "continue_final_message": True,
        "tools": tools,
    }
    assert turn_of(**begun).reading.beginning == "b"
    assert "grammar" in turn_of(**begun, response_format={"type": "json_object"}).sampling
    with pytest.raises(
        RequestError, match="that continues a message cannot be a tool call"
    ) as refused:
        turn_of(**begun, tool_choice="required")
    assert refused.value.param == "tool_choice"
