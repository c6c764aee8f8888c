"""Chat templates as families of models have them: how they write tools, calls and results.

Each is rewritten as short as possible, with the quirks of its family.
"""

from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from inference_svc.core.tools.formats import DEEPSEEK_MARKS
from inference_svc.runtime.turns.chat_text import TurnText
from tests.tokenizers import make_tokenizer

NL = "{{ '\\n' }}"


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        template: its chat template.
        special: its special tokens, beside those of the tokenizer.
        ends: the tokens that end answers.
        call_format: the format of calls that has to be detected.
        marks: tokens of the format.
        added: tokens that are added but not special.
        writes_tools: whether its template writes tools, and calls that are read.
        several: whether it writes several calls in one message.
    """

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    call_format: str
    marks: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    writes_tools: bool = True
    writes_calls: bool = True
    several: bool = True


def tokenizer_of(family: Family) -> PreTrainedTokenizerBase:
    """Return a small tokenizer with a family's tokens and template."""
    found = make_tokenizer("byte_level")
    found.add_special_tokens(
        {"extra_special_tokens": [*found.extra_special_tokens, *family.special]}
    )
    found.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    found.chat_template = family.template
    return found


def text_of(family: Family) -> TurnText:
    """Return the turn encoder of a family's model, tried out on its template."""
    tokenizer = tokenizer_of(family)
    text = TurnText(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(family.ends))))
    text.try_out()
    return text


def chatml(call: str, demands: str = "", prompt: str = "", before_last: str = "") -> str:
    """Build a ChatML template: tools in the system message, results grouped in a user's."""
    alone = "{% if loop.last %}" + before_last + "{% endif %}" if before_last else ""
    return (
        "{% if tools or messages[0].role == 'system' %}<|im_start|>system" + NL + ""
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}" + NL + "{% endif %}"
        "{% if tools %}Functions:" + NL + "<tools>" + NL + ""
        "{% for tool in tools %}{{ tool | tojson }}" + NL + "{% endfor %}</tools>{% endif %}"
        "<|im_end|>" + NL + "{% endif %}"
        "{% for m in messages %}{% set i = loop.index0 %}"
        "{% if m.role == 'tool' %}" + demands + ""
        "{% if messages[i - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        + NL
        + "<tool_response>"
        + NL
        + "{{ m.content }}"
        + NL
        + "</tool_response>"
        "{% if loop.last or messages[i + 1].role != 'tool' %}<|im_end|>" + NL + "{% endif %}"
        "{% elif m.tool_calls %}<|im_start|>assistant"
        + (NL + alone if alone else "")
        + "{% if m.content %}"
        + NL
        + "{{ m.content }}"
        "{% endif %}{% for c in m.tool_calls %}" + NL + "<tool_call>" + NL + call + NL + ""
        "</tool_call>{% endfor %}<|im_end|>" + NL + ""
        "{% elif m.role == 'system' and loop.first %}"
        "{% elif m.role in ('system', 'user', 'assistant') %}"
        "<|im_start|>{{ m.role }}"
        + NL
        + ("{% if m.role == 'assistant' %}" + alone + "{% endif %}" if alone else "")
        + "{{ m.content }}<|im_end|>"
        + NL
        + "{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant" + NL + prompt + "{% endif %}"
    )


_NAME_FIRST = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_NAME_LAST = '{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}'
_AS_XML = (
    "<function={{ c.function.name }}>{% for name, value in c.function.arguments | items %}"
    "<parameter={{ name }}>{{ value }}</parameter>{% endfor %}</function>"
)
EMPTY_THOUGHT = "<think>" + NL + NL + "</think>" + NL + NL  # before an answer that nothing follows
UNTHINKING = "{% if enable_thinking is false %}" + EMPTY_THOUGHT + "{% endif %}"
_CHATML = {"special": ("<|im_start|>", "<|im_end|>"), "ends": ("<|im_end|>",)}
_TAGS = ("<tool_call>", "</tool_call>")

LLAMA = (
    "{{ bos_token }}{% set told = namespace(tools=false) %}{% for m in messages %}"
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "<|start_header_id|>assistant<|end_header_id|>" + NL + NL + ""
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role in ('tool', 'ipython') %}"
    "<|start_header_id|>ipython<|end_header_id|>" + NL + NL + ""
    "{{ {'output': m.content} | tojson }}<|eot_id|>"
    "{% else %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>" + NL + NL + ""
    "{% if tools and m.role == 'user' and not told.tools %}{% set told.tools = true %}"
    "Functions:" + NL + "{% for tool in tools %}{{ tool | tojson }}" + NL + "{% endfor %}"
    "{% endif %}{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>"
    + NL
    + NL
    + "{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set last = namespace(user=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == last.user %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length < 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length < 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}"
    "[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
MISTRAL_NAMED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}"
    "{% elif m.role != 'system' %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
_BAR = "\uff5c"
_USER, _ASSISTANT, _FINISH, _RESULT, _RESULT_END = (
    f"<{_BAR}{name.replace(' ', '▁')}{_BAR}>"
    for name in ("User", "Assistant", "end of sentence", "tool output begin", "tool output end")
)
_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END = DEEPSEEK_MARKS
_DEEPSEEK_TOKENS = (_USER, _ASSISTANT, _FINISH, _RESULT, _RESULT_END, *DEEPSEEK_MARKS)


def deepseek(
    call: str,
    tools: str,
    prompt: str = "",
    *,
    prompts_after_results: bool = True,
) -> str:
    """Build a template without frames: one token before each message."""
    silent = "" if prompts_after_results else " and messages[-1].role != 'tool'"
    return (
        "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        + tools
        + "{% for m in messages %}"
        "{% if m.role == 'user' %}"
        + _USER
        + "{{ m.content }}"
        + "{% elif m.role == 'tool' %}"
        + _RESULT
        + "{{ m.content }}"
        + _RESULT_END
        + "{% elif m.role == 'assistant' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
        + _ASSISTANT
        + prompt
        + "{% endif %}{{ m.content }}{% if m.tool_calls %}"
        + _CALLS
        + "{% for c in m.tool_calls %}"
        + _CALL
        + call
        + _CALL_END
        + "{% endfor %}"
        + _CALLS_END
        + "{% endif %}"
        + _FINISH
        + "{% endif %}{% endfor %}"
        + "{% if add_generation_prompt"
        + silent
        + " %}"
        + _ASSISTANT
        + prompt
        + "{% endif %}"
    )


_FENCED = "{{ c.type }}" + _SEP + "{{ c.function.name }}" + NL + "```json" + NL
_FENCED += "{{ c.function.arguments | tojson }}" + NL + "```"
_BEHIND_NAME = "{{ c.function.name + '" + _SEP + "' + c.function.arguments }}"
_DEEPSEEK_TOOLS = "{% for tool in tools or [] %}" + NL + "{{ tool.function | tojson }}{% endfor %}"

GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|># Tools" + NL + "{% for tool in tools %}"
    "{{ tool.function.description }}: {{ tool.function.name }}"
    "{{ tool.function.parameters | tojson }}" + NL + "{% endfor %}<|end|>{% endif %}"
    "{% set called = namespace(name=none) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set called.name = f.name %}"
    "{% if m.content %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}"
    "{% if called.name is none %}{{ raise_exception('no call was made') }}{% endif %}"
    "<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}{% set called.name = none %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role in ('system', 'developer') %}"
    "<|start|>developer<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}" + NL + ""
    "{{ m.content | trim }}<end_of_turn>" + NL + "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model" + NL + "{% endif %}"
)


def bracket_marks(*names: str) -> tuple[str, ...]:
    """Return opening and closing marks of some names."""
    return tuple(f"[{mark}{name}]" for name in names for mark in ("", "/"))


FAMILIES = {
    "qwen": Family(chatml(_NAME_FIRST), **_CHATML, call_format="hermes", marks=_TAGS, added=_TAGS),
    "qwen_thinking": Family(
        chatml(_NAME_FIRST, prompt="<think>" + NL), **_CHATML, call_format="hermes"
    ),
    "qwen3": Family(
        chatml(_NAME_FIRST, before_last=EMPTY_THOUGHT, prompt=UNTHINKING),
        **_CHATML,
        call_format="hermes",
        marks=_TAGS,
        added=(*_TAGS, "<think>", "</think>"),
    ),
    "qwen3_thinking": Family(
        chatml(_NAME_FIRST, prompt="<think>" + NL, before_last=EMPTY_THOUGHT),
        **_CHATML,
        call_format="hermes",
    ),
    "hermes": Family(
        chatml(_NAME_LAST, "{% if not m.name %}{{ raise_exception('no name') }}{% endif %}"),
        **_CHATML,
        call_format="hermes",
    ),
    "llama3": Family(
        LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        ("<|eot_id|>",),
        "llama3",
        ("<|python_tag|>",),
        several=False,
    ),
    "mistral": Family(
        MISTRAL,
        (*bracket_marks("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS"), "[TOOL_CALLS]"),
        ("</s>",),
        "mistral",
        ("[TOOL_CALLS]",),
    ),
    "mistral_named": Family(
        MISTRAL_NAMED,
        (
            *bracket_marks("INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS"),
            *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ),
        ("</s>",),
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "mistral_thinking": Family(
        MISTRAL_NAMED + "{# [THINK]…[/THINK] #}",
        (
            *bracket_marks("INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS", "THINK"),
            *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ),
        ("</s>",),
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "deepseek_v3": Family(
        deepseek(_FENCED, _DEEPSEEK_TOOLS),
        _DEEPSEEK_TOKENS,
        (_FINISH,),
        "deepseek",
        DEEPSEEK_MARKS,
    ),
    "deepseek_v31": Family(
        deepseek(_BEHIND_NAME, "", "</think>", prompts_after_results=False),
        _DEEPSEEK_TOKENS,
        (_FINISH,),
        "deepseek",
        DEEPSEEK_MARKS,
        writes_tools=False,
    ),
    "gpt_oss": Family(
        GPT_OSS,
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
        ("<|return|>", "<|call|>"),
        "gpt-oss",
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
        several=False,
    ),
    "xml": Family(
        chatml(_AS_XML), **_CHATML, call_format="json", writes_tools=False, writes_calls=False
    ),
    "gemma": Family(
        GEMMA,
        ("<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        "json",
        writes_tools=False,
        writes_calls=False,
    ),
}
