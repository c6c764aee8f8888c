"""Edits of an agent's conversation: what follows is kept, healed or computed, as set.

The expected answers come from the stock model with the kept rows at their new positions
(`tests/truncation_oracle.py`), whatever is kept.
"""

import asyncio
import shutil
from contextlib import asynccontextmanager
from itertools import count

import pytest
import pytest_asyncio

from shared.pb.inference.v1 import inference_pb2 as pb
from tests.http_api.conftest import MODEL, ApiService, next_messages
from tests.inference_processes import wait_kvd_state
from tests.sampled import sampled
from tests.truncation_oracle import TruncationOracle

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTH = 8
CLEARED = "[cleared]"
NUM_STEPS = 5
MODES = ("exact", "keep", "heal:16")
NUMBERS = count()


@pytest.fixture(scope="module")
def judge(tiny_model):
    return TruncationOracle(tiny_model)


@asynccontextmanager
async def serving(tiny_model, directory, edits, **options):
    """Run a pair of its own in this mode."""
    service = ApiService(tiny_model, directory, more=f'[reuse]\nedits = "{edits}"\n', **options)
    await service.kvd.start()
    try:
        await service.start()
        yield service
    finally:
        await service.service.stop()
        await service.kvd.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeping(tiny_model, tmp_path_factory):
    """Run a pair that keeps what follows an edit unchanged."""
    async with serving(tiny_model, tmp_path_factory.mktemp("keep"), "keep") as service:
        yield service


async def send_chat(service, messages, *, is_saved=True, **options):
    options = {"max_tokens": LENGTH, "extra_body": {"ignore_eos": True}, **options}
    async with service.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, **options)
    if is_saved:
        await service.until_saved(answer)
    return answer


async def kvd_starts(service):
    """Start kvd and return when the service has found it."""
    await service.kvd.start()
    async with service.service.client() as client:
        await wait_kvd_state(client, "attached")


def result_of(step: int) -> str:
    """Return a tool's result."""
    return f"Result {step}: " + " ".join(f"line {step * line} is so." for line in range(12))


async def agent(service, num_steps=NUM_STEPS):
    """Build a new agent's conversation, with its last answer."""
    messages = [{"role": "system", "content": f"You are agent {next(NUMBERS)}. " * 4}]
    messages.append({"role": "user", "content": result_of(0)})
    for step in range(1, num_steps + 1):
        answer = await send_chat(service, messages)
        messages = next_messages(messages, answer.choices[0].message.content, result_of(step))
    return messages, answer


def edit_places(messages, content, *places):
    return [
        {**one, "content": content} if place in places else one
        for place, one in enumerate(messages)
    ]


def count_reused(answer):
    """Return cached, kept and healed tokens of the prompt, and its total."""
    usage = answer.usage
    extra = usage.model_extra
    return (
        usage.prompt_tokens_details.cached_tokens,
        extra.get("kept_tokens", 0),
        extra.get("healed_tokens", 0),
        usage.prompt_tokens,
    )


def id_of(answer) -> str:
    return answer.model_extra["session_id"]


async def session_of(service, answer):
    async with service.service.client() as client:
        return await client.get_session(id_of(answer), tenant="acme", with_turns=True)


async def are_by_formula(service, judge, *answers, sources=None):
    """Whether all answers are the formula's; each session may have kept parts of earlier ones."""
    sources, sessions = dict(sources or {}), []
    for answer in answers:
        session = await session_of(service, answer)
        verdict = await asyncio.to_thread(judge.judge, session, sources=sources)
        assert verdict.is_identical, verdict
        sources[id_of(answer)], _ = await asyncio.to_thread(
            judge.followed, session, sources=sources
        )
        sessions.append(session)
    return sessions


def grafts_of(session):
    return [graft for turn in session.turn_records for graft in turn.grafts]


def as_recomputed(session):
    """Return the session as it would be, if computed entirely over its own tokens."""
    plain = pb.Session()
    plain.CopyFrom(session)
    for turn in plain.turn_records:
        turn.ClearField("grafts")
    return plain


async def goes_on(service, messages, answer):
    """Check that the next turn finds all but the answer's last token, and keeps nothing."""
    messages = next_messages(messages, answer.choices[0].message.content, "Go on.")
    onward = await send_chat(service, messages)
    assert id_of(onward) == id_of(answer)
    assert count_reused(onward)[:3] == (answer.usage.total_tokens - 1, 0, 0)
    return messages, onward


@pytest.mark.parametrize("edits", sampled(MODES, 1, seed=1, always=("heal:16",)))
async def test_what_follows_a_cleared_result_is_kept(tiny_model, tmp_path, judge, edits):
    """What follows it is kept; next turns continue there, and a miss is still explained."""
    async with serving(tiny_model, tmp_path, edits) as service:
        messages, before = await agent(service)
        messages = edit_places(messages, CLEARED, 3)
        first = await send_chat(service, messages)
        cached, kept, healed, prompt = count_reused(first)
        await goes_on(service, messages, first)
        _, session = await are_by_formula(service, judge, before, first)
        counted = await service.counter("kept_tokens"), await service.counter("healed_tokens")
        plain = await asyncio.to_thread(judge.judge, as_recomputed(session))
    assert id_of(first) != id_of(before)
    assert first.usage.model_extra["cache_miss"]["session_id"] == id_of(before)
    assert counted == (kept, healed)
    grafts = grafts_of(session)
    assert sum(graft.num_tokens for graft in grafts) == kept
    assert plain.is_identical == (edits == "exact"), "the judge knows them apart"
    if edits == "exact":
        assert not grafts
        assert cached < prompt / 2
    else:
        assert healed == len(grafts) * (16 if edits == "heal:16" else 0)
        assert cached > 0.5 * prompt
        assert kept > 0.4 * prompt


async def run_script(service):
    """Run an agent that clears results, summarises and edits; return its answers by session."""
    messages = [{"role": "system", "content": "You are an agent. " * 4}]
    messages.append({"role": "user", "content": result_of(0)})
    shares, last = [0, 0], {}
    for step in range(1, 11):
        results = [at for at, one in enumerate(messages) if one["content"].startswith("Result")]
        if step in (5, 8):
            messages = edit_places(messages, CLEARED, *results[:-3])
        elif step == 9:
            summary = {"role": "user", "content": "All went well so far."}
            messages = [messages[0], summary, *messages[6:]]
        elif step == 10:
            messages = edit_places(messages, "Another question.", results[-3])
        answer = await send_chat(service, messages)
        cached, *_, prompt = count_reused(answer)
        shares = [shares[0] + cached, shares[1] + prompt]
        last[id_of(answer)] = answer
        messages = next_messages(messages, answer.choices[0].message.content, result_of(step))
    return shares[0] / shares[1], list(last.values())


@pytest.mark.long  # the edits of its script are tried one by one, too
async def test_a_scripted_agent(tiny_model, tmp_path, judge):
    """More of its prompts is reused where edits are kept; each answer is the formula's."""
    share = {}
    for mode in MODES:
        directory = tmp_path / mode.partition(":")[0]
        directory.mkdir()
        async with serving(tiny_model, directory, mode) as service:
            share[mode], answers = await run_script(service)
            sessions = await are_by_formula(service, judge, *answers)
        assert len(answers) == 5, "one for each edit, and the first"
        assert bool(sum(map(len, map(grafts_of, sessions)))) == (mode != "exact")
    assert share.pop("exact") + 0.05 < min(share.values())


async def test_a_compacted_beginning(keeping, judge):
    """A summary replaces the first exchanges, and the rest moves up."""
    messages, before = await agent(keeping)
    messages = [messages[0], {"role": "user", "content": "All went well so far."}, *messages[6:]]
    answer = await send_chat(keeping, messages)
    cached, kept, _, prompt = count_reused(answer)
    assert kept > 0.5 * prompt
    assert cached >= kept
    await goes_on(keeping, messages, answer)
    await are_by_formula(keeping, judge, before, answer)


async def test_removed_messages_are_not_replaced(keeping, judge):
    """What follows the removed messages now follows what preceded them."""
    messages, before = await agent(keeping)
    messages = [*messages[:3], *messages[5:]]
    answer = await send_chat(keeping, messages)
    assert count_reused(answer)[1] > 0
    await are_by_formula(keeping, judge, before, answer)


async def test_several_edits_at_once(keeping, judge):
    """Each edit is a seam."""
    messages, before = await agent(keeping, 7)
    messages = edit_places(messages, CLEARED, 3, 9)
    answer = await send_chat(keeping, messages)
    _, session = await are_by_formula(keeping, judge, before, answer)
    assert len(grafts_of(session)) >= 2
    await goes_on(keeping, messages, answer)


async def test_an_edit_of_kept_tokens(keeping, judge):
    """What precedes the new edit is kept where it was kept before."""
    messages, before = await agent(keeping)
    messages = edit_places(messages, CLEARED, 3)
    first = await send_chat(keeping, messages)
    messages, onward = await goes_on(keeping, messages, first)
    again = edit_places(messages, "Another one.", 7)
    second = await send_chat(keeping, again)
    *_, session = await are_by_formula(keeping, judge, before, onward, second)
    cached, kept, _, prompt = count_reused(second)
    assert cached > 0.4 * prompt
    assert {graft.session_id for graft in grafts_of(session)} >= {id_of(first)}
    assert kept > 0


async def test_a_kept_session_survives_a_restart_of_both_processes(tiny_model, tmp_path, judge):
    """The session has its lineage in its transcript, and its KV on SSD."""
    async with serving(tiny_model, tmp_path, "keep", keep="none") as service:
        messages, before = await agent(service)
        messages = edit_places(messages, CLEARED, 3)
        first = await send_chat(service, messages)
        assert count_reused(first)[1] > 0
        await service.kvd.stop()
        await kvd_starts(service)
        await service.service.stop()
        await service.start()
        messages, onward = await goes_on(service, messages, first)
        await service.service.kill()
        await service.start()
        await goes_on(service, messages, onward)
        await are_by_formula(service, judge, before, onward)


async def test_kept_blocks_are_read_from_ssd(tiny_model, tmp_path, judge):
    """kvd starts with empty DRAM, so the computed session is read from SSD."""
    options = {"kvd_options": ("--dram", "4MB", "--ssd", "64MB"), "keep": "none"}
    async with serving(tiny_model, tmp_path, "keep", **options) as service:
        messages, before = await agent(service)
        await service.kvd.stop()
        await kvd_starts(service)
        messages = edit_places(messages, CLEARED, 3)
        first = await send_chat(service, messages)
        _, session = await are_by_formula(service, judge, before, first)
        usage = session.turn_records[-1].usage
        assert usage.kept_tokens > 0
        assert sum(usage.tier_tokens.values()) == usage.reused_tokens


async def test_the_source_session_is_deleted(keeping, judge):
    """Deleted afterwards: the blocks have another user. Before: nothing can be kept."""
    messages, before = await agent(keeping)
    old = await session_of(keeping, before)
    first = await send_chat(keeping, edit_places(messages, CLEARED, 3))
    assert count_reused(first)[1] > 0
    async with keeping.service.client() as client:
        await client.delete_session(id_of(before), tenant="acme")
    _, onward = await goes_on(keeping, edit_places(messages, CLEARED, 3), first)
    rows, _ = await asyncio.to_thread(judge.followed, old)
    other = await send_chat(keeping, edit_places(messages, "Nothing.", 5))
    assert "session_gone" not in str(first.usage.model_extra)
    await are_by_formula(keeping, judge, onward, other, sources={id_of(before): rows})


async def test_nothing_is_kept_if_kvd_has_lost_it_or_is_down(tiny_model, tmp_path, judge):
    """All is computed, and no turn fails."""
    async with serving(tiny_model, tmp_path, "keep") as service:
        messages, before = await agent(service)
        await service.kvd.stop()
        away = await send_chat(service, edit_places(messages, CLEARED, 3), is_saved=False)
        assert count_reused(away)[:3] == (0, 0, 0)
        shutil.rmtree(service.kvd.state_dir)
        shutil.rmtree(service.kvd.state_dir.parent / "shm", ignore_errors=True)
        await kvd_starts(service)
        lost = await send_chat(service, edit_places(messages, "Nothing.", 3))
        assert count_reused(lost)[1] == 0
        await are_by_formula(service, judge, before, away, lost)


async def test_kvd_is_killed_during_an_edited_turn(tiny_model, tmp_path, judge):
    """At any moment, the turn is answered by the formula of what it kept."""
    async with serving(tiny_model, tmp_path, "heal:16") as service:
        messages, before = await agent(service)
        turn = send_chat(service, edit_places(messages, CLEARED, 3), is_saved=False)
        answer, _ = await asyncio.gather(turn, service.kvd.kill())
        await kvd_starts(service)
        await are_by_formula(service, judge, before, answer)
        again = await send_chat(service, edit_places(messages, "Nothing.", 3))
        await are_by_formula(service, judge, before, again)
