"""Every causal language model of Transformers is served correctly, or refused with a reason.

`make test` examines a sample, `make test-long` all; docs/models.md lists the results.
"""

import copy

import pytest
import torch
import transformers

from tests.sampled import sampled, sampled_cases
from tests.zoo.architectures import architectures
from tests.zoo.checks import Case, stale, truncated
from tests.zoo.direct_service import Served
from tests.zoo.examination import SENSITIVE, TOLERANCE, examine
from tests.zoo.models import build_model
from tests.zoo.reference import Stock
from tests.zoo.table import committed_rows, committed_version, essence, rows

ARCHITECTURES = architectures()
# One of each mode, with and without positions, windows and states, and one to be refused.
ALWAYS = (
    "gemma3_text",
    "gpt2",
    "deepseek_v32",
    "diffllama",
    "bloom",
    "qwen3_next",
)
SAMPLED = 9


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Compute on one thread; keep Transformers' advice about random models out of the report."""
    torch.set_num_threads(1)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("name", sampled(list(ARCHITECTURES), SAMPLED, seed=6, always=ALWAYS))
def test_a_model_is_right_on_every_path_or_refused(name):
    """The result is the one that docs/models.md lists."""
    found = examine(ARCHITECTURES[name])
    assert found.failed == []
    if transformers.__version__ == committed_version():
        committed = committed_rows().get(name, "")
        assert essence(rows([found])[name]) == essence(committed), "run python -m tests.zoo.table"


@pytest.mark.parametrize(
    ("name", "positions"),
    sampled_cases(["llama", "deepseek_v3"], ["coupled", "naive"], count=2, seed=1),
)
def test_positions_can_be_chosen(name, positions):
    """A model that needs no positions in its rows stores them if it is asked to."""
    found = examine(ARCHITECTURES[name], positions)
    assert (found.positions, found.failed) == (positions, [])


def test_impossible_positions_are_refused():
    """A model whose positions are added to its input is not served decoupled."""
    found = examine(ARCHITECTURES["gpt2"], "decoupled")
    assert found.refusal == "model_positions_coupled"


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_check_notices_stale_keys(name):
    """Keys loaded as they had been embedded fail the check that re-embedded ones pass."""
    model = build_model(ARCHITECTURES[name])
    stock = Stock(copy.deepcopy(model))
    served = Served(model, name, "naive")
    case = Case(served, stock, served.loaded.vocab_size)
    assert stale(case) <= TOLERANCE
    assert truncated(case) >= SENSITIVE


def test_the_table_has_a_line_for_each_architecture():
    """docs/models.md has a line for each, and no others."""
    if transformers.__version__ != committed_version():
        pytest.skip(f"docs/models.md is about Transformers {committed_version()}")
    assert list(committed_rows()) == list(ARCHITECTURES)
