"""Reports with fixed figures, as large as real ones can be."""

from inference_svc.bench import figures as engine
from inference_svc.demo.report import TurnFacts
from inference_svc.eval import figures as quality
from inference_svc.eval.options import Truncation
from kvd.bench import figures as kvd
from kvd.following.status import Failure, FollowerStatus
from kvd.plan.figures import PlanReport
from shared.measuring.statistics import Interval, Spread
from tests.kvd.plan.plans import plan, result

PROCESSOR = "AMD EPYC 9654 96-Core Processor"
GB = 1_000_000_000
LIBRARIES = {"torch": "2.9.1", "transformers": "4.57.1"}
RATIO = Spread(0.943, 0.987, 1.012)


def _comparison(operation: str, slice_bytes: int, num_threads: int, scale: float) -> kvd.Comparison:
    return kvd.Comparison(
        operation, slice_bytes, 0, 1 << 30, num_threads, 15, RATIO, 10.7e9 * scale, 10.9e9 * scale
    )


KVD_BENCH = kvd.Report(
    started_unix_s=1.0,
    elapsed_s=507.0,
    command=("kvd", "bench"),
    scale="full",
    machine=kvd.Machine(
        *(PROCESSOR, 96, 0.31, 768 << 30, "6.1.0-18-amd64", "madvise", "never", 0, "ext4"),
        *("/dev/nvme0n1p2", True, "3.12.8", "0.1.0", {"numpy": "2.2.1"}),
    ),
    arena=(_comparison("store", 1 << 20, 4, 1.0), _comparison("load_copy", 64 << 10, 1, 0.5)),
    ssd=(_comparison("write", 1 << 20, 4, 0.2), _comparison("read", 64 << 10, 4, 0.1)),
    encryption=(_comparison("read", 1 << 20, 4, 0.2),),
    latencies=(
        kvd.Latency("rpc", "prepare_load", 200_000, 20_000, 512.0, 1_934.0),
        kvd.Latency("core", "complete_store", 10_000, 20_000, 41.0, 98.0),
    ),
    growths=(kvd.Growth("core", "complete_store", 10_000, 200_000, Spread(0.98, 1.04, 1.11)),),
    queue=kvd.QueueCosts(
        10_000, "predictive", Spread(0.010, 0.0124, 0.015), Spread(1e-5, 2e-5, 3e-5)
    ),
    restart=kvd.Restart(
        *(200_000, 8, 200_000, RATIO, Spread(1.8, 1.9, 2.0), Spread(0.3, 0.31, 0.33)),
        *(312 << 20, 58 << 20, 741.0, 893.0, 187 << 20),
    ),
    loop_calls=kvd.LoopCalls(200_000, 8, "predictive", 1.31, 12.1, 0.42, 3.1, 61.7, 4.8),
)


def _make_measured(variant: str, ttft_s: float) -> engine.Measured:
    def around(value: float) -> Spread:
        return Spread(0.9 * value, value, 1.1 * value)

    values = {"ttft_s": ttft_s, "load_s": ttft_s / 3, "stall_s": 0.001, "prefill_s": ttft_s / 2}
    values["prefill_tokens_per_s"] = 104 / ttft_s
    return engine.Measured(variant, 15, 1, {name: around(value) for name, value in values.items()})


ENGINE_BENCH = engine.Report(
    part="turns",
    metric="ttft_s",
    command=("inference-svc", "bench", "turns"),
    started_unix_s=1.0,
    elapsed_s=507.0,
    subject=engine.Subject(
        *("8x512", "LlamaForCausalLM", True, 8, 41_900_000, "float32", "cpu", 1),
        *("ragged", 32_768, 16),
    ),
    machine=engine.Machine(
        *(PROCESSOR, 96, 0.31, 768 << 30, "madvise", "6.1.0-18-amd64", "", "3.12.8", "0.1.0"),
        LIBRARIES,
    ),
    cases=(
        engine.Case(
            "history 896, new 104",
            {"history_tokens": 896, "new_tokens": 104},
            (
                _make_measured("resident", 0.41),
                _make_measured("dram", 0.43),
                _make_measured("ssd, read ahead", 0.44),
                _make_measured("recomputed", 3.4),
            ),
            (
                engine.Ratio("dram / resident", "ttft_s", 15, Spread(1.01, 1.05, 1.1), at_most=1.1),
                engine.Ratio("ssd, read ahead / resident", "ttft_s", 15, RATIO, at_most=1.1),
                engine.Ratio("recomputed / dram", "ttft_s", 15, Spread(7, 8, 9), at_least=10.0),
            ),
        ),
    ),
)


def _share(value: float) -> Interval:
    return Interval(value - 0.02, value, value + 0.02)


def _perplexity(word: float) -> quality.Perplexity:
    return quality.Perplexity(2.8765, 17.75, word)


_SUBJECT = quality.Subject(
    *("smollm2-135m", "5e" * 16, "LlamaForCausalLM", "ragged", 1, 134_500_000),
    *("float32", "cpu", 8, PROCESSOR, LIBRARIES, "2026-01-01"),
)


def _method(name: str, word: float, ratio: Interval | None) -> quality.MethodPerplexity:
    facts = (_perplexity(word), _perplexity(word + 3), ratio, ratio, 4_915_200, 86, 1507.0)
    return quality.MethodPerplexity(name, *facts)


PERPLEXITY = quality.EvalReport(
    "perplexity",
    ("inference-svc", "eval", "perplexity"),
    3000.0,
    _SUBJECT,
    quality.PerplexityReport(
        *("WikiText-2 (test)", 341_469, 245_569, 2048, Truncation(0.5, 1), 0.5),
        (
            _method("tt", 31.4, None),
            _method("ca", 32.3, Interval(1.015, 1.0281, 1.04)),
            _method("nkvt", 61.0, Interval(1.8, 1.9421, 2.1)),
        ),
    ),
)
COMPRESSION = quality.EvalReport(
    "compression",
    ("inference-svc", "eval", "compression"),
    3000.0,
    _SUBJECT,
    quality.CompressionReport(
        *("WikiText-2 (test)", 40, 1500, 4000, 400, 46_080, 7),
        tuple(
            quality.CompressedQuality(
                *(policy, ratio, ratio, _perplexity(31.4), _share(1.0), 1.07),
                *(_share(0.97), _share(0.31)),
            )
            for policy, ratio in (("none", 1.0), ("sinks_recent", 0.5), ("snapkv", 0.25))
        ),
    ),
)
RETRIEVAL = quality.EvalReport(
    "retrieval",
    ("inference-svc", "eval", "retrieval"),
    3000.0,
    _SUBJECT,
    quality.RetrievalReport(
        *(20, 12, 3, 3870.4, 7, 2048, Truncation(0.5, 1)),
        tuple(
            quality.MethodRetrieval(
                name, _share(kept), _share(kept / 2), 120, 240, 4_915_200, 507.0
            )
            for name, kept in (("tt", 0.97), ("ca", 0.96), ("nkvt", 0.05))
        ),
    ),
)


def _make_edit_quality(kind: str, mode: str, reused: float, off: float) -> quality.EditQuality:
    return quality.EditQuality(
        *(kind, mode, reused, _perplexity(31.4), _share(1 + off), _share(off), _share(1 - off)),
        *(_share(0.91), _share(0.87) if kind == "replace" else None, _share(off)),
        *(Interval(off, 10 * off, 20 * off), 100),
    )


EDITS = quality.EvalReport(
    "edits",
    ("inference-svc", "eval", "edits"),
    3000.0,
    _SUBJECT,
    quality.EditsReport(
        *("WikiText-2 (test)", 100, 512, False, 6400, 46_080, 7),
        tuple(
            _make_edit_quality(kind, *found)
            for kind in ("clear", "replace", "all")
            for found in (("exact", 0.0, 0.0), ("keep", 0.962, 0.02), ("heal:16", 0.911, 0.01))
        ),
    ),
)
ROTATION = quality.EvalReport(
    "rotation",
    ("inference-svc", "eval", "rotation"),
    507.0,
    _SUBJECT,
    quality.RotationReport(
        *("WikiText-2 (test)", 4_718_592, 2048, 1024),
        (
            quality.RotationError("before rope", "float32", 1, 5.9e-8, 3.1e-7, 1.2e-7),
            quality.RotationError("double rotation", "bfloat16", 64, 2.4e-2, 0.11, 2.5e-2),
        ),
    ),
)


def _turn(session_id: str, turn: int, *, after_kill: bool = False) -> TurnFacts:
    history = 390 * turn
    tiers = ("ssd",) if after_kill else ("dram",)
    return TurnFacts(
        *(session_id, turn, history, history - 3 if history else 0, 41, 32),
        *(tiers if history else (), 0.012, 0.012 + 0.0002 * history, True, after_kill),
    )


DEMO = tuple(
    _turn(session, turn, after_kill=turn == 3)
    for turn in range(4)
    for session in ("lighthouses", "tea-ceremony")
)


def planned() -> PlanReport:
    """Return a fixed result of `kvd plan` for two capacities."""
    return plan(
        result("lru", 64, 1000, 0.353, 8.1, ttft_mean_s=0.41, queue_p99=190),
        result("predictive", 64, 1000, 0.4712, 7.2, ttft_mean_s=0.39, queue_p99=170),
        result("belady", 64, 1000, 0.8301, 6.0, ttft_mean_s=0.31, queue_p99=120),
        result("predictive", 512, 10_000, 0.6712, 5.8, ttft_mean_s=0.37, queue_p99=110),
    )


FOLLOWER = FollowerStatus(
    pid=4711,
    started_unix_s=1_790_000_000.0,
    unix_s=1_790_100_000.0,
    url="s3://sessions/prod",
    write="evicted",
    pull=True,
    kvd_up=True,
    store_up=False,
    num_unpushed=3,
    oldest_s=95.0,
    num_drops=0,
    num_wanted=1,
    num_pulling=2,
    num_evicted=7,
    pushes={"failed": 2, "pushed": 1234, "unchanged": 56},
    pulls={"absent": 78, "pulled": 90},
    num_bytes={"sent": 123_456_789_012, "received": 9_876_543_210},
    requests={"find": 2345, "get": 3456, "list": 1234, "put": 4567},
    failures=(
        Failure(1_790_050_000.0, "session_not_pushed", "damaged_remote"),
        Failure(
            1_790_099_990.0,
            "remote_store_fails",
            "the object store failed at v1/format (GenericError: Generic S3 error: error "
            "sending request)",
        ),
    ),
)
