"""Small chat templates that use arguments and user names in the places where real ones do."""

from tests.tool_templates import EMPTY_THOUGHT, NL, Family, chatml
from tests.tool_templates import UNTHINKING as EMPTY_LINES

_OPEN, _CLOSE = "<|im_start|>", "<|im_end|>"
_TOKENS = {"special": (_OPEN, _CLOSE), "ends": (_CLOSE,), "call_format": "json"}
_EFFORT = _OPEN + "system" + NL + "Effort: {{ reasoning_effort | default('medium') }}" + _CLOSE + NL
_MESSAGES = (
    "{% for m in messages %}"
    + _OPEN
    + "{{ m.role }}"
    + NL
    + "{{ m.content }}"
    + _CLOSE
    + NL
    + "{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}" + _OPEN + "assistant" + NL

UNTHINKING = "<think></think>"  # ends with another token than other prompts
_THOUGHT = "{% if enable_thinking is false %}" + UNTHINKING + "{% endif %}{% endif %}"
_MARKS = ("<think>", "</think>")

EFFORTFUL = Family(_EFFORT + _MESSAGES + _PROMPT + _THOUGHT, **_TOKENS, added=_MARKS)
PICKY = Family(
    "{% if reasoning_effort is defined and reasoning_effort not in ('none', 'high') %}"
    "{{ raise_exception('effort is none or high') }}{% endif %}" + EFFORTFUL.template,
    **_TOKENS,
)
STYLED = Family(  # the argument is written around every message
    _MESSAGES.replace("{{ m.role }}", "{{ m.role }}{{ style | default('') }}")
    + _PROMPT.replace("assistant", "assistant{{ style | default('') }}")
    + "{% endif %}",
    **_TOKENS,
)
DATED = Family(
    "{% if messages[0].role == 'system' %}{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}{% endif %}"
    + EFFORTFUL.template,
    **_TOKENS,
)
NAMED = Family(  # a user's name follows half of a token's name
    _MESSAGES.replace("{{ m.role }}", "{{ m.role }}{% if m.name %} <|{{ m.name }}{% endif %}")
    + _PROMPT
    + "{% endif %}",
    **_TOKENS,
)
THINKING = Family(
    chatml("{{ c.function.arguments | tojson }}", before_last=EMPTY_THOUGHT, prompt=EMPTY_LINES),
    **_TOKENS,
    added=_MARKS,
)
