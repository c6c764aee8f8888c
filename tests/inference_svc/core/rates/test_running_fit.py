"""Fits that withstand noise, stalls, monotony and change."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.rates.running_fit import (
    GROUP_LENGTH,
    MAX_GROUPS,
    MIN_OBSERVATIONS,
    RUN,
    RunningFit,
    least_squares,
)

TRUTH = (2e-3, 1e-4, 2e-9)


def random_numbers(seed):
    """Return random numbers that are the same in each run."""
    return Random(seed)  # noqa: S311  # test data


def work(rng):
    """Yield steps as a service makes them: mostly decodes, some chunks of prefill."""
    if rng.random() < 0.7:
        tokens = rng.randint(1, 8)
        return 1, tokens, tokens * rng.randint(100, 4000)
    start = rng.randrange(0, 8192, 512)
    return 1, 512, 512 * start + 512 * 513 // 2


def true_s(terms, truth=TRUTH):
    """Return the true duration of work."""
    return sum(c * term for c, term in zip(truth, terms, strict=True))


def feed(fit, rng, count, *, slowness=1.0, noise=0.05, stall_every=1000):
    """Note `count` steps, some of which stall."""
    for number in range(1, count + 1):
        terms = work(rng)
        seconds = true_s(terms) * slowness * rng.lognormvariate(0, noise)
        fit.note(terms, seconds * (10 if number % stall_every == 0 else 1))


def mean_error(fit, rng, slowness=1.0):
    """Return the mean relative error of the estimates for twenty steps."""
    steps = [work(rng) for _ in range(20)]
    errors = [abs(fit.seconds(terms) / (slowness * true_s(terms)) - 1) for terms in steps]
    return sum(errors) / len(errors)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3), st.randoms(use_true_random=False))
def test_known_coefficients_are_recovered_without_noise(shares, rng):
    """With any shares of constant, tokens and pairs."""
    truth = (shares[0], shares[1] / 100, shares[2] / 1e6)
    fit = RunningFit(3)
    for _ in range(60):
        terms = work(rng)
        fit.note(terms, true_s(terms, truth))
    for _ in range(10):
        terms = work(rng)
        assert fit.seconds(terms) == pytest.approx(true_s(terms, truth), rel=0.02)


@given(st.integers(0, 10_000))
def test_stalls_and_noise_do_not_ruin_estimates(seed):
    """One step of ten takes ten times as long; estimates stay close."""
    rng = random_numbers(seed)
    fit = RunningFit(3)
    feed(fit, rng, 200, noise=0.1, stall_every=10)
    assert mean_error(fit, rng) < 0.15


def test_one_stalled_step_changes_almost_nothing():
    """Even if similar work was rarely observed before."""
    rng = random_numbers(1)
    fit = RunningFit(3)
    feed(fit, rng, 100)
    before = fit.seconds((1, 512, 131328))
    fit.note((1, 512, 131328), 10 * before)
    fit.note((1, 4, 4000), 10 * true_s((1, 4, 4000)))
    assert fit.seconds((1, 512, 131328)) == pytest.approx(before, rel=0.15)


def test_a_slow_first_step_is_outvoted():
    """The first forward warms up caches; a few more are enough."""
    rng = random_numbers(2)
    fit = RunningFit(3)
    fit.note((1, 512, 131328), 10 * true_s((1, 512, 131328)))
    feed(fit, rng, 60)
    assert mean_error(fit, rng) < 0.15


@pytest.mark.parametrize("slowness", [0.1, 0.5, 2.0, 10.0])
def test_a_lasting_change_is_followed_within_tens_of_observations(slowness):
    """Work gets slower or faster permanently, and estimates follow."""
    errors = []
    for seed in range(10):
        rng = random_numbers(seed)
        fit = RunningFit(3)
        feed(fit, rng, 200, stall_every=30)
        feed(fit, rng, 60, slowness=slowness, stall_every=30)
        errors.append(mean_error(fit, rng, slowness))
    assert sum(errors) / len(errors) < 0.2
    assert max(errors) < 0.5


PREFILL, DECODE = (1, 512), (1, 1)


def steady():
    """Make a fit of prefill and decodes with known times: seconds, and hundredths of them."""
    fit = RunningFit(2)
    for _ in range(GROUP_LENGTH):
        fit.note(PREFILL, 1.0)
        fit.note(DECODE, 0.01)
    return fit


def test_outliers_that_are_not_consecutive_are_no_change():
    """A usual one between them shows that nothing has changed."""
    fit = steady()
    for seconds in (*[0.1] * (RUN - 1), 0.01, *[0.1] * (RUN - 1)):
        fit.note(DECODE, seconds)
    assert fit.seconds(PREFILL) == pytest.approx(1.0, rel=0.01)


def test_consecutive_outliers_of_well_observed_kinds_are_a_change():
    """Each kind needs enough observations of its own; outliers of several kinds count together."""
    fit = RunningFit(2)
    for _ in range(GROUP_LENGTH):
        fit.note(PREFILL, 1.0)
    for _ in range(MIN_OBSERVATIONS):
        fit.note(DECODE, 0.01)
    for _ in range(RUN - 1):
        fit.note(DECODE, 0.1)
    assert fit.seconds(PREFILL) == pytest.approx(1.0, rel=0.01)
    fit.note(PREFILL, 10.0)
    assert fit.seconds(PREFILL) == pytest.approx(10.0, rel=0.01)


def test_half_the_time_is_no_outlier():
    """Shapes of one kind differ by as much: estimates of other kinds are not scaled."""
    fit = steady()
    for _ in range(RUN):
        fit.note(DECODE, 0.005)
    assert fit.seconds(PREFILL) == pytest.approx(1.0, rel=0.01)


def test_a_change_is_followed_once():
    """Estimates have the new speed then: a later stall is a stall, and no other change."""
    fit = steady()
    for _ in range(RUN):
        fit.note(DECODE, 0.1)
    assert fit.seconds(PREFILL) == pytest.approx(10.0, rel=0.01)
    fit.note(DECODE, 1.0)
    assert fit.seconds(PREFILL) == pytest.approx(10.0, rel=0.01)


def test_a_thousand_decodes_do_not_erase_the_time_of_prefill():
    """A new observation only replaces those of similar work."""
    rng = random_numbers(3)
    fit = RunningFit(3)
    feed(fit, rng, 100)
    for number in range(1000):
        terms = (1, 1, 2000 + number)
        fit.note(terms, true_s(terms) * rng.lognormvariate(0, 0.05))
    assert fit.seconds((1, 512, 131328)) == pytest.approx(true_s((1, 512, 131328)), rel=0.2)


def test_unobserved_kinds_of_work_have_no_estimate():
    """Decodes of one length do not show the cost of a token; an estimate would be arbitrary."""
    fit = RunningFit(3)
    for _ in range(2):
        fit.note((1, 1, 100), 0.002)
    assert fit.seconds((1, 1, 100)) is None  # too few
    for _ in range(20):
        fit.note((1, 1, 100), 0.002)
    assert fit.seconds((1, 1, 110)) == pytest.approx(0.002, rel=0.1)
    assert fit.seconds((1, 512, 131328)) is None
    assert fit.coefficients() is None


def test_estimates_are_never_negative():
    """Times that decrease with the work (noise) give a coefficient of zero."""
    fit = RunningFit(2)
    for tokens in (1, 100, 1000, 10_000):
        fit.note((1, tokens), 1 / tokens)
    assert min(fit.coefficients()) == 0
    assert fit.seconds((1, 0)) >= 0


def test_memory_is_bounded():
    """However many shapes of work there are."""
    rng = random_numbers(4)
    fit = RunningFit(3)
    for _ in range(500):
        fit.note((1, 2 ** rng.randrange(12), 2 ** rng.randrange(30)), rng.random())
    assert len(fit._groups) == MAX_GROUPS


def test_a_duration_of_zero_is_accepted():
    """A coarse clock may report it."""
    fit = RunningFit(2)
    for tokens in (1, 10, 100):
        fit.note((1, tokens), 0.0)
    assert fit.seconds((1, 50)) == pytest.approx(0, abs=1e-6)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3, st.integers(1, 100)), min_size=1, max_size=8))
def test_no_small_step_fits_better(rows):
    """The solution is the best one ≥ 0: no change of a coefficient lowers the error."""
    matrix = [[float(sum(r[i] * r[j] for r in rows)) for j in range(3)] for i in range(3)]
    vector = [float(sum(r[i] * r[3] for r in rows)) for i in range(3)]
    found = least_squares(matrix, vector)
    if not found.is_determined:
        return
    scale = max(vector)
    for i in range(3):
        gradient = sum(matrix[i][j] * found.coefficients[j] for j in range(3)) - vector[i]
        assert gradient > -1e-6 * scale
        assert found.coefficients[i] == 0 or gradient < 1e-6 * scale
