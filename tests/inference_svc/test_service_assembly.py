"""How a service is put together: what does not go with its model refuses the start."""

import pytest

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.service_assembly import turn_text
from tests.told_templates import EFFORTFUL, PICKY
from tests.tool_templates import tokenizer_of

LOW = {"reasoning_effort": "low"}


def test_arguments_that_the_template_refuses_refuse_the_start():
    """With its own words; a model that has no chats anyway is served as it is."""
    with pytest.raises(UnsupportedModelError, match="effort is none or high") as refused:
        turn_text(tokenizer_of(PICKY), frozenset(), LOW)
    assert "leave them out" in refused.value.remedy
    assert turn_text(tokenizer_of(PICKY), frozenset(), {"reasoning_effort": "high"}).usual
    assert turn_text(tokenizer_of(EFFORTFUL), frozenset(), LOW).usual == LOW
    wordless = tokenizer_of(EFFORTFUL)
    wordless.chat_template = None
    for tokenizer in (wordless, None):
        assert turn_text(tokenizer, frozenset(), LOW).chat_problem
