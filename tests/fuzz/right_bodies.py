"""Valid bodies for each path of the HTTP API that takes one."""

from collections.abc import Mapping, Sequence
from typing import Any

MODEL = "tiny"

ASKED = [{"role": "user", "content": "What is kept?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"enum": ["tier", "turn"]}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP = {"name": "look_up", "description": "Looks a word up.", "parameters": PARAMETERS}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
TOLD = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "A word."},
]
ITEMS = [
    {"type": "message", "role": "user", "content": "What is kept?"},
    {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "A word."},
]
RESULT = [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "A"}]}]
BLOCKS = [
    *ASKED,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    {"role": "user", "content": RESULT},
]
CACHED = {"type": "ephemeral", "ttl": "1h"}
NOTES = {"metadata": {"a": "b"}}
_CHAT = {"model": MODEL, "messages": ASKED, "max_tokens": 3, "store": True}
_RESPONSE = {"model": MODEL, "input": "What is kept?", "max_output_tokens": 3}
_MESSAGE = {"model": MODEL, "messages": ASKED, "max_tokens": 3}
# Valid bodies, by path; the first of each is answered in any state.
VALID: Mapping[str, Sequence[dict[str, Any]]] = {
    "/v1/chat/completions": (
        {**_CHAT, **NOTES},
        {**_CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "seed": 1},
        {**_CHAT, "tools": [{"type": "function", "function": LOOK_UP}], "messages": TOLD},
        {
            **_CHAT,
            "tools": [{"type": "function", "function": LOOK_UP}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stream": True,
        },
        {
            **_CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "w", "schema": PARAMETERS},
            },
        },
        {**_CHAT, "structured_outputs": {"regex": "[a-z]+"}, "logprobs": True, "top_logprobs": 2},
        {**_CHAT, "session_id": "named", "prompt_cache_key": "k", "logit_bias": {"5": -100}},
        {
            **_CHAT,
            "messages": [*ASKED, {"role": "assistant", "content": "In"}],
            "continue_final_message": True,
            "chat_template_kwargs": {"a": 1},
            "prediction": {"type": "content", "content": "Keys and values."},
        },
        {**_CHAT, "frequency_penalty": 1, "stop": ["a"], "min_tokens": 1, "stop_token_ids": [5]},
    ),
    "/v1/chat/completions/{id}": (NOTES,),
    "/v1/responses": (
        {**_RESPONSE, **NOTES, "background": True},
        {**_RESPONSE, "background": True, "stream": True},
        {**_RESPONSE, "background": True, "conversation": "MARK_conversation_0"},
        {**_RESPONSE, "conversation": {"id": "MARK_conversation_0"}, "instructions": "Be brief."},
        {**_RESPONSE, "previous_response_id": "MARK_response_0", "stream": True},
        {**_RESPONSE, "previous_response_id": "MARK_response_1", "background": True},
        {**_RESPONSE, "input": ITEMS, "tools": [{"type": "function", **LOOK_UP}], "store": False},
        {
            **_RESPONSE,
            "text": {"format": {"type": "json_schema", "name": "w", "schema": PARAMETERS}},
            "prompt_cache_options": {"ttl": "1h"},
            "reasoning": {"effort": "low"},
            "truncation": "auto",
        },
        {**_RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    ),
    "/v1/responses/compact": (
        _RESPONSE,
        {**_RESPONSE, "previous_response_id": "MARK_response_0"},
        {**_RESPONSE, "input": ITEMS},
    ),
    "/v1/responses/input_tokens": (
        {"input": "What is kept?"},
        {"input": ITEMS, "tools": [{"type": "function", **LOOK_UP}], "instructions": "Be brief."},
        {"input": "And?", "previous_response_id": "MARK_response_0"},
        {"input": "And?", "conversation": "MARK_conversation_0"},
    ),
    "/v1/responses/{id}/cancel": ({},),
    "/v1/conversations": ({"items": ITEMS, **NOTES}, {}),
    "/v1/conversations/{id}": (NOTES,),
    "/v1/conversations/{id}/items": ({"items": ITEMS},),
    "/v1/completions": (
        {"model": MODEL, "prompt": "Once", "max_tokens": 3},
        {"model": MODEL, "prompt": ["Once", "Twice"], "max_tokens": 3, "stream": True, "n": 2},
        {"model": MODEL, "prompt": [1, 2], "max_tokens": 3, "logprobs": 1, "session_id": "raw"},
    ),
    "/v1/embeddings": (
        {"model": MODEL, "input": ["What?", "That."], "dimensions": 4},
        {"model": MODEL, "input": [[1, 2], [3]], "encoding_format": "base64"},
    ),
    "/v1/messages": (
        _MESSAGE,
        {
            **_MESSAGE,
            "messages": BLOCKS,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": CACHED}],
            "tools": [{"name": "f", "input_schema": PARAMETERS}],
            "stream": True,
        },
        {
            **_MESSAGE,
            "tools": [{"name": "f", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        },
        {
            **_MESSAGE,
            "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
            "stop_sequences": ["a"],
            "cache_control": CACHED,
        },
    ),
    "/v1/messages/count_tokens": (
        {"model": MODEL, "messages": ASKED},
        {"model": MODEL, "messages": BLOCKS, "tools": [{"name": "f", "input_schema": PARAMETERS}]},
    ),
    "/tokenize": (
        {"prompt": "What is kept?", "return_token_strs": True},
        {"messages": ASKED, "add_generation_prompt": False},
    ),
    "/detokenize": ({"tokens": [1, 2, 3]},),
}
