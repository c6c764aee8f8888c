"""Models of several families that call tools unprompted, each in its own format.

Each is served for real, and always gives the same answer.
"""

import json

import pytest

from inference_svc.core.tools.formats import DEEPSEEK_MARKS
from tests.http_api.test_listening import local_client
from tests.http_api.test_tools import CHAT_TOOLS, TOOLS, return_results
from tests.inference_processes import InferenceProcess
from tests.sampled import sampled
from tests.scripted_model import build_scripted_model, last_of_prompt
from tests.tool_templates import FAMILIES, tokenizer_of

SAYS = ["I will ", "look it up.\n"]
ARGUMENTS = ['{"word": ', '"tüür", ', '"depth": 2}']
CALL = ['{"name": "look_up"', ', "arguments": ', *ARGUMENTS, "}"]
SECTION, BEGIN, BEHIND_TYPE, END, SECTION_END = DEEPSEEK_MARKS
ANSWERS = {  # in tokens, as models of the family write them; no token comes twice
    "qwen": [*SAYS, "<tool_call>", *CALL[:-1], "\n}", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]", " [", *CALL, "]"],
    "gpt_oss": [
        " to=functions.look_up",
        "<|channel|>",
        "commentary json",
        "<|message|>",
        *ARGUMENTS,
    ],
    "mistral_named": [*SAYS, "[TOOL_CALLS]", "look_up", "[ARGS]", *ARGUMENTS],
    "llama3": ["<|python_tag|>", '{"name": "look_up"', ', "parameters": ', *ARGUMENTS, "}"],
    "deepseek_v3": [
        *(*SAYS, SECTION, BEGIN, "function", BEHIND_TYPE, "look_up\n```json\n", *ARGUMENTS),
        *("\n```", END, SECTION_END),
    ],
    "gemma": CALL,
}
AFTER_RESULTS = "[/TOOL_RESULTS]"  # the last token of some prompts; of all others it is the same
TOLD = ["It is ", "a word."]


@pytest.mark.parametrize("name", sampled(list(ANSWERS), 2, seed=1, always=("qwen", "gpt_oss")))
async def test_a_model_calls_in_the_format_of_its_family(short_dir, name):
    """Streamed and whole, in chats and responses; the result continues the session."""
    family, pieces = FAMILIES[name], ANSWERS[name]
    tokenizer = tokenizer_of(family)
    script = {last_of_prompt(tokenizer): pieces}
    if AFTER_RESULTS in family.special:
        script[tokenizer.convert_tokens_to_ids(AFTER_RESULTS)] = TOLD
    model = build_scripted_model(short_dir / "model", tokenizer, script, family.ends[-1])
    socket = short_dir / "openai.sock"
    flags = ["--openai", f"unix:{socket}"]
    async with InferenceProcess(model, short_dir, None, flags), local_client(socket) as client:
        said = [{"role": "user", "content": "What is a tüür?"}]
        options = {"model": "model", "tools": CHAT_TOOLS, "temperature": 0}
        first = await client.chat.completions.create(messages=said, **options)
        (choice,) = first.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == ("".join(SAYS) if SAYS[0] in pieces else None)
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "look_up",
            {"word": "tüür", "depth": 2},
        )
        second = await client.chat.completions.create(
            messages=return_results(said, choice.message), **options
        )
        assert second.model_extra["session_id"] == first.model_extra["session_id"]
        told = second.choices[0].message
        assert told.content == "".join(TOLD) or len(told.tool_calls) == 1
        async with client.chat.completions.stream(messages=said, **options) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert (streamed.message.content or None) == choice.message.content
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        response = await client.responses.create(
            model="model", input=said, tools=TOOLS, temperature=0
        )
        assert response.output[-1].arguments == call.function.arguments
        plain = await client.chat.completions.create(messages=said, **options, tool_choice="none")
        assert plain.choices[0].message.tool_calls is None
        assert "look_up" in plain.choices[0].message.content
