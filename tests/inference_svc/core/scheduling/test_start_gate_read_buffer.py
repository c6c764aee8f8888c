"""When a forward may start: against a simulation of one that waits layer by layer."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.scheduling.start_gate import start_in_s

times = st.integers(1, 1000).map(lambda number: Fraction(number, 1000))


def waited(num_layers, layers_ready, load_layer_s, compute_layer_s, start_s):
    """Seconds that the layers of a forward starting at `start_s` wait for their loads."""
    now_s, waited_s = start_s, 0
    for layer in range(num_layers):
        there_s = max(0, layer + 1 - layers_ready) * load_layer_s
        waited_s += max(0, there_s - now_s)
        now_s = max(now_s, there_s) + compute_layer_s
    return waited_s


@given(st.integers(1, 40), st.integers(0, 40), times, times)
def test_a_forward_that_waits_so_long_never_waits_in_a_layer(layers, ready, load_s, compute_s):
    """The answer is enough, and exact: with less some layer waits."""
    ready = min(ready, layers)
    start_s = start_in_s(layers, ready, load_s, compute_s)
    assert start_s >= 0
    assert waited(layers, ready, load_s, compute_s, start_s) == 0
    if start_s > 0:
        assert waited(layers, ready, load_s, compute_s, start_s * Fraction(99, 100)) > 0


def test_everything_loaded_means_start_now():
    """A load that is done holds nobody up, however slow it was."""
    assert start_in_s(4, 4, 100.0, 0.001) == 0
