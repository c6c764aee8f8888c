"""A context by each method: dropped tokens, remaining ones, and undoing."""

import pytest
import torch

from inference_svc.core.errors import InvalidDiscardError
from inference_svc.eval.options import METHODS
from inference_svc.eval.sequence import Sequence

TOKENS = [(7 * i + 3) % 256 for i in range(60)]
HOLES = [(4, 9), (20, 21), (30, 41)]
SAME = 1e-3  # of logits of about 10


def kept_tokens():
    return [token for i, token in enumerate(TOKENS) if not any(a <= i < b for a, b in HOLES)]


@pytest.mark.parametrize("method", METHODS)
def test_the_remaining_tokens_are_the_context(eval_model, method):
    """With several ranges at once; the window has room for as many tokens again."""
    with Sequence(eval_model, method) as context:
        context.feed(TOKENS, want="none")
        context.discard(HOLES)
        assert context.context_ids == kept_tokens()
        assert context.kv.free_tokens == eval_model.window_tokens - len(kept_tokens())
        assert context.feed([5, 6]).shape == (2, eval_model.loaded.vocab_size)


def test_stored_and_resident_rows_agree_after_holes(eval_model):
    """Keys from before RoPE and rotated keys are at the same positions."""
    logits = []
    for method in ("ca", "ca-shift"):
        with Sequence(eval_model, method) as context:
            context.feed(TOKENS, want="none")
            context.discard(HOLES)
            logits.append(context.feed([5, 6, 7]))
    assert float((logits[0] - logits[1]).abs().max()) < SAME


@pytest.mark.parametrize("method", METHODS)
def test_undone_tokens_leave_no_trace(eval_model, method):
    """A question fed a second time gets the same answer; fed tokens are counted all the same."""
    with Sequence(eval_model, method) as context:
        context.feed(TOKENS, want="none")
        context.discard([(0, 30)])
        first = context.feed([5, 6], want="last")
        context.rewind(30)
        computed = context.num_computed
        again = context.feed([5, 6], want="last")
        assert torch.equal(first, again)
        assert context.context_ids == [*TOKENS[30:], 5, 6]
        assert context.num_computed == computed + 2


def test_a_range_outside_the_context_is_refused(eval_model):
    """Nothing is dropped then."""
    with Sequence(eval_model, "ca") as context:
        context.feed(TOKENS, want="none")
        with pytest.raises(InvalidDiscardError):
            context.discard([(50, 61)])
        assert context.context_ids == TOKENS


def test_rows_are_freed(eval_model):
    """Also those of the write buffer."""
    free = eval_model.pool.num_free
    with Sequence(eval_model, "ca"):
        assert eval_model.pool.num_free == free - 2 * eval_model.window_tokens
    assert eval_model.pool.num_free == free
