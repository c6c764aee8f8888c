"""A kvd and a service with fixed answers, over real sockets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvd.session_files.file_format import (
    FileHeader,
    header_bytes,
    header_num_bytes,
    row_bytes,
)
from kvd.session_files.frame_writer import end_bytes, frame_bytes
from shared.pb.inference.v1 import inference_pb2, inference_pb2_grpc
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.runtime_dir import OPERATOR_SOCKET
from shared.types.lineage import Lineage
from tests.synthetic_engine import encode, key_of, small_layout

MIB = 1 << 20
MODEL = "5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e"
LAYOUT = "ab12ab12ab12ab12"
NOON_S = 1_767_265_200.0  # 2026-01-01 12:00 in Berlin


def key(session_id: str, tenant: str = "default") -> pb.SessionKey:
    return pb.SessionKey(tenant=tenant, model=MODEL, session_id=session_id)


SESSIONS = (
    pb.SessionInfo(
        session=key("conversation-17"),
        layout=LAYOUT,
        num_tokens=12_345,
        num_blocks=772,
        bytes=193 * MIB,
        dram_bytes=193 * MIB,
        dirty_bytes=MIB // 2,
        idle_s=507.0,
        expires_in_s=601_200.0,
        leases=1,
        retain_s=3600.0,
        retained_for_s=3093.0,
    ),
    pb.SessionInfo(
        session=key("9f3c1e7a-5d0b-4b8e-a1c4-0d6f2b9e8a77:assistant", "acme-industries"),
        layout=LAYOUT,
        num_tokens=801,
        num_blocks=51,
        bytes=13 * MIB,
        dram_bytes=6 * MIB,
        ssd_bytes=13 * MIB,
        idle_s=0.25,
        expires_in_s=-1,
        pin=pb.PIN_HARD,
        awaited_tools=["bash", "read_file"],
    ),
    pb.SessionInfo(
        session=key("old", "acme-industries"),
        layout=LAYOUT,
        num_tokens=16,
        num_blocks=1,
        bytes=MIB // 4,
        ssd_bytes=MIB // 4,
        idle_s=86_400.0 * 3,
        expires_in_s=59.0,
        ended=True,
    ),
)
LEASE = pb.LeaseInfo(
    lease_id=5,
    kind=pb.LEASE_KIND_LOAD,
    session=key("conversation-17"),
    pid=4711,
    engine_name="inference-svc@demo",
    process_status="sleeping",
    num_slots=772,
    bytes=193 * MIB,
    age_s=75.0,
)
BLOCKS = (
    pb.BlockInfo(
        key="00ff" * 8, num_tokens=16, tiers=[pb.TIER_DRAM], dirty=True, slot_id=3, sessions=2
    ),
    pb.BlockInfo(
        key="11ee" * 8,
        token_offset=16,
        num_tokens=9,
        tiers=[pb.TIER_DRAM, pb.TIER_SSD],
        hashed=True,
        verified=True,
        slot_id=4,
        extent=70,
        sessions=1,
    ),
    pb.BlockInfo(
        key="22dd" * 8,
        start=8,
        token_offset=131_000,
        num_tokens=8,
        tiers=[pb.TIER_DRAM, pb.TIER_SSD],
        hashed=True,
        slot_id=131_071,
        extent=1_048_575,
        sessions=12,
    ),
)
MOVES = (
    pb.SessionMove(kind="stored", age_s=5400.0, num_blocks=772, num_tokens=12_345, duration_s=1.5),
    pb.SessionMove(kind="loaded", why="dram", age_s=507.0, num_blocks=772, num_tokens=12_345),
)
LOST = (
    pb.SessionMove(kind="expired", why="ttl", age_s=300.0, num_blocks=772, num_tokens=12_345),
    pb.SessionMove(kind="missed", why="expired", age_s=12.0, num_tokens=12_345),
)
STATS = pb.GetStatsResponse(
    version="0.1.0",
    server_id="5e1ec7ed",
    server_name="gpu-1",
    process=pb.ProcessStats(
        pid=812,
        uptime_s=90_061.0,
        rss_bytes=310 * MIB,
        cpu_s=4503.0,
        memory_available_bytes=20 << 30,
        threads=12,
        open_files=48,
    ),
    layouts=[
        pb.LayoutStats(
            model=MODEL,
            layout=LAYOUT,
            num_sessions=3,
            hard_pins=1,
            dirty_bytes=MIB // 2,
            leases=1,
            counters={
                "load_hits": 95,
                "returns_dram": 61,
                "returns_ssd": 32,
                "returns_gone": 4,
                "tool_returns_dram": 48,
                "tool_returns_ssd": 2,
                "load_misses": 5,
                "load_tokens_dram": 1_234_567,
                "load_tokens_ssd": 89_012,
                "store_tokens": 456_789,
                "ssd_read_bytes": 3 << 30,
                "ssd_written_bytes": 5 << 30,
                "prefetch_blocks": 41,
                "prefetch_hits": 29,
            },
            tiers=[
                pb.TierStats(
                    tier=pb.TIER_DRAM, used_bytes=199 * MIB, capacity_bytes=8 << 30, num_blocks=796
                ),
                pb.TierStats(
                    tier=pb.TIER_SSD,
                    used_bytes=13 * MIB,
                    capacity_bytes=100 << 30,
                    physical_bytes=16 * MIB,
                    num_blocks=52,
                    degraded=True,
                    degraded_reason="full",
                ),
            ],
            tenants=[
                pb.TenantStats(tenant="default", used_bytes=193 * MIB, num_sessions=1),
                pb.TenantStats(
                    tenant="acme-industries",
                    used_bytes=13 * MIB,
                    quota_bytes=64 << 30,
                    has_quota=True,
                    num_sessions=2,
                ),
            ],
        )
    ],
    engines=[
        pb.EngineInfo(
            name="inference-svc@demo",
            pid=4711,
            rss_bytes=4 << 30,
            queue_jobs=2,
            running_jobs=1,
            attached_s=86_000.0,
        )
    ],
)
EVENTS = (
    pb.Event(unix_s=NOON_S, name="restored", fields={"num_sessions": "3", "num_blocks": "823"}),
    pb.Event(
        unix_s=NOON_S + 86_400.5,
        name="session_cut",
        session=key("old", "acme-industries"),
        fields={"num_tokens": "16", "why": "corrupt"},
    ),
)
SETTINGS = pb.GetSettingsResponse(
    settings=[
        pb.Setting(key="runtime_dir", value="/run/kvd", source="default"),
        pb.Setting(key="sessions.default_ttl", value="7d", source="file", live=True),
        pb.Setting(
            key="tenants.acme-industries.quota", value="64.0 GB", source="environment", live=True
        ),
        pb.Setting(key="ssd.volumes", value="/srv/kv-a/volume, /srv/kv-b/volume, " * 3, source="f"),
    ]
)
SERVED = inference_pb2.Model(
    name="smollm2-135m",
    fingerprint=MODEL,
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    context_window=2048,
    window_bound="scheduler.kv_tokens = 2,560 less the write ring's 512",
    vocab_size=49152,
    has_chat_template=True,
    mode="cached",
    kvd_state="attached",
    attention_mode="ragged",
    kv_bytes_per_token=46080,
    block_tokens=16,
    num_layers=30,
    running_turns=2,
    waiting_turns=1,
    version="0.1.0",
    overflow="half",
    counters={
        "turns_finished": 1234,
        "turns_cancelled": 5,
        "history_tokens": 2_000_000,
        "reused_tokens": 1_900_000,
        "recomputed_tokens": 100_000,
        "new_tokens": 345_678,
        "output_tokens": 60_000,
        "load_errors": 2,
    },
    gauges={
        "uptime_s": 90_061.0,
        "compute_busy_s": 2000.0,
        "ttft_p50_s": 0.025,
        "ttft_p95_s": 0.4,
        "tpot_p50_s": 0.031,
        "pool_token_slots": 8192,
        "pool_free_token_slots": 2048,
        "resident_sessions": 7,
        "prefill_tokens_per_s": 2345.6,
    },
)


NUM_EXPORTED = 16
SESSION_FILE = b"".join(
    (
        header_bytes(
            FileHeader(
                key_of("conversation-17"), small_layout(), Lineage(b"x" * 16, 16), "0.1.0", NOON_S
            )
        ),
        frame_bytes(
            0,
            encode(range(NUM_EXPORTED)),
            [memoryview(bytes(size * NUM_EXPORTED)) for size in row_bytes(small_layout())],
        ),
        end_bytes(NUM_EXPORTED),
    )
)
ACCEPTED = inference_pb2.Accepted(session_id="conversation-17")
ANSWER = (
    "A lighthouse keeper counts ships, not hours: each of them has a name, a flag and somebody who "
    "waits for it in the harbour behind the hill."
)
USAGE = inference_pb2.Usage(
    history_tokens=1_507,
    reused_tokens=1_504,
    recomputed_tokens=3,
    new_tokens=21,
    output_tokens=28,
    tier_tokens={"dram": 1_024, "ssd": 480},
    ttft_s=0.043,
    tpot_s=0.031,
    stall_s=0.002,
)


MISS = inference_pb2.ExplainMissResponse(
    turn=3,
    miss=inference_pb2.CacheMiss(
        cause="date_changed",
        session_id="s-0c1f2a",
        turns=3,
        token_index=41,
        message_index=0,
        lost_tokens=12_304,
        lost_s=1.9,
    ),
    told="a date or time differs",
    common="<|start|>system\nYou help at the counter. Today is Monday, 2",
    was="3 November. Be brief.<|end|>",
    now="4 November. Be brief.<|end|>",
)


class Reader(kvd_pb2_grpc.ReaderServicer):
    def ListSessions(self, request, context):  # noqa: N802
        return pb.ListSessionsResponse(sessions=SESSIONS, total=len(SESSIONS))

    def DescribeSession(self, request, context):  # noqa: N802
        if request.may_be_gone:
            return pb.DescribeSessionResponse(history=[*MOVES, *LOST])
        return pb.DescribeSessionResponse(
            info=SESSIONS[0], blocks=BLOCKS, history=MOVES, leases=[LEASE]
        )

    def ListLeases(self, request, context):  # noqa: N802
        return pb.ListLeasesResponse(leases=[LEASE])

    def GetStats(self, request, context):  # noqa: N802
        return STATS

    def GetSettings(self, request, context):  # noqa: N802
        return SETTINGS

    def WatchEvents(self, request, context):  # noqa: N802
        yield from EVENTS


class Operator(kvd_pb2_grpc.OperatorServicer):
    def Flush(self, request, context):  # noqa: N802
        return pb.FlushResponse(sessions=2, bytes=13 * MIB, skipped_leased=[SESSIONS[0].session])

    def Verify(self, request, context):  # noqa: N802
        yield pb.VerifyProgress(
            num_copies=848,
            dram=pb.TierVerified(num_blocks=796, bytes=199 * MIB),
            ssd=pb.TierVerified(num_blocks=52, bytes=13 * MIB),
            done=True,
        )

    def Pin(self, request, context):  # noqa: N802
        return pb.PinResponse()

    Unpin = Pin

    def SetTtl(self, request, context):  # noqa: N802
        return pb.SetTtlResponse(expires_in_s=request.ttl_s)

    def ReopenLayout(self, request, context):  # noqa: N802
        return pb.ReopenLayoutResponse(name=LAYOUT)

    def ReloadSettings(self, request, context):  # noqa: N802
        return pb.ReloadSettingsResponse(
            applied=["sessions.default_ttl", "tenants.acme-industries.dram"],
            needs_restart=["ssd.bytes"],
        )

    def ExportSession(self, request, context):  # noqa: N802
        if not request.chunk_bytes:
            yield pb.SessionFilePart(data=SESSION_FILE)
            return
        start = header_num_bytes(SESSION_FILE)
        yield pb.SessionFilePart(data=SESSION_FILE[:start], chunk_end=pb.ChunkEnd())
        frames = SESSION_FILE[start : -len(end_bytes(NUM_EXPORTED))]
        yield pb.SessionFilePart(data=frames, chunk_end=pb.ChunkEnd(num_tokens=NUM_EXPORTED))

    def ImportSession(self, request_iterator, context):  # noqa: N802
        for _ in request_iterator:
            pass
        return pb.ImportSessionResponse(session=SESSIONS[0].session, num_tokens=NUM_EXPORTED)


class Service(inference_pb2_grpc.InferenceServicer):
    def GetModel(self, request, context):  # noqa: N802
        return SERVED

    def ExplainMiss(self, request, context):  # noqa: N802
        return MISS

    def SubmitTurn(self, request, context):  # noqa: N802
        yield inference_pb2.TurnEvent(accepted=ACCEPTED)
        for word in ANSWER.split(" "):
            token = inference_pb2.Token(text=f"{word} ")
            yield inference_pb2.TurnEvent(tokens=inference_pb2.Tokens(tokens=[token]))
        yield inference_pb2.TurnEvent(finished=inference_pb2.Finished(text=ANSWER, usage=USAGE))


@contextmanager
def answering(directory: Path) -> Iterator[None]:
    """Serve all of them at one socket, kvd's operators', in a directory."""
    server = grpc.server(ThreadPoolExecutor(2))
    kvd_pb2_grpc.add_ReaderServicer_to_server(Reader(), server)
    kvd_pb2_grpc.add_OperatorServicer_to_server(Operator(), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(Service(), server)
    server.add_insecure_port(f"unix:{directory / OPERATOR_SOCKET}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
