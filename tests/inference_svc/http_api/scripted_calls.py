"""An answer that thinks, speaks and calls two tools, as a model of gpt-oss's family writes it."""

from inference_svc.core.answers import AnswerToken
from inference_svc.core.chat import Tool, ToolUse
from inference_svc.core.tools.registry import FORMATS
from inference_svc.core.turn_record import Finished, Usage
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
    """The end of that answer."""
    usage = Usage(history_tokens=30, reused_tokens=28, new_tokens=5, output_tokens=len(TOKENS))
    return Finished(reason, TEXT, usage, 3)
