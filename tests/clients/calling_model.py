"""A model for agents: it answers a question with a tool call, and the result with words."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.scripted_model import build_scripted_model
from tests.tool_templates import FAMILIES, Family, tokenizer_of

ASKED, TOLD = "[ASKED]", "[TOLD]"  # before an answer: whether the previous one was not a call
ANSWER = ("All of it ", "is kept.")
WINDOW_TOKENS = 131_072  # agents' instructions are long, with a tokenizer as small as this one
# As Mistral writes calls. Text that agents append to a question or a result has no effect.
TEMPLATE = (
    "{% set next = namespace(is='[ASKED]') %}{% for m in messages %}{% if m.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ next.is }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% set next.is = '[TOLD]' if m.tool_calls else '[ASKED]' %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ next.is }}{% endif %}"
)
_LIKE = FAMILIES["mistral_named"]
FAMILY = Family(TEMPLATE, (*_LIKE.special, ASKED, TOLD), _LIKE.ends, _LIKE.call_format, _LIKE.marks)


def build_calling_model(directory: Path, tool: str, arguments: Mapping[str, str]) -> Path:
    """Write a model that calls a tool with these arguments, and then answers ANSWER."""
    tokenizer = tokenizer_of(FAMILY)
    answers = {
        ASKED: ("[TOOL_CALLS]", tool, "[ARGS]", json.dumps(arguments)),
        TOLD: ANSWER,
    }
    by_token = {tokenizer.convert_tokens_to_ids(mark): said for mark, said in answers.items()}
    return build_scripted_model(directory, tokenizer, by_token, FAMILY.ends[-1], WINDOW_TOKENS)
