"""The plan that a command line requests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.plan.arguments import KNOWN_POLICIES, request_of
from kvd.plan.hardware import recompute_load
from kvd.plan.kept import most_states, most_windowed
from kvd.plan.options import (
    ArrivalArguments,
    CapacityArguments,
    CostArguments,
    EngineArguments,
    KvdArguments,
    ServerArguments,
)
from kvd.plan.prices import Prices
from kvd.plan.sizes import GB
from shared.types.errors import ReportedError

TRACE = Path("tests/data/trace_sample.jsonl.gz")
ARRIVALS = ArrivalArguments(trace=TRACE)
NO_BYTES = EngineArguments(kv_bytes_per_token="0B")  # noqa: S106 - tokens of text


def _request(
    arrivals=ARRIVALS,
    engine=EngineArguments(),  # noqa: B008
    capacity=CapacityArguments(),  # noqa: B008
    kvd=KvdArguments(policy="lru"),  # noqa: B008
    cost=CostArguments(),  # noqa: B008
    servers=ServerArguments(),  # noqa: B008
):
    return request_of(arrivals, engine, capacity, servers, kvd, cost, ("kvd", "plan"))


def test_without_sizes_shares_of_the_footprint_are_tried():
    """Six of them, a sixteenth of each in DRAM; two policies make twelve replays, and RE's."""
    request = _request(kvd=KvdArguments(policy="lru,belady"))
    footprint = request.workload.footprint_tokens * request.model.kv_bytes_per_token
    totals = [capacity.total_bytes for capacity in request.capacities]
    shares = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4]
    assert totals == pytest.approx([share * footprint for share in shares], abs=1)
    assert request.capacities[0].dram_bytes == pytest.approx(totals[0] / 16, abs=1)
    assert request.num_replays == 13


def test_states_count_in_the_footprint():
    """Each session of several turns keeps three of them, also as a window; 0: none."""
    hybrid = EngineArguments(state_bytes="72MiB")
    share, charged = CapacityArguments(capacity_share="100%"), KvdArguments(charge="window")
    request = _request(engine=hybrid, capacity=share)
    assert request.options.state_bytes == request.model.state_bytes == 72 << 20
    num_states = most_states(request.workload.sessions)
    plain = request.workload.footprint_tokens * 780_000
    assert request.capacities[0].total_bytes == plain + num_states * (72 << 20)
    (capacity,) = _request(engine=hybrid, capacity=share, kvd=charged).capacities
    assert capacity.total_bytes == 12 * (4096 * 780_000 + 3 * (72 << 20))
    none = EngineArguments(model="qwen3-next-80b", state_bytes="0")
    assert _request(engine=none).model.state_bytes == 0


def test_windows_count_in_the_footprint(tmp_path):
    """A directory's config gives their size; an explicit size means all layers'."""
    config = {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    share, charged = CapacityArguments(capacity_share="100%"), KvdArguments(charge="window")
    gemma = EngineArguments(model=str(tmp_path))
    request = _request(engine=gemma, capacity=share)
    assert (
        request.options.windowed_bytes_per_token == request.model.windowed_bytes_per_token == 5120
    )
    assert request.options.attention_window == request.model.attention_window == 128
    num_windowed = most_windowed(request.workload.sessions, 128)
    kept = request.workload.footprint_tokens * 1024
    assert request.capacities[0].total_bytes == kept + num_windowed * 5120
    (capacity,) = _request(engine=gemma, capacity=share, kvd=charged).capacities
    assert capacity.total_bytes == 12 * (4096 * 1024 + 3 * 128 * 5120)
    given = EngineArguments(model=str(tmp_path), kv_bytes_per_token="6144")  # noqa: S106 - of text
    assert _request(engine=given).model.attention_window == 0


def test_states_may_be_all_that_is_kept():
    """Then tokens may have no size."""
    mamba = EngineArguments(kv_bytes_per_token="0", state_bytes="1MB")  # noqa: S106 - of text
    request = _request(engine=mamba, capacity=CapacityArguments(capacity_share="100%"))
    assert request.capacities[0].total_bytes == most_states(request.workload.sessions) * 10**6


def test_charged_windows_enlarge_the_footprint():
    """Every session has a whole one."""
    charged = KvdArguments(policy="lru", charge="window")
    (capacity,) = _request(
        capacity=CapacityArguments(capacity_share="100%"), kvd=charged
    ).capacities
    assert capacity.total_bytes == 12 * 4096 * 780_000


def test_sizes_are_tried_as_given():
    """Each HBM, DRAM and SSD together; every HBM has its own baseline."""
    request = _request(capacity=CapacityArguments(hbm="8GB,16GB", dram="2GB", ssd="4GB,8GB"))
    assert [capacity.ssd_bytes // GB for capacity in request.capacities] == [4, 8, 4, 8]
    assert request.num_replays == 4 + 2


def test_a_load_is_reached_by_the_engines_speed():
    """Starts and think times stay as recorded; all of the engine's times are scaled alike."""
    request = _request(engine=EngineArguments(load=0.5))
    engine = request.hardware.engine
    assert recompute_load(request.workload.sessions, engine) == pytest.approx(0.5)
    assert engine.fixed_s / engine.decode_step_s == pytest.approx(1.0)
    assert request.workload.sessions == _request().workload.sessions


def test_a_rate_is_reached_by_the_starts():
    """The engine stays as it is."""
    request = _request(replace(ARRIVALS, arrival_rate=0.01))
    assert request.workload.span_s == pytest.approx(11 / 0.01)
    assert request.hardware.engine == _request().hardware.engine


def test_options_override_the_engines_constants():
    """Milliseconds become seconds."""
    engine = _request(
        engine=EngineArguments(slots=3, prefill_ms_per_token=2.0, fixed_ms=0.0, decode_step_ms=5.0)
    ).hardware.engine
    assert (engine.slots, engine.prefill_s_per_token, engine.fixed_s, engine.decode_step_s) == (
        3, 0.002, 0.0, 0.005,
    )  # fmt: skip


def test_options_override_measurements(tmp_path: Path):
    """Measurements override the defaults."""
    path = tmp_path / "decode.json"
    values = {"steps_per_s": {"low": 20.0, "median": 25.0, "high": 30.0}}
    variants = [{"variant": "ours", "values": values}]
    case = {"facts": {"batch": 8}, "variants": variants}
    document = {"schema": "inference_svc.bench/1", "part": "decode", "cases": [case]}
    path.write_text(json.dumps(document), encoding="utf-8")
    measured = EngineArguments(calibration=(path,))
    assert _request(engine=measured).hardware.engine.decode_step_s == pytest.approx(0.04)
    given = replace(measured, decode_step_ms=7.0)
    assert _request(engine=given).hardware.engine.decode_step_s == pytest.approx(0.007)


def test_sessions_are_drawn_as_requested():
    """In the model's window, or a given one; as many as requested."""
    drawn = ArrivalArguments(generate="sharegpt-like", sessions=300, rate=2.0, seed=5)
    request = _request(drawn, EngineArguments(window=1024))
    prompts = [
        turn.history_tokens + turn.new_tokens
        for session in request.workload.sessions
        for turn in session.turns
    ]
    assert (len(request.workload.sessions), max(prompts) <= 1024) == (300, True)
    assert request.options.window_tokens == 1024
    assert "seed 5" in request.workload.origin


def test_kvds_defaults_are_used():
    """TTL, watermark, load policy, warm-up: the replay gets them."""
    options = _request().options
    assert (options.ttl_s, options.watermark, options.load_policy) == (7 * 86400, 0.02, "auto")
    assert (options.tiers, options.charge, options.end_hints) == ("inclusive", "packed", False)
    assert options.warmup_turns == 17  # of 88


def test_gpus_are_the_papers_unless_given():
    """Two for LLaMA-13B, four for the larger ones."""
    assert _request().num_gpus == 2
    assert _request(engine=EngineArguments(model="llama-70b")).num_gpus == 4
    assert _request(cost=CostArguments(gpus=8)).num_gpus == 8
    assert _request().prices == Prices()


def test_all_policies_include_the_bound():
    """Those of the daemon, and the one that only a plan can have."""
    assert _request(kvd=KvdArguments(policy="all")).policies == list(KNOWN_POLICIES)
    assert KNOWN_POLICIES[-1] == "belady"


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"arrivals": ArrivalArguments()}, "it is not clear which sessions to replay"),
        ({"arrivals": replace(ARRIVALS, generate="sharegpt-like")}, "it is not clear"),
        ({"arrivals": ArrivalArguments(generate="poisson")}, "there is no generator poisson"),
        ({"arrivals": ArrivalArguments(generate="sharegpt-like", rate=0.0)}, "--rate 0"),
        ({"arrivals": replace(ARRIVALS, arrival_rate=-1.0)}, "--arrival-rate -1"),
        ({"arrivals": replace(ARRIVALS, think_scale=float("nan"))}, "--think-scale nan"),
        ({"arrivals": replace(ARRIVALS, warmup_turns="88")}, "none of the 88 turns"),
        ({"engine": NO_BYTES}, "--kv-bytes-per-token is 0"),
        ({"engine": EngineArguments(state_bytes="5GiB")}, "--state-bytes 5GiB"),
        ({"engine": EngineArguments(load=0.0)}, "--load 0"),
        ({"engine": EngineArguments(fixed_ms=-1.0)}, "--fixed-ms -1"),
        (
            {"capacity": CapacityArguments(dram="1GB", capacity_share="1%")},
            "sizes and shares cannot be used together",
        ),
        (
            {
                "engine": EngineArguments(window=1000),
                "kvd": KvdArguments(policy="lru", charge="window"),
            },
            "is more than twice the charged window of 1000",
        ),
    ],
)
def test_contradictions_are_refused_before_any_replay(parts, complaint):
    """One line, exit 2, and the remedy."""
    with pytest.raises(ReportedError) as raised:
        _request(**parts)
    assert complaint in str(raised.value)
    assert (raised.value.exit_code, "\n" in str(raised.value)) == (2, False)
    assert raised.value.remedy


SIZED = CapacityArguments(dram="1GB", ssd="4GB")
DRAWN = ArrivalArguments(generate="sharegpt-like", sessions=200, rate=2.0)


def test_several_servers_are_tried_with_each_routing():
    """One server needs none; sessions and their rate are totals, and the drawn ones a share."""
    asked = ServerArguments(servers="1,4,40", routing="ring,session", replayed=4, remote="3GB/s")
    request = _request(DRAWN, capacity=SIZED, servers=asked)
    assert [(fleet.num_servers, fleet.num_replayed, fleet.routing) for fleet in request.fleets] == [
        (1, 1, "ring"),
        (4, 4, "ring"),
        (4, 4, "session"),
        (40, 4, "ring"),
        (40, 4, "session"),
    ]
    assert {fleet.remote_bytes_per_s for fleet in request.fleets} == {3e9}
    assert request.num_replays == 5 + 3  # three baselines
    assert request.workload.share == 1.0
    few = _request(DRAWN, capacity=SIZED, servers=ServerArguments(servers="40", replayed=4))
    assert (few.workload.share, len(few.workload.sessions)) == (0.1, 20)
    rates = [len(each.workload.sessions) / each.workload.span_s for each in (few, request)]
    assert rates[0] == pytest.approx(rates[1] / 10, rel=0.5)  # of 20 drawn sessions


def test_load_is_per_server():
    """The engine is fast enough for each server's share, whatever part is replayed."""
    for servers, replayed in (("1", 1), ("4", 4), ("40", 4)):
        request = _request(
            DRAWN,
            EngineArguments(load=0.5),
            SIZED,
            servers=ServerArguments(servers=servers, replayed=replayed),
        )
        load = recompute_load(request.workload.sessions, request.hardware.engine)
        assert load / replayed == pytest.approx(0.5)


def test_several_servers_use_the_daemons_policy():
    """Unless others are named."""
    several = ServerArguments(servers="2")
    assert _request(capacity=SIZED, kvd=KvdArguments(), servers=several).policies == ["predictive"]
    assert len(_request(capacity=SIZED, kvd=KvdArguments()).policies) == 3


@pytest.mark.parametrize(
    ("servers", "capacity", "engine", "said"),
    [
        (
            {"servers": "0"},
            SIZED,
            {},
            "--servers '0' contains something that is not a number: write it as 1,10,100",
        ),
        ({"servers": "a"}, SIZED, {}, "--servers 'a' contains something that is not a number"),
        (
            {"servers": "2", "routing": "best"},
            SIZED,
            {},
            "there is no such routing: best: give one or more of",
        ),
        ({"servers": "2", "remote": "fast"}, SIZED, {}, "--remote: 'fast' is not a size"),
        ({"servers": "2", "away": "soon"}, SIZED, {}, "--away: 'soon' is not a duration"),
        ({"servers": "2", "failures": float("nan")}, SIZED, {}, "--failures nan is not valid"),
        (
            {"servers": "2"},
            CapacityArguments(),
            {},
            "the sizes of each server's tiers are not given",
        ),
        ({"servers": "2,3"}, SIZED, {"load": 0.5}, "--load works with one number of servers only"),
    ],
)
def test_impossible_servers_are_refused(servers, capacity, engine, said):
    """Before the first replay."""
    with pytest.raises(ReportedError) as error:
        _request(
            engine=EngineArguments(**engine), capacity=capacity, servers=ServerArguments(**servers)
        )
    assert said in str(error.value)
