"""When a request may start whose history is still being loaded."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.start_gate import HOLD_LIMIT_NS, StartGate, buffer_layers
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

NUM_LAYERS = 10
MS = 1_000_000
CHUNK = 100
HISTORY = 1000


def request():
    one = Request(1, SessionKey("t", "0f", "s"), [0] * (HISTORY + CHUNK), 4, arrived_ns=0)
    one.computed_tokens = HISTORY
    return one


def known_rates(chunk_s, load_s=None):
    """Make rates by which the chunk takes `chunk_s`, and the history `load_s` from DRAM."""
    rates = Rates()
    for _ in range(8):
        rates.steps.note(CHUNK, pairs(HISTORY, HISTORY + CHUNK), chunk_s)
        if load_s is not None:
            rates.loads.note("dram", HISTORY, load_s)
    return rates


def announce_one(
    rates, *, num_layers=NUM_LAYERS, layers_ready=0, tier=None, fixed_layers=None, now_ns=0
):
    gate, one = StartGate(num_layers, rates), request()
    gate.watch(one, now_ns, layers_ready, tier=tier, fixed_layers=fixed_layers)
    return gate, one


def opens_ns(gate, one, now_ns, *, is_idle=False):
    return gate.opens_ns(one, CHUNK, now_ns, is_idle=is_idle)


def test_a_complete_history_starts_at_once():
    """Whatever the rates."""
    gate, one = announce_one(Rates(), layers_ready=NUM_LAYERS)
    assert opens_ns(gate, one, 5) == 5
    assert gate.is_certain(one)
    assert gate.buffer_layers(one) is None


def test_with_unknown_rates_one_layer_is_enough():
    """The first layer shows that the load makes progress; then measuring begins."""
    gate, one = announce_one(Rates())
    assert opens_ns(gate, one, 5) > 5
    gate.on_progress(one, 1, 10)
    assert opens_ns(gate, one, 10) == 10
    assert gate.buffer_layers(one) == 1


def test_loading_faster_than_computing_starts_during_the_first_layer():
    """10 ms per layer to compute, 1 ms to load: the forward never overtakes it."""
    gate, one = announce_one(known_rates(0.1, 0.01), tier="dram")
    assert opens_ns(gate, one, 0) <= 0


def test_loading_slower_than_computing_waits_for_a_head_start():
    """1 ms per layer to compute, 10 ms to load: it starts when computing hides the rest."""
    gate, one = announce_one(known_rates(0.01))
    started_at = []
    for layer in range(1, NUM_LAYERS + 1):
        now_ns = layer * 10 * MS
        gate.on_progress(one, layer, now_ns)
        if opens_ns(gate, one, now_ns) == now_ns:
            started_at.append(layer)
    # With 9 layers, the last arrives 10 ms later and is needed 9 ms later: it may be 1 ms late.
    assert started_at == [9, 10]


def test_the_layer_being_loaded_counts_with_time():
    """The gate opens when it is nearly there, without another report."""
    gate, one = announce_one(known_rates(0.01))
    gate.on_progress(one, 5, 50 * MS)
    assert opens_ns(gate, one, 50 * MS) == 50 * MS + HOLD_LIMIT_NS, "the next layer will be news"
    gate.on_progress(one, 8, 80 * MS)
    opens = opens_ns(gate, one, 80 * MS)
    assert opens == pytest.approx(90 * MS, abs=MS)  # 20 ms of loading, 9 ms to hide, 1 ms of slack
    assert opens_ns(gate, one, opens) == opens


def test_alone_it_may_wait_in_the_forward():
    """If no other request is delayed, 20 ms more or less do not matter."""
    gate, one = announce_one(known_rates(0.01))
    gate.on_progress(one, 8, 80 * MS)
    assert opens_ns(gate, one, 80 * MS, is_idle=True) <= 80 * MS


@pytest.mark.parametrize("compute_s", [0.001, 10.0])
def test_a_configured_read_buffer_opens_the_gate(compute_s):
    """Whatever the rates: the load pauses there until its request is in the batch."""
    gate, one = announce_one(known_rates(compute_s), fixed_layers=0)
    assert opens_ns(gate, one, 0) <= 0
    gate, one = announce_one(known_rates(compute_s), fixed_layers=2)
    gate.on_progress(one, 1, 10 * MS)
    assert opens_ns(gate, one, 10 * MS) == 10 * MS + HOLD_LIMIT_NS
    gate.on_progress(one, 2, 20 * MS)
    assert opens_ns(gate, one, 20 * MS) == 20 * MS
    assert gate.buffer_layers(one) == 2


@pytest.mark.parametrize("rates", [Rates(), known_rates(0.001, 1000.0)])
def test_a_stalled_load_is_let_through(rates):
    """The forward's own wait has a deadline, so that the load fails there."""
    gate, one = announce_one(rates, tier="dram", now_ns=7)
    assert opens_ns(gate, one, 8) == 7 + HOLD_LIMIT_NS


def test_repeated_progress_does_not_count():
    """Progress is measured when a layer arrives; that of a forgotten request is ignored."""
    gate, one = announce_one(Rates(), layers_ready=2)
    gate.on_progress(one, 2, 5)
    assert gate._loads[one.number].news_ns == 0
    gate.forget(one)
    gate.forget(one)
    gate.on_progress(one, 3, 6)


def test_rows_are_certain_after_a_successful_step():
    """With all layers loaded not all rows are certain: the lease may turn out to be void."""
    gate, one = announce_one(Rates())
    gate.on_progress(one, NUM_LAYERS, 5)
    assert not gate.is_certain(one)
    gate.confirm(one)
    assert gate.is_certain(one)


# --------------------------------------------------------------------------------- the read buffer

nums_layers = st.integers(1, 40)
times = st.integers(1, 400).map(lambda number: Fraction(number, 1000))


def waited_s(num_layers, load_layer_s, compute_layer_s, start_s):
    """Return the seconds that a forward starting at `start_s` waits for layers, and its end.

    The load began at 0.
    """
    now_s, waited_s = start_s, 0
    for layer in range(num_layers):
        there_s = (layer + 1) * load_layer_s
        waited_s += max(0, there_s - now_s)
        now_s = max(now_s, there_s) + compute_layer_s
    return waited_s, now_s


def exact_buffer(num_layers, load_s, compute_s):
    """Compute the formula with fractions; it computes with floats or fractions alike."""
    return Fraction(buffer_layers(num_layers, load_s, compute_s))


@given(nums_layers, times, times)
def test_with_the_read_buffer_no_layer_waits(layers, load_s, compute_s):
    """It is sufficient, and exact: with less some layer waits."""
    buffer = exact_buffer(layers, load_s, compute_s)
    assert 1 <= buffer <= layers
    assert waited_s(layers, load_s, compute_s, buffer * load_s)[0] == 0
    assert waited_s(layers, load_s, compute_s, buffer * load_s * Fraction(99, 100))[0] > 0


@given(nums_layers, times, times)
def test_the_read_buffer_costs_no_time(layers, load_s, compute_s):
    """Starting with it ends as soon as starting at once, and waits for no layer."""
    buffer = exact_buffer(layers, load_s, compute_s)
    _, done_s = waited_s(layers, load_s, compute_s, buffer * load_s)
    assert done_s == waited_s(layers, load_s, compute_s, 0)[1]
    assert done_s < waited_s(layers, load_s, compute_s, buffer * load_s * Fraction(101, 100))[1]


@given(nums_layers, times, times)
def test_the_papers_buffer_is_at_most_one_layer_less(layers, load_s, compute_s):
    """It lets the last layer arrive when it has been computed, and the first when it is due."""
    papers = max(0, layers * (1 - compute_s / load_s))
    assert papers <= exact_buffer(layers, load_s, compute_s) <= papers + 1


@given(nums_layers, times, times)
def test_the_gate_opens_when_the_read_buffer_is_loaded(layers, load_s, compute_s):
    """To the microsecond, less one layer's computing, for which the forward may wait."""
    gate, one = announce_one(
        known_rates(float(layers * compute_s), float(layers * load_s)),
        num_layers=layers,
        tier="dram",
    )
    started_ns = None
    for ready in range(layers + 1):
        now_ns, next_ns = (int(count * load_s * NS_PER_S) for count in (ready, ready + 1))
        gate.on_progress(one, ready, now_ns)
        opens = opens_ns(gate, one, now_ns)
        if opens <= next_ns:
            started_ns = max(opens, now_ns)
            break
    expected_s = max(0, exact_buffer(layers, load_s, compute_s) * load_s - compute_s)
    assert started_ns == pytest.approx(int(expected_s * NS_PER_S), abs=1000)
