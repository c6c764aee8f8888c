"""Contexts that lose tokens, in the live pair: answers are those of the re-embedded rest.

The window is 512 tokens. The judge is `tests/truncation_oracle.py`: the stock model over the
session as it was recorded, with its discards, and with the reuse that each turn's usage claims.
"""

import asyncio
from math import ceil

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from inference_svc.core.truncation import USUAL_SINKS
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import InvalidInputError
from tests.integration.overflowing import DRAM, WINDOW_TOKENS, check_all_reused, identical
from tests.models import narrow_model
from tests.pair import SLOT_BYTES, Pair
from tests.truncation_oracle import TruncationOracle

pytestmark = pytest.mark.asyncio(loop_scope="module")
REJECT = pb.Overflow(policy="reject")


@pytest.mark.parametrize(
    ("asked", "ratio"), [pytest.param({}, 0.125, marks=pytest.mark.long), ({"ratio": 0.5}, 0.5)]
)
async def test_the_oldest_part_is_dropped_and_nothing_is_recomputed(narrow, judge, asked, ratio):
    """A turn that does not fit drops a part of the context, or as much as it needs room for.

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
        check_all_reused(turn, "dram")
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
    """KV in memory is re-embedded there.

    Kvd receives the same discard, and loads the result later.
    """
    async with resident.with_kvd(*DRAM):
        turns = [await resident.say("place") for _ in range(6)]
        for name in ("x", "y", "z"):  # other sessions that need the memory
            await resident.say(name, 480, max_tokens=2)
        later = await resident.say("place")
        await identical(resident, judge, "place")
    assert sum(bool(turn.usage.dropped_tokens) for turn in turns) >= 2
    for turn in turns[1:]:
        check_all_reused(turn, "hbm")
    check_all_reused(later, "dram")


async def test_truncated_sessions_are_read_from_ssd(narrow, judge):
    """Sessions that do not fit into DRAM together are cut on SSD, and read from there."""
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


async def test_a_turn_may_protect_the_first_tokens(narrow, judge):
    """The dropped range begins after them, and is as long as the turn says."""
    sinks = pb.Overflow(policy="sinks", sink_tokens=8, ratio=0.25)
    async with narrow.with_kvd(*DRAM):
        turns = [await narrow.say("sinks", overflow=sinks) for _ in range(5)]
        session = await narrow.session("sinks")
        await identical(narrow, judge, "sinks")
    starts = {found.start for discard in session.discards for found in discard.ranges}
    assert starts == {8}
    assert list(session.context_ids[:8]) == list(session.turn_records[0].input_ids[:8])
    assert all(turn.usage.recomputed_tokens == 0 for turn in turns)


async def test_reject_refuses_the_turn_and_drops_nothing(narrow):
    """The turn is refused with its numbers, and the session continues with one that fits."""
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
    """The rest is the system message, then messages from their first token on."""
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
    """Run a service of a model with an attention sink, with default settings."""
    directory = tmp_path_factory.mktemp("leaning-pair")
    pair = Pair(narrow_model(sink_model, directory / "model", WINDOW_TOKENS), directory)
    async with pair.service:
        yield pair


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        pytest.param({}, {"overflow"}, marks=pytest.mark.long),
        ({"max_tokens": 300}, {"overflow"}),
        ({"compression": pb.Compression(policy="snapkv")}, {"compression:snapkv"}),
        pytest.param(
            {"compression": pb.Compression(policy="h2o")},
            {"compression:h2o"},
            marks=pytest.mark.long,
        ),
    ],
    ids=["between turns", "while it answers", "snapkv", "h2o"],
)
async def test_the_attention_sink_is_always_kept(leaning, sink_model, fields, reasons):
    """It is found at the start; no policy drops it, and answers are those of the rest."""
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


async def test_a_turn_may_drop_the_attention_sink(leaning):
    """The client's request has precedence over the model's."""
    async with leaning.with_kvd(*DRAM):
        sampling = pb.Sampling(max_tokens=8, ignore_eos=True)
        begin = turn_request("Each turn adds a question. ", leaning.name("s"), sampling=sampling)
        await leaning.submit(begin)
        for _ in range(3):
            await leaning.say("s", 180, overflow=pb.Overflow(sink_tokens=0))
        session = await leaning.session("s")
    assert {discard.ranges[0].start for discard in session.discards} == {0}


@pytest.mark.parametrize("tier", ["dram", pytest.param("hbm", marks=pytest.mark.long)])
async def test_an_answer_may_be_longer_than_the_window(narrow, resident, judge, tier):
    """The context is cut during the answer; the next turn reuses the rest."""
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
    check_all_reused(after, tier)


async def test_an_answer_that_may_not_be_cut_ends_with_the_window(narrow, judge):
    """A chat's last message must stay whole: the answer ends where the window is full."""
    async with narrow.with_kvd(*DRAM):
        sampling = pb.Sampling(max_tokens=2000, ignore_eos=True)
        question = [pb.ChatMessage(role="user", content="What is a block?")]
        request = turn_request(question, narrow.name("frame"), sampling=sampling)
        other = pb.SubmitTurnRequest()
        other.CopyFrom(request)
        other.session_id = narrow.name("split")
        other.sampling.max_tokens = 550
        other.overflow.split_frames = True
        framed, split = await asyncio.gather(narrow.submit(request), narrow.submit(other))
        await identical(narrow, judge, "frame", "split")
    assert framed.finished.finish_reason == "length"
    assert WINDOW_TOKENS - 100 < framed.usage.output_tokens <= WINDOW_TOKENS + 1
    assert split.usage.output_tokens == 550


async def test_a_killed_kvd_keeps_the_truncated_session(narrow, judge):
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
    check_all_reused(after[0], "dram")


async def test_without_kvd_the_rest_is_recomputed(narrow, judge):
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


@pytest.mark.long
async def test_coupled_positions_recompute_the_rest(model_dir, judge, tmp_path_factory):
    """KV behind the first dropped token is void, also in the middle of an answer."""
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
