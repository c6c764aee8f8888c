"""Sampling values are checked all at once."""

import math

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import InvalidSamplingError


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
        ({"logprobs": 21}, "logprobs 21"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"stop": ("end", "x" * 257)}, "longer than 256 characters"),
        ({"stop": ("x",) * 17}, "17 stop strings"),
    ],
)
def test_each_bad_value_is_named(values, said):
    """The message names the value and what is accepted."""
    with pytest.raises(InvalidSamplingError, match=said):
        SamplingParams(**values).check()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "logprobs": 0},
        {"temperature": 100.0, "repetition_penalty": 100.0, "logprobs": 20},
        {"stop": ("x", *["x" * 256] * 15), "max_tokens": 1},
    ],
)
def test_the_bounds_themselves_are_good(values):
    """They are in their ranges."""
    SamplingParams(**values).check()


def test_all_problems_come_in_one_error():
    """A client learns everything that is wrong from one answer."""
    with pytest.raises(InvalidSamplingError) as caught:
        SamplingParams(temperature=-1, top_p=2, max_tokens=0).check()
    assert str(caught.value).count(";") == 2
