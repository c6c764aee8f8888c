"""Rounds of variants, and their ratios."""

from math import inf

import pytest

from inference_svc.bench.bench_session import ATTEMPTS, in_turn, take_rounds
from inference_svc.bench.figures import Interleaved


def make_figures(**series):
    found = Interleaved("case", {"history_tokens": 1})
    for variant, values in series.items():
        for number, value in enumerate(values):
            if value is not None:
                found.add(variant, number, {"ttft_s": value})
    return found


def test_ratios_are_of_one_round_each():
    found = make_figures(ca=[1.1, 2.2, 5.5], floor=[1.0, 2.0, 5.0])
    found.compare("ttft_s", "ca", "floor", at_most=1.2)
    (ratio,) = found.case().ratios
    assert ratio.what == "ca / floor"
    assert ratio.ratio.median == pytest.approx(1.1)
    assert ratio.num_pairs == 3
    assert ratio.is_met


def test_only_rounds_that_have_both_count():
    found = make_figures(re=[10.0, None, None], ca=[1.0, 2.0, 4.0])
    found.compare("ttft_s", "re", "ca", at_least=20)
    (ratio,) = found.case().ratios
    assert (ratio.num_pairs, ratio.ratio.median) == (1, 10.0)
    assert not ratio.is_met
    assert ratio.goal == ">= 20"


def test_a_ratio_may_be_to_the_better_of_several():
    found = make_figures(auto=[2.0, 2.0], always=[1.0, 8.0], never=[4.0, 2.0])
    found.compare("ttft_s", "auto", "always", "never")
    (ratio,) = found.case().ratios
    assert ratio.what == "auto / min(always, never)"
    assert ratio.ratio.high == pytest.approx(1.75)  # of 2 and 1
    assert ratio.goal == ""


def test_without_a_common_round_there_is_no_ratio():
    found = make_figures(re=[None, 1.0], ca=[1.0])
    found.compare("ttft_s", "re", "ca")
    found.compare("ttft_s", "re", "absent")
    assert not found.case().ratios


def test_medians_so_far_are_of_what_was_measured():
    """Variants that were not measured are worse than any other."""
    found = make_figures(ca=[1.0, None, 5.0, 2.0])
    assert found.median("ttft_s", "ca") == 2.0
    assert found.median("tpot_s", "ca") == found.median("ttft_s", "re") == inf


def test_discarded_measurements_are_counted_even_without_others():
    found = make_figures(ca=[1.0])
    for variant in ("ca", "ssd", "ssd"):
        found.discard(variant)
    counts = {each.variant: (each.num, each.num_discarded) for each in found.case().variants}
    assert counts == {"ca": (1, 1), "ssd": (0, 2)}


def test_a_metric_may_be_missing_in_some_rounds():
    found = make_figures(ca=[1.0])
    found.add("ca", 1, {"tpot_s": 3.0})
    (variant,) = found.case().variants
    assert variant.values["ttft_s"].median == 1.0
    assert variant.values["tpot_s"].median == 3.0


def test_every_round_begins_with_another_variant():
    rounds = [in_turn(["a", "b", "c"], number) for number in range(-1, 3)]
    assert [names[0] for names in rounds] == ["c", "a", "b", "c"]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)


async def test_a_measurement_outside_its_case_is_repeated():
    """A bounded number of times; rounds below 0 warm up and leave nothing."""
    taken, said = [], []

    async def take(name):
        taken.append(name)
        return None if name == "lost" or taken.count(name) == 2 else {"ttft_s": 1.0}

    found = Interleaved("case", {})
    await take_rounds(found, lambda _: ["found", "lost"], range(-1, 2), take, said.append)
    counts = {each.variant: (each.num, each.num_discarded) for each in found.case().variants}
    assert counts == {"found": (2, 1), "lost": (0, 2 * ATTEMPTS)}
    assert said == ["round 0/2", "round 1/2", "round 2/2"]
