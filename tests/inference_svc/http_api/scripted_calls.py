"""An answer with a thought, a text and two calls, as a model of gpt-oss's family writes it."""

from inference_svc.core.chat import ChoiceKind, Tool, ToolUse
from inference_svc.core.tools.formats import FORMATS
from inference_svc.core.turn_record import AnswerToken, Finished, Usage
from inference_svc.http_api.answer_parts import Reading

TEXT = (
    "<|channel|>analysis<|message|>Two words.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": 1}'
    "<|call|>"
    '<|start|>assistant<|channel|>commentary to=functions.see<|message|>{"b": "é"}<|call|>'
)
TOKENS = [AnswerToken(1, TEXT[at : at + 3], -0.5, ((1, -0.5),)) for at in range(0, len(TEXT), 3)]
USE = ToolUse((Tool("look"), Tool("see")))
READING = Reading(FORMATS["gpt-oss"], USE, "call_{}".format)


def calling(reason="stop"):
    """Return the end of that answer."""
    usage = Usage(history_tokens=30, reused_tokens=28, new_tokens=5, output_tokens=len(TOKENS))
    return Finished(reason, TEXT, usage, 3)


FORCED_TEXT = (
    '<tool_call>\n{"name": "see", "arguments": {"a": [1, "é\\n"], "b": 1.50}}\n</tool_call>'
)
HEADS = {name: f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("look", "see")}
FORCED = Reading(
    FORMATS["hermes"],
    ToolUse(USE.tools, ChoiceKind.REQUIRED),
    "call_{}".format,
    heads=HEADS,
)


def forced_tokens(cut):
    """Return the tokens of an answer that has to be a call, up to its cut, and its end."""
    text = FORCED_TEXT[:cut]
    tokens = [AnswerToken(1, text[at : at + 2]) for at in range(0, len(text), 2)]
    usage = Usage(history_tokens=30, new_tokens=5, output_tokens=len(tokens))
    return tokens, Finished("stop" if text == FORCED_TEXT else "length", text, usage, 3)
