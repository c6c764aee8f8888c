"""When an answer ends, and which text may be shown before."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.answers import GrowingAnswer, SamplingParams
from inference_svc.core.errors import InvalidGrammarError, InvalidSamplingError
from inference_svc.core.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind, schema_grammar
from inference_svc.core.turn_record import AnswerToken, FinishReason

EOS = 99


def write(texts, **params):
    """Push texts as tokens 0, 1, 2…; return (shown text, finish reason, answer)."""
    answer = GrowingAnswer(SamplingParams(**params), frozenset({EOS}))
    shown = ""
    for token_id, text in enumerate(texts):
        tokens, reason = answer.push(AnswerToken(token_id, text))
        shown += "".join(token.text for token in tokens)
        if reason is not None:
            return shown + answer.cut_text, reason, answer
    return shown, None, answer


def test_an_end_token_ends_the_answer_and_belongs_to_it():
    """The end-of-turn token is kept, so that the next turn's template can see it."""
    answer = GrowingAnswer(SamplingParams(), frozenset({EOS}))
    answer.push(AnswerToken(1, "a"))
    assert answer.push(AnswerToken(EOS, "")) == ([AnswerToken(EOS, "")], FinishReason.STOP)
    assert [token.token_id for token in answer.kept] == [1, EOS]


def test_ignore_eos_continues_the_answer():
    """Benchmarks want answers of a given length."""
    answer = GrowingAnswer(SamplingParams(ignore_eos=True, max_tokens=2), frozenset({EOS}))
    assert answer.push(AnswerToken(EOS, ""))[1] is None
    assert answer.push(AnswerToken(1, "a"))[1] is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_the_answer_and_belongs_to_it(ignore_eos):
    """Also where end-of-turn tokens do not; withheld text is shown."""
    params = SamplingParams(stop_token_ids=(7, 8), ignore_eos=ignore_eos, stop=("STOP",))
    answer = GrowingAnswer(params, frozenset({EOS}))
    first, last = AnswerToken(1, "aS"), AnswerToken(8, "T")
    assert answer.push(first) == ([], None)
    assert answer.push(last) == ([first, last], FinishReason.STOP)
    assert (answer.kept, answer.stop_string) == ([first, last], "")


@pytest.mark.parametrize("token_id", [EOS, 7])
def test_a_short_answer_is_not_ended(token_id):
    """Until it has its minimum length."""
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,))
    answer = GrowingAnswer(params, frozenset({EOS}))
    reasons = [answer.push(AnswerToken(token_id, ""))[1] for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]


def test_the_minimum_may_equal_the_maximum():
    """`max_tokens` ends the answer in any case."""
    shown, reason, answer = write(["a", "b", "S"], stop=("S",), min_tokens=3, max_tokens=3)
    assert (shown, reason, answer.num_held) == ("abS", FinishReason.LENGTH, 0)


@pytest.mark.parametrize(
    ("texts", "shown", "kept"),
    [
        (["STOP", "b", "cSTOP"], "STOPbc", 2),  # within what must be there
        (["a", "bST", "OP", "STOP"], "abSTOP", 3),  # begins in it
        (["a", "b", "STOP"], "ab", 2),  # begins just behind it
    ],
)
def test_a_stop_string_begins_behind_the_minimum(texts, shown, kept):
    """The text of those tokens is shown as it comes, and stays."""
    got, reason, answer = write(texts, stop=("STOP",), min_tokens=2)
    assert (got, reason) == (shown, FinishReason.STOP)
    assert len(answer.kept) == kept
    answer = GrowingAnswer(SamplingParams(stop=("STOP",), min_tokens=1), frozenset())
    first, second = AnswerToken(1, "S"), AnswerToken(2, "S")
    assert answer.push(first) == ([first], None)
    assert answer.push(second) == ([], None)


def test_max_tokens_ends_the_answer_and_releases_withheld_text():
    """Text that might have become a stop string is shown when no more can come."""
    shown, reason, _ = write(["ab", "cS", "T"], stop=("STOP",), max_tokens=3)
    assert (shown, reason) == ("abcST", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("texts", "shown", "kept"),
    [
        (["ab", "STOP", "c"], "ab", 1),
        (["ab", "S", "TO", "P"], "ab", 1),
        (["ab", "cS", "TO", "Px"], "abc", 1),
        (["abSTOPc"], "ab", 0),
        (["S", "TO", "x", "STOP"], "STOx", 3),
        (["é", "", "STOP"], "é", 1),  # a token that began a character, which the cut removed
    ],
)
def test_a_stop_string_and_later_text_are_not_shown(texts, shown, kept):
    """A stop string may span tokens, and begin or end inside one."""
    got, reason, answer = write(texts, stop=("STOP",))
    assert (got, reason) == (shown, FinishReason.STOP)
    assert len(answer.kept) == kept


def test_the_earliest_of_several_stop_strings_counts():
    """Whichever begins first in the text cuts it."""
    shown, _, answer = write(["one two"], stop=("two", "ne"))
    assert (shown, answer.stop_string) == ("o", "ne")
    assert write(["one two"], stop=("three",))[2].stop_string == ""


@given(
    st.lists(st.text("abS", max_size=3), max_size=12),
    st.lists(st.text("abS", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_shown_text_is_the_text_up_to_the_first_stop(texts, stops, least):
    """With any tokens: no part of a stop string is shown, and nothing else is lost.

    Text of the tokens up to the minimum length is always shown.
    """
    shown, reason, answer = write(texts, stop=tuple(stops), max_tokens=1000, min_tokens=least)
    must, texts = "".join(texts[:least]), texts[least:]
    assert shown.startswith(must)
    shown, whole = shown[len(must) :], "".join(texts)
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    if reason is None:
        assert not cuts
        held = "".join(token.text for token in answer._held)
        assert shown + held == whole
    else:
        # Tokens were pushed only up to the one that completed a stop string.
        completed = min(whole.find(stop) + len(stop) for stop in stops if stop in whole)
        pushed = ""
        for text in texts:
            pushed += text
            if len(pushed) >= completed:
                break
        assert shown == pushed[: min(pushed.find(stop) for stop in stops if stop in pushed)]


# --------------------------------------------------------------------------------- sampling values


def test_defaults_are_greedy_and_valid():
    """No value given means greedy decoding."""
    SamplingParams().check()
    assert SamplingParams().temperature == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": 100.5}, "temperature 100.5"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_p": 0.0}, "top_p 0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.0}, "min_p 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0"),
        ({"repetition_penalty": 100.5}, "repetition_penalty 100.5"),
        ({"frequency_penalty": 2.5}, "frequency_penalty 2.5 is not in"),
        ({"frequency_penalty": math.nan}, "frequency_penalty nan"),
        ({"presence_penalty": -2.5}, "presence_penalty -2.5 is not in"),
        ({"presence_penalty": math.inf}, "presence_penalty inf"),
        ({"logit_bias": {5: 1.0, 6: -100.5}}, "logit_bias of -100.5"),
        ({"logit_bias": {5: math.nan, 6: 101.0}}, "logit_bias of nan"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "301 tokens, more than 300"),
        ({"stop_token_ids": tuple(range(65))}, "65 stop_token_ids are more than 64"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is more than max_tokens 8"),
        ({"logprobs": 21}, "logprobs 21"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"stop": ("end", "x" * 257)}, "longer than 256 characters"),
        ({"stop": ("x",) * 17}, "17 stop strings"),
    ],
)
def test_each_bad_value_is_reported(values, said):
    """The message has the value and the accepted ones."""
    with pytest.raises(InvalidSamplingError, match=said):
        SamplingParams(**values).check()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "logprobs": 0},
        {"temperature": 100.0, "repetition_penalty": 100.0, "logprobs": 20},
        {"stop": ("x", *["x" * 256] * 15), "max_tokens": 1, "min_tokens": 1},
        {"frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"logit_bias": dict.fromkeys(range(300), -100.0), "stop_token_ids": tuple(range(64))},
        {"logit_bias": {0: 100.0}},
    ],
)
def test_the_bounds_themselves_are_valid(values):
    """They are in their ranges."""
    SamplingParams(**values).check()


def test_all_problems_come_in_one_error():
    """A client learns of every error from one answer."""
    with pytest.raises(InvalidSamplingError) as caught:
        SamplingParams(temperature=-1, top_p=2, max_tokens=0).check()
    assert str(caught.value).count(";") == 2


def test_withheld_text_is_released_at_the_end():
    """An answer that is ended from outside has all of its text; once."""
    answer = GrowingAnswer(SamplingParams(stop=("STOP",)), frozenset({EOS}))
    assert answer.push(AnswerToken(1, "aS")) == ([], None)
    assert answer.push(AnswerToken(2, "T")) == ([], None)
    assert answer.num_held == 2
    assert answer.end() == answer.kept == [AnswerToken(1, "aS"), AnswerToken(2, "T")]
    assert (answer.num_held, answer.end()) == (0, [])


# ---------------------------------------------------------------------------- answers by a grammar


def test_an_answer_by_a_grammar_is_not_cut():
    """Neither a stop string nor a stop token ends it: half a document would be useless."""
    grammar = schema_grammar({"type": "object"})
    params = SamplingParams(stop=("STOP",), stop_token_ids=(1,), grammar=grammar)
    answer = GrowingAnswer(params, frozenset({EOS}))
    for token_id, text in enumerate(["{", '"ST', "OP", '":1}']):
        shown, reason = answer.push(AnswerToken(token_id, text))
        assert ([token.text for token in shown], reason) == ([text], None)
    assert answer.push(AnswerToken(EOS, ""))[1] is FinishReason.STOP
    assert answer.stop_string == ""


@pytest.mark.parametrize("given", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_keeps_an_answer_from_ending_goes_with_no_grammar(given):
    """It has to end where its grammar does."""
    with pytest.raises(InvalidSamplingError, match="ends where the grammar does"):
        SamplingParams(grammar=schema_grammar({}), **given).check()


@pytest.mark.parametrize("source", ["", "x" * (MAX_GRAMMAR_CHARACTERS + 1)])
def test_the_length_of_a_grammar_is_bounded(source):
    """Compiling takes time; none is none."""
    with pytest.raises(InvalidGrammarError, match=f"grammar of 1 to {MAX_GRAMMAR_CHARACTERS}"):
        SamplingParams(grammar=Grammar(GrammarKind.REGEX, source)).check()


def test_only_max_tokens_ends_an_answer_within_a_call():
    """Stop strings are searched before it, in its last token, and behind."""
    params = SamplingParams(stop=("b", "zz"), stop_token_ids=(7,), max_tokens=9)
    answer = GrowingAnswer(params, frozenset({EOS}))
    assert answer.push(AnswerToken(1, "z")) == ([], None)
    for text in ("z", "b", "zz"):  # withheld text is part of no stop string any more
        shown, reason = answer.push(AnswerToken(7, text), is_in_call=True)
        assert (shown[-1].text, reason, answer.num_held) == (text, None, 0)
    assert "".join(token.text for token in answer.kept) == "zzbzz"
    assert answer.push(AnswerToken(1, "z")) == ([], None)
    assert answer.push(AnswerToken(7, "y"))[1] is FinishReason.STOP
    answer = GrowingAnswer(SamplingParams(max_tokens=1), frozenset())
    assert answer.push(AnswerToken(1, "{"), is_in_call=True)[1] is FinishReason.LENGTH
