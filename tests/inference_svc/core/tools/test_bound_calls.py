"""The grammars of calls, from the brace of the arguments on."""

from inference_svc.core.chat import Tool
from inference_svc.core.tools.bound_calls import ANY_TOOL, BoundCalls
from inference_svc.core.tools.formats import FORMATS, PLAIN
from inference_svc.core.tools.parts import MAX_BLANKS

SCHEMA = {"properties": {"n": {"const": 1}}, "propertyNames": {"maxLength": 1}}


def grammars_of(tools, name="hermes", special=None):
    """Return the grammars of calls, by tool, of a format with one closing mark."""
    calls = BoundCalls(tools, FORMATS[name].closings, PLAIN.reader)
    return {tool: found.source for (tool, _), found in calls.grammars(special or {})}


def test_only_strict_tools_have_their_own_grammars():
    """All others share one: any object."""
    found = grammars_of((Tool("a", "", SCHEMA), Tool("b", "", SCHEMA, is_strict=True)))
    assert set(found) == {ANY_TOOL, "b"}
    assert '"const": 1' in found["b"]
    assert '"lenient": false' in found["b"]
    assert "const" not in found[ANY_TOOL]


def test_a_call_is_closed_by_a_special_token_if_there_is_one():
    """Or spelled; behind a limited number of blanks, as within the arguments."""
    (spelled,) = grammars_of((Tool("a"),)).values()
    (token,) = grammars_of((Tool("a"),), special={"</tool_call>": 7}).values()
    assert 'BLANKS "</tool_call>" ANY' in spelled
    assert 'BLANKS (<[7]> | "</tool_call>") ANY' in token
    assert spelled.count(f"{{0,{MAX_BLANKS}}}") > 1


def test_formats_with_several_closing_marks_have_several_grammars():
    """One for each; some have none."""
    for name, num in {"hermes": 1, "mistral": 2, "deepseek": 2, "gpt-oss": 1}.items():
        calls = BoundCalls((Tool("a"),), FORMATS[name].closings, PLAIN.reader)
        assert len(list(calls.grammars({}))) == num
    (bare,) = grammars_of((Tool("a"),), "gpt-oss").values()
    assert "BLANKS" not in bare.splitlines()[0]
