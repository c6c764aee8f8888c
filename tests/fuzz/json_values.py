"""JSON that clients might send: known names and words of bodies, with any values."""

from hypothesis import strategies as st

from inference_svc.http_api.anthropic.bodies import MessagesBody
from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.openai.completions import CompletionBody
from inference_svc.http_api.openai.embeddings import EmbeddingsBody
from inference_svc.http_api.openai.responses.input_items import pack_summary
from inference_svc.http_api.openai.responses.response_body import ResponseBody

NAMES = sorted(
    {
        *ChatBody.ignored,
        *ChatBody.refused,
        *ResponseBody.refused,
        *MessagesBody.ignored,
        *MessagesBody.refused,
        *CompletionBody.refused,
        *CompletionBody.model_fields,
        *EmbeddingsBody.model_fields,
        *("model", "messages", "input", "instructions", "temperature", "top_p", "seed", "stop"),
        *("max_tokens", "max_output_tokens", "logprobs", "top_logprobs", "stream", "metadata"),
        *("stream_options", "store", "session_id", "include", "truncation", "text", "top_k"),
        *("logit_bias", "frequency_penalty", "min_tokens", "stop_token_ids"),
        *("role", "content", "type", "format", "previous_response_id", "include_usage"),
        *("tools", "tool_choice", "tool_calls", "tool_call_id", "function", "parameters", "name"),
        *("conversation", "items", "background", "encrypted_content"),
        *("arguments", "call_id", "id", "output", "parallel_tool_calls", "strict", "description"),
        *("input_schema", "tool_use_id", "is_error"),
        *("system", "stop_sequences", "cache_control", "ttl", "output_config", "effort"),
        *("prompt_cache_options", "prompt_cache_retention", "mode"),
    }
)
WORDS = [
    "user",
    "assistant",
    "system",
    "text",
    "message",
    "input_text",
    "auto",
    "required",
    "function",
    "function_call",
    "function_call_output",
    "reasoning",
    "compaction",
    pack_summary("What?", "This."),
    "tool",
    "{}",
    "json_schema",
    "5m",
    "24h",
]
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
anything = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
