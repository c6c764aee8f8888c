"""The assembly of a service: settings that do not fit its model refuse the start."""

import pytest

from inference_svc.assembly import Model
from inference_svc.config import InferenceSettings
from inference_svc.core.chat import Tool, ToolUse
from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.service_assembly import assemble_service, make_turn_text
from tests.argument_templates import EFFORTFUL, PICKY
from tests.memory_engine import loaded_model
from tests.tool_templates import tokenizer_of

LOW = {"reasoning_effort": "low"}


def test_arguments_that_the_template_refuses_prevent_the_start():
    """With the template's error; a model without chats is served all the same."""
    with pytest.raises(UnsupportedModelError, match="effort is none or high") as refused:
        make_turn_text(tokenizer_of(PICKY), frozenset(), LOW)
    assert "leave them out" in refused.value.remedy
    assert make_turn_text(tokenizer_of(PICKY), frozenset(), {"reasoning_effort": "high"}).usual
    assert make_turn_text(tokenizer_of(EFFORTFUL), frozenset(), LOW).usual == LOW
    wordless = tokenizer_of(EFFORTFUL)
    wordless.chat_template = None
    for tokenizer in (wordless, None):
        assert make_turn_text(tokenizer, frozenset(), LOW).chat_problem


async def test_the_vocabulary_of_grammars_is_read_on_demand(tiny_model, tmp_path):
    """By the first request that needs it, or after the service is ready."""
    settings = InferenceSettings.model_validate({"cache": {"mode": "recompute"}})
    model = Model(*loaded_model(tiny_model))
    for is_asked in (True, False):
        parts = assemble_service(settings, model, TranscriptStore(tmp_path))
        assert parts.grammars._vocabulary is None
        if is_asked:
            assert parts.gateway.binds_calls(ToolUse((Tool("look_up", "", "{}"),)))
        else:
            assert parts.gateway.can_bind_calls()
        assert parts.grammars._vocabulary is not None
        parts.close()
