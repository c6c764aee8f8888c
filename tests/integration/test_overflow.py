"""Contexts that lose tokens, in the live pair: the answers are those of re-embedding what is left.

The window is 512 tokens. The judge is `tests/truncation_oracle.py`: the stock model over the
session as it was recorded, with its discards, and with the reuse that each turn's usage claims.
"""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from math import ceil

import grpc
import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from inference_svc.core.truncation import USUAL_SINKS
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.process.runtime_dir import channel_options
from shared.types.errors import ConflictError, InvalidInputError
from tests.models import narrow_model
from tests.pair import SLOT_BYTES, Pair, until
from tests.truncation_oracle import TruncationOracle

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW_TOKENS = 512
NUM_LEAVING = 12  # clients that hang up in the middle
DRAM = ("--dram", "16MB")
REJECT = pb.Overflow(policy="reject")


@pytest.fixture(scope="module")
def model_dir(tiny_model, tmp_path_factory):
    """The tiny model with a small window."""
    return narrow_model(tiny_model, tmp_path_factory.mktemp("narrow") / "tiny", WINDOW_TOKENS)


@pytest.fixture(scope="module")
def judge(model_dir):
    return TruncationOracle(model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(model_dir, tmp_path_factory):
    """A service that keeps nothing in memory: what a turn reuses comes from kvd."""
    pair = Pair(model_dir, tmp_path_factory.mktemp("narrow-pair"))
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resident(model_dir, tmp_path_factory):
    """A service whose sessions stay in memory, which is too small for four of them."""
    directory = tmp_path_factory.mktemp("resident-pair")
    (directory / "settings.toml").write_text("[scheduler]\nkv_tokens = 2400\n")
    flags = ("--config", str(directory / "settings.toml"), "--residents")
    pair = Pair(model_dir, directory, *flags)
    async with pair.service:
        yield pair


async def identical(pair, judge, *names, coupled=False):
    """Whether the judge agrees with every answer of these sessions."""
    for name in names:
        session = await pair.session(name)
        assert session.context_tokens <= WINDOW_TOKENS + 1  # an answer's last token has no row
        verdict = await asyncio.to_thread(judge.judge, session, coupled=coupled)
        assert verdict.is_identical, (name, verdict)


def reused_all(turn, *tiers):
    """The turn recomputed nothing, and found its history in these tiers."""
    usage = turn.usage
    assert usage.reused_tokens == usage.history_tokens > 0
    assert (usage.recomputed_tokens, usage.recompute_reason) == (0, "")
    assert set(usage.tier_tokens) == set(tiers)


async def is_cut(pair, session_id, num_tokens):
    """Whether kvd has less of a session than so many tokens."""
    return (await pair.stored(session_id)).num_tokens < num_tokens


@asynccontextmanager
async def begun(pair, request, until="tokens"):
    """A turn that answers, or at least waits; it is cancelled at the end."""
    async with (
        pair.service.client() as client,
        aclosing(client.stream_turn(request)) as events,
    ):
        async for event in events:
            if event.WhichOneof("event") == until:
                break
        yield client


# --------------------------------------------------------------------------- before a turn begins


@pytest.mark.parametrize(("asked", "ratio"), [({}, 0.125), ({"ratio": 0.5}, 0.5)])
async def test_the_oldest_part_goes_and_nothing_is_recomputed(narrow, judge, asked, ratio):
    """A turn that does not fit drops a part of what is there, or as much as it needs room for.

    The rest comes from DRAM.
    """
    name, overflow = f"oldest-{ratio}", pb.Overflow(**asked)
    async with narrow.with_kvd(*DRAM):
        before = await narrow.counters()
        turns = [await narrow.say(name, overflow=overflow) for _ in range(6)]
        after = await narrow.counters()
        session = await narrow.session(name)
        await identical(narrow, judge, name)
    overflowed = [turn for turn in turns if turn.usage.dropped_tokens]
    assert len(overflowed) >= 2
    for turn in turns[1:]:
        reused_all(turn, "dram")
    for turn in overflowed:
        history = turn.usage.history_tokens + turn.usage.dropped_tokens
        wanted = history + turn.usage.new_tokens + turn.usage.output_tokens - WINDOW_TOKENS
        assert abs(turn.usage.dropped_tokens - max(ceil(ratio * history), wanted)) <= 1
    dropped_tokens = sum(turn.usage.dropped_tokens for turn in turns)
    assert session.dropped_tokens == dropped_tokens
    assert session.num_tokens == session.context_tokens + dropped_tokens
    assert after["overflows"] - before["overflows"] == len(overflowed)
    assert after["dropped_tokens"] - before["dropped_tokens"] == dropped_tokens
    assert {discard.reason for discard in session.discards} == {"overflow"}


async def test_in_memory_rows_are_moved_in_place(resident, judge):
    """KV in memory is re-embedded there; kvd receives the same discard, and has it later."""
    async with resident.with_kvd(*DRAM):
        turns = [await resident.say("place") for _ in range(6)]
        for name in ("x", "y", "z"):  # who need the memory
            await resident.say(name, 480, max_tokens=2)
        later = await resident.say("place")
        await identical(resident, judge, "place")
    assert sum(bool(turn.usage.dropped_tokens) for turn in turns) >= 2
    for turn in turns[1:]:
        reused_all(turn, "hbm")
    reused_all(later, "dram")


async def test_from_ssd(narrow, judge):
    """Sessions that do not fit DRAM together are cut where they lie, and read from SSD."""
    async with narrow.with_kvd("--dram", str(3 * SLOT_BYTES), "--ssd", "64MB", reads_ahead=False):
        turns = []
        for _ in range(5):
            for name in ("a", "b"):
                turns.append(await narrow.say(name, 180))
                await narrow.until_saved()
        await identical(narrow, judge, "a", "b")
    assert sum(bool(turn.usage.dropped_tokens) for turn in turns) >= 4
    assert all(turn.usage.recomputed_tokens == 0 for turn in turns)
    assert any(turn.usage.tier_tokens["ssd"] for turn in turns if turn.usage.dropped_tokens)


async def test_the_first_tokens_stay_that_a_turn_wants_to(narrow, judge):
    """The range begins after them, and is as long as the turn says."""
    sinks = pb.Overflow(policy="sinks", sink_tokens=8, ratio=0.25)
    async with narrow.with_kvd(*DRAM):
        turns = [await narrow.say("sinks", overflow=sinks) for _ in range(5)]
        session = await narrow.session("sinks")
        await identical(narrow, judge, "sinks")
    starts = {found.start for discard in session.discards for found in discard.ranges}
    assert starts == {8}
    assert list(session.context_ids[:8]) == list(session.turn_records[0].input_ids[:8])
    assert all(turn.usage.recomputed_tokens == 0 for turn in turns)


async def test_reject_keeps_everything_and_says_no(narrow):
    """The turn is refused with its numbers, and the session goes on with one that fits."""
    async with narrow.with_kvd(*DRAM):
        for _ in range(2):
            await narrow.say("full", 200)
        with pytest.raises(InvalidInputError) as caught:
            await narrow.say("full", 200, overflow=REJECT)
        kept = await narrow.say("full", 20, overflow=REJECT)
        session = await narrow.session("full")
    assert caught.value.reason == "input_too_long"
    assert str(WINDOW_TOKENS) in caught.value.message
    assert kept.usage.reused_tokens == kept.usage.history_tokens
    assert not session.discards


async def test_a_chat_keeps_its_system_message_and_whole_messages(narrow, judge, model_dir):
    """What is left is the system message, then messages from their first token on."""
    system = pb.ChatMessage(role="system", content="Be brief. " * 8)
    sampling = pb.Sampling(max_tokens=30, ignore_eos=True)
    async with narrow.with_kvd(*DRAM):
        name = narrow.name("chat")
        for turn in range(7):
            question = pb.ChatMessage(role="user", content=f"What is a block? {turn} " * 4)
            messages = [system, question] if turn == 0 else [question]
            result = await narrow.submit(turn_request(messages, name, sampling=sampling))
            assert result.usage.recomputed_tokens == 0
        session = await narrow.session("chat")
        await identical(narrow, judge, "chat")
    text = _text(model_dir, session.context_ids)
    head, _, rest = text.partition("<|end|>\n")
    assert head == "<|start|>system\n" + system.content
    assert rest.startswith(("<|start|>user\n", "<|start|>assistant\n"))
    assert session.dropped_tokens > 0


def _text(model_dir, token_ids):
    from transformers import AutoTokenizer

    text: str = AutoTokenizer.from_pretrained(model_dir).decode(list(token_ids))
    return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def leaning(sink_model, tmp_path_factory):
    """A service of a model that leans on its first token, with settings as they are by default."""
    directory = tmp_path_factory.mktemp("leaning-pair")
    pair = Pair(narrow_model(sink_model, directory / "model", WINDOW_TOKENS), directory)
    async with pair.service:
        yield pair


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, {"overflow"}),
        ({"max_tokens": 600}, {"overflow"}),
        ({"compression": pb.Compression(policy="snapkv")}, {"compression:snapkv"}),
        ({"compression": pb.Compression(policy="h2o")}, {"compression:h2o"}),
    ],
    ids=["between turns", "while it answers", "snapkv", "h2o"],
)
async def test_what_a_model_leans_on_stays_whatever_goes(leaning, sink_model, fields, reasons):
    """It is found at the start; no policy drops it, and answers are those of what is left."""
    async with leaning.service.client() as client:
        assert (await client.get_model()).sink_tokens == USUAL_SINKS
    async with leaning.with_kvd(*DRAM):
        sampling = pb.Sampling(max_tokens=8, ignore_eos=True)
        begin = turn_request("Each turn adds a question. ", leaning.name("s"), sampling=sampling)
        await leaning.submit(begin)
        for _ in range(4):
            await leaning.say("s", 180, **fields)
        session = await leaning.session("s")
        judge = TruncationOracle(sink_model)
        await identical(leaning, judge, "s")
    assert {discard.reason for discard in session.discards} >= reasons
    first_ids = list(session.turn_records[0].input_ids[:USUAL_SINKS])
    assert first_ids[0] == judge.bos_id
    assert list(session.context_ids[:USUAL_SINKS]) == first_ids


async def test_a_turn_may_give_up_what_its_model_leans_on(leaning):
    """The client's wish comes before the model's."""
    async with leaning.with_kvd(*DRAM):
        sampling = pb.Sampling(max_tokens=8, ignore_eos=True)
        begin = turn_request("Each turn adds a question. ", leaning.name("s"), sampling=sampling)
        await leaning.submit(begin)
        for _ in range(3):
            await leaning.say("s", 180, overflow=pb.Overflow(sink_tokens=0))
        session = await leaning.session("s")
    assert {discard.ranges[0].start for discard in session.discards} == {0}


# ------------------------------------------------------------------------------- while it answers


@pytest.mark.parametrize("tier", ["dram", pytest.param("hbm", marks=pytest.mark.long)])
async def test_an_answer_may_be_longer_than_the_window(narrow, resident, judge, tier):
    """The context is cut while the answer goes on; the next turn reuses what is left."""
    pair = resident if tier == "hbm" else narrow
    async with pair.with_kvd(*DRAM):
        await pair.say("long", 200)
        answer = await pair.say("long", 100, max_tokens=600)
        after = await pair.say("long", 40)
        session = await pair.session("long")
        await identical(pair, judge, "long")
    assert len(answer.token_ids) == 600
    assert answer.finished.finish_reason == "length"
    assert answer.usage.dropped_tokens > 200
    assert [discard.turn for discard in session.discards].count(1) >= 2, session.discards
    assert list(session.turn_records[1].output_ids) == answer.token_ids
    reused_all(after, tier)


async def test_an_answer_that_may_not_be_cut_ends_with_the_window(narrow, judge):
    """Nothing of a chat's last message goes: the answer ends there, as long as it is."""
    async with narrow.with_kvd(*DRAM):
        sampling = pb.Sampling(max_tokens=2000, ignore_eos=True)
        question = [pb.ChatMessage(role="user", content="What is a block?")]
        request = turn_request(question, narrow.name("frame"), sampling=sampling)
        framed = await narrow.submit(request)
        request.session_id = narrow.name("split")
        request.sampling.max_tokens = 550
        request.overflow.split_frames = True
        split = await narrow.submit(request)
        await identical(narrow, judge, "frame", "split")
    assert framed.finished.finish_reason == "length"
    assert WINDOW_TOKENS - 100 < framed.usage.output_tokens <= WINDOW_TOKENS + 1
    assert split.usage.output_tokens == 550


async def test_a_cancelled_turn_leaves_the_session_as_it_was(narrow, judge):
    """The next turn has the whole context again, recomputed."""
    async with narrow.with_kvd(*DRAM):
        for _ in range(3):
            await narrow.say("undone", 140)
        before = await narrow.session("undone")
        request = turn_request(
            narrow.some_tokens(100),
            narrow.name("undone"),
            sampling=pb.Sampling(max_tokens=4000, ignore_eos=True),
        )
        async with begun(narrow, request):
            pass
        after = await narrow.say("undone", 20, wait=True)
        session = await narrow.session("undone")
        again = await narrow.say("undone")
        await identical(narrow, judge, "undone")
    assert session.turns == before.turns + 1
    assert list(session.context_ids[: before.context_tokens]) == list(before.context_ids)
    assert after.usage.history_tokens == before.context_tokens - 1
    assert again.usage.recomputed_tokens == 0


@pytest.mark.parametrize("tier", [pytest.param("dram", marks=pytest.mark.long), "hbm"])
async def test_a_context_that_repeats_itself_is_not_taken_for_what_a_cancelled_turn_left(
    narrow, resident, judge, tier
):
    """What it left has the tokens of the next turn's context, and rows of another one."""
    pair = resident if tier == "hbm" else narrow
    period, name = pair.some_tokens(7), "periodic"
    async with pair.with_kvd(*DRAM):
        first = turn_request(period * 60, pair.name(name), sampling=pb.Sampling(max_tokens=1))
        await pair.submit(first)
        await pair.until_saved()  # blocks that are being written outlive the cut for that long
        before = await pair.session(name)
        cut = turn_request(
            pair.some_tokens(100),
            pair.name(name),
            sampling=pb.Sampling(max_tokens=4000, ignore_eos=True),
            overflow=pb.Overflow(ratio=20 * len(period) / before.context_tokens),
        )
        async with begun(pair, cut):
            pass
        after = await pair.say(name, 20, max_tokens=24, wait=True)
        await identical(pair, judge, name)
    assert after.usage.history_tokens == len(period) * 60
    assert after.usage.reused_tokens == 0


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.long), ("--residents",)])
async def test_a_turn_cancelled_while_it_waited_is_tried_again(
    model_dir, judge, tmp_path_factory, flags
):
    """What it dropped is gone, what was left is found by the retry, which drops the same."""
    directory = tmp_path_factory.mktemp("one-by-one")
    (directory / "settings.toml").write_text("[scheduler]\nmax_running = 1\nmax_loading = 1\n")
    pair = Pair(model_dir, directory, "--config", str(directory / "settings.toml"), *flags)

    def long_turn(name):
        sampling = pb.Sampling(max_tokens=4000, ignore_eos=True)
        return turn_request(pair.some_tokens(20), pair.name(name), sampling=sampling)

    async with pair.service, pair.with_kvd(*DRAM):
        for _ in range(2):
            await pair.say("of", 200)
        await pair.until_saved()
        before = (await pair.stored("of")).num_tokens
        wanted = turn_request(
            pair.some_tokens(150), pair.name("of"), sampling=pb.Sampling(max_tokens=16), wait=True
        )
        async with (
            begun(pair, long_turn("runs")),
            begun(pair, long_turn("is-next"), until="started"),
            begun(pair, wanted, until="accepted"),
        ):
            await until(partial(is_cut, pair, "of", before))
        retry = await pair.submit(wanted)
        await identical(pair, judge, "of")
    assert retry.usage.dropped_tokens > 0
    reused_all(retry, "hbm" if flags else "dram")


# ------------------------------------------------------------------------------ failures and forks


async def test_a_killed_kvd_has_what_was_cut(narrow, judge):
    """After SIGKILL its DRAM is adopted, with the discard."""
    async with narrow.with_kvd(*DRAM, keep="file"):
        turns = [await narrow.say("killed", 160) for _ in range(4)]
        await narrow.until_saved()
        await narrow.kvd.kill()
        await narrow.until_kvd_is("detached")
        await narrow.kvd.start()
        await narrow.until_kvd_is("attached")
        after = [await narrow.say("killed", 160) for _ in range(2)]
        await identical(narrow, judge, "killed")
    assert any(turn.usage.dropped_tokens for turn in turns)
    assert any(turn.usage.dropped_tokens for turn in after)
    reused_all(after[0], "dram")


async def test_without_kvd_what_is_left_is_recomputed(narrow, judge):
    """A discard that does not reach kvd costs a recomputation, not a wrong answer."""
    async with narrow.with_kvd(*DRAM, keep="file"):
        for _ in range(2):
            await narrow.say("alone", 180)
        await narrow.until_saved()
        await narrow.kvd.kill()
        await narrow.until_kvd_is("detached")
        alone = [await narrow.say("alone", 180) for _ in range(2)]
        await narrow.kvd.start()
        await narrow.until_kvd_is("attached")
        back = [await narrow.say("alone", 180) for _ in range(2)]
        await identical(narrow, judge, "alone")
    assert alone[0].usage.dropped_tokens > 0
    assert alone[0].usage.recomputed_tokens == alone[0].usage.history_tokens
    assert back[1].usage.recomputed_tokens == 0


async def test_forks_from_before_and_after_a_discard(narrow, judge):
    """Each goes on with the context of its turn, and disturbs nobody."""
    async with narrow.with_kvd(*DRAM):
        turns = [await narrow.say("parent", 160) for _ in range(3)]
        (cut,) = {turn.accepted.turn for turn in turns if turn.usage.dropped_tokens}
        async with narrow.service.client() as client:
            parent = narrow.name("parent")
            await client.fork_session(parent, cut, narrow.name("before"))
            await client.fork_session(parent, cut + 1, narrow.name("after"))
        for _ in range(2):
            for name in ("before", "after", "parent"):
                await narrow.say(name, 120)
        sessions = [await narrow.session(name) for name in ("before", "after", "parent")]
        await identical(narrow, judge, "before", "after", "parent")
    assert len(sessions[0].discards) < len(sessions[1].discards) <= len(sessions[2].discards)


# ------------------------------------------------------------------------- discards by the client


@pytest.mark.parametrize("tier", ["dram", pytest.param("hbm", marks=pytest.mark.long)])
async def test_a_client_may_drop_any_tokens(narrow, resident, judge, tier):
    """Ranges and positions of the context; the next turn reuses what is left, also after a fork."""
    pair = resident if tier == "hbm" else narrow
    async with pair.with_kvd(*DRAM):
        for _ in range(2):
            await pair.say("tdl")
        before = await pair.session("tdl")
        name = pair.name("tdl")
        async with pair.service.client() as client:
            lost = await client.discard(
                name, [(200, 230), (10, 20), (15, 40)], [50, 52, 53], expected_turn=2
            )
            middle = await pair.session("tdl")
            more = await client.discard(name, [(0, 5)], expected_context_tokens=lost.context_tokens)
            await client.fork_session(name, None, pair.name("fork"))
        turns = [await pair.say("tdl"), await pair.say("fork", 60)]
        await identical(pair, judge, "tdl", "fork")
    gone = {*range(10, 40), 50, 52, 53, *range(200, 230)}
    left = [token for at, token in enumerate(before.context_ids) if at not in gone]
    assert list(middle.context_ids) == left
    assert (lost.dropped_tokens, lost.context_tokens) == (len(gone), len(left))
    assert (more.dropped_tokens, more.context_tokens) == (5, len(left) - 5)
    assert turns[0].usage.history_tokens == len(left) - 5 - 1
    reused_all(turns[0], tier)


async def test_a_busy_session_is_not_cut(narrow):
    """A turn under way would lose what it reads."""
    async with narrow.with_kvd(*DRAM):
        name = narrow.name("busy")
        request = turn_request(
            narrow.some_tokens(20), name, sampling=pb.Sampling(max_tokens=400, ignore_eos=True)
        )
        async with begun(narrow, request) as client:
            with pytest.raises(ConflictError) as busy:
                await client.discard(name, [(0, 5)])
    assert busy.value.reason == "session_busy"


async def said_when_free(pair, name):
    """A turn, once nobody changes the session any more."""
    while True:
        with suppress(ConflictError):
            return await pair.say(name, 5, max_tokens=2)


@pytest.mark.long
async def test_a_client_that_leaves_does_not_leave_a_discard_half_done(model_dir, tmp_path):
    """Whenever it hangs up, what the next turn sees is what is on disk."""
    pair = Pair(model_dir, tmp_path, "--mode", "recompute")
    async with pair.service:
        async with grpc.aio.insecure_channel(
            pair.service.address, options=channel_options()
        ) as channel:
            stub, whole_s = inference_pb2_grpc.InferenceStub(channel), 0.0
            for number in range(NUM_LEAVING):
                name = pair.name(f"left{number}")
                await pair.say(f"left{number}", 30, max_tokens=2)
                gone = [pb.TokenRange(start=0, end=10)]
                begun_s = time.perf_counter()
                call = stub.Discard(pb.DiscardRequest(session_id=name, ranges=gone))
                if number:  # the first one is measured, the others end somewhere inside it
                    await asyncio.sleep(whole_s * number / NUM_LEAVING)
                    call.cancel()
                with suppress(asyncio.CancelledError):
                    await call
                    whole_s = whole_s or time.perf_counter() - begun_s
                await said_when_free(pair, f"left{number}")
        before = [await pair.session(f"left{number}") for number in range(NUM_LEAVING)]
        await pair.service.stop()
        await pair.service.start()
        after = [await pair.session(f"left{number}") for number in range(NUM_LEAVING)]
    assert before == after
    assert any(session.discards for session in after)


@pytest.mark.long
async def test_coupled_positions_recompute_what_is_left(model_dir, judge, tmp_path_factory):
    """What is behind the first dropped token is void, also in the middle of an answer."""
    directory = tmp_path_factory.mktemp("coupled-pair")
    (directory / "settings.toml").write_text('[model]\npositions = "coupled"\n')
    pair = Pair(model_dir, directory, "--config", str(directory / "settings.toml"))
    sinks = pb.Overflow(policy="sinks", sink_tokens=100)
    async with pair.service, pair.with_kvd(*DRAM):
        for _ in range(2):
            await pair.say("of", 180)
        cut = await pair.say("of", 180, max_tokens=200, overflow=sinks)
        after = await pair.say("of", 20)
        await identical(pair, judge, "of", coupled=True)
        async with pair.service.client() as client:
            model = await client.get_model()
    assert (model.positions, model.overflow) == ("coupled", "oldest")
    assert cut.usage.dropped_tokens > 180  # before it, and during it
    assert 0 < cut.usage.reused_tokens <= 100
    assert cut.usage.recomputed_tokens == cut.usage.history_tokens - cut.usage.reused_tokens
    assert cut.usage.recompute_reason
    assert after.usage.recomputed_tokens == 0


# ------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("sinks_recent", marks=pytest.mark.long),
        "snapkv",
        pytest.param("h2o", marks=pytest.mark.long),
    ],
)
async def test_a_compressed_session_goes_on_with_what_was_kept(narrow, judge, policy):
    """Each turn gives up the part that it was asked to; the next one reuses all that is left."""
    async with narrow.with_kvd(*DRAM):
        wanted = pb.Compression(policy=policy, keep_ratio=0.5)
        turns = [await narrow.say("less", 240, compression=wanted) for _ in range(3)]
        session = await narrow.session("less")
        await identical(narrow, judge, "less")
    assert turns[0].usage.compressed_tokens == (240 + 15) // 2
    assert session.context_tokens < 240
    assert {discard.reason for discard in session.discards} == {f"compression:{policy}"}
    for turn in turns[1:]:
        reused_all(turn, "dram")
    assert len({turn.usage.compressed_tokens for turn in turns}) > 1
