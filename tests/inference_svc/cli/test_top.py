"""`inference-svc top` with several samples."""

from inference_svc.cli.status import TROUBLES
from inference_svc.cli.top import top_lines
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.terminal.printing import sparkline


def look(uptime_s, num_tokens, num_turns=0, ttft_total_s=0.0, running=1):
    """Make a sample of a service that finds all history."""
    return pb.Model(
        name="tiny",
        running_turns=running,
        counters={
            "output_tokens": num_tokens,
            "turns_finished": num_turns,
            "history_tokens": num_turns * 10,
            "reused_tokens": num_turns * 9,
        },
        gauges={"uptime_s": uptime_s, "timed_turns": num_turns, "ttft_total_s": ttft_total_s},
    )


def rates(looks, width=80):
    """Return the lines of bars, by label."""
    lines = "\n".join(top_lines(looks, width, 24)).splitlines()
    drawn = lines[lines.index("") + 1 :]
    assert max(map(len, lines)) <= width
    return {line[:13].strip(): line[13:].split() for line in drawn}


def test_rates_are_computed_between_two_samples():
    """By the service's own clock; the newest bar is at the right."""
    found = rates([look(10, 100), look(12, 140, 2, 0.5), look(14, 220, 4, 1.5)])
    assert found["tokens/s"] == ["40", "▅█", "most", "40"]
    assert found["turns/s"][0] == "1"
    assert found["hit rate"][0] == "90%"
    assert found["first token"][:2] == ["500", "ms"]
    assert found["turns run"][:2] == ["1", "███"]


def test_one_sample_has_no_rates():
    """Nor has the first one after a restart of the service: rates are never negative."""
    assert rates([look(10, 100)])["tokens/s"] == ["-"]
    assert rates([look(10, 100), look(12, 200), look(1, 5)])["tokens/s"] == ["-"]
    after = rates([look(10, 100), look(1, 5), look(2, 15)])
    assert after["tokens/s"][:2] == ["10", "█"]


def test_bars_fit_their_room():
    """The newest stay; unknown values are blank."""
    assert sparkline([1.0, 8.0, None, 4.0], 3) == "█ ▅"
    assert sparkline([0.0, 0.0], 5) == "▁▁"
    assert sparkline([1.0], 0) == ""
    assert rates([look(n, 100 * n) for n in range(1, 200)], 60)["tokens/s"][0] == "100"


def test_one_screen_has_the_bars_despite_many_troubles():
    """The status is cut at its end, with the number of omitted lines."""
    troubled = look(12, 140)
    for name in TROUBLES:
        troubled.counters[name] = 3
    whole = "\n".join(top_lines([look(10, 100), troubled], 80, 100)).splitlines()
    assert not any("more lines" in line for line in whole)
    for height in (22, 12):
        lines = "\n".join(top_lines([look(10, 100), troubled], 80, height)).splitlines()
        assert len(lines) == height
        assert lines[-7:] == whole[-7:]
        *_, last = lines[:-7]
        assert f"… {len(whole) - height + 1} more lines: inference-svc status" in last
    assert "\n".join(top_lines([troubled], 80, 3)).splitlines()[0] == ""
