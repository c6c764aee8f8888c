"""The calls of an engine: for its own sessions, while it is attached and kvd is not stopping."""

import pytest

from kvd.core.records.errors import InvalidRequestError, LeaseLostError, UnknownSessionError
from kvd.errors import NotAttachedError, StoppingError
from shared.access.identity import TenantDeniedError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.awaited_tools import InvalidToolNamesError
from tests.kvd.rpc.service_bench import TOKENS, serving
from tests.synthetic_engine import encode

OTHERS = encode(range(50, 66))
ROOM = 40  # more blocks than the arena of these tests has


async def test_stored_tokens_are_loaded(tmp_path):
    """All of them, in spans that follow each other; the lease ends once."""
    async with serving(tmp_path) as served:
        assert (await served.store()).stored_tokens == 16
        found = await served.load()
        assert (found.lookup, found.end_token) == (pb.LOOKUP_HIT, 16)
        assert [(span.token_offset, span.num_tokens) for span in found.spans] == [(0, 16)]
        ended = pb.CompleteLoadRequest(engine_id=served.engine.engine_id, lease_id=found.lease_id)
        await served.service.CompleteLoad(ended, None)
        with pytest.raises(LeaseLostError):
            await served.service.CompleteLoad(ended, None)


async def test_a_miss_has_a_reason(tmp_path):
    """There is no lease."""
    async with serving(tmp_path) as served:
        await served.store()
        for session_id, tokens, why in (
            ("b", OTHERS, "unknown_session"),
            ("a", OTHERS, "tokens_differ"),
        ):
            found = await served.load(session_id, tokens)
            assert (found.lookup, found.miss_reason) == (pb.LOOKUP_MISS, why)
            assert not found.lease_id


async def test_a_store_that_fails_leaves_nothing(tmp_path):
    """The engine completes it as failed."""
    async with serving(tmp_path) as served:
        request = pb.PrepareStoreRequest(**served.named(token_ids=TOKENS))
        granted = await served.service.PrepareStore(request, None)
        failed = pb.CompleteStoreRequest(
            engine_id=served.engine.engine_id, lease_id=granted.lease_id, success=False
        )
        assert (await served.service.CompleteStore(failed, None)).stored_tokens == 0
        assert (await served.load()).lookup == pb.LOOKUP_MISS


async def test_a_store_that_waits_in_vain_for_slots_gets_none(tmp_path):
    """After a bounded time the answer is that there is no room."""
    async with serving(tmp_path) as served:
        tokens = encode(range(16 * ROOM))
        request = pb.PrepareStoreRequest(**served.named(token_ids=tokens, deadline_s=0.05))
        granted = await served.service.PrepareStore(request, None)
        assert granted.lease_id
        more = pb.PrepareStoreRequest(**served.named("b", token_ids=OTHERS, deadline_s=0.05))
        refused = await served.service.PrepareStore(more, None)
        assert (refused.refused_reason, len(refused.blocks)) == ("no_space", 0)


async def test_other_models_and_tenants_are_refused(tmp_path):
    """Before any look-up."""
    async with serving(tmp_path, tenants=("acme",)) as served:
        await served.store(tenant="acme")
        assert served.keys() == {"a"}
        with pytest.raises(TenantDeniedError):
            await served.load()
        foreign = pb.GetSessionRequest(**served.named(tenant="acme"))
        foreign.session.model = "cd" * 16
        with pytest.raises(InvalidRequestError, match="model"):
            await served.service.GetSession(foreign, None)


async def test_discarded_tokens_are_not_found_again(tmp_path):
    """The rest of the session is."""
    async with serving(tmp_path) as served:
        await served.store()
        request = pb.DiscardRequest(**served.named(token_ids=TOKENS))
        request.ranges.add(start=4, end=8)
        assert (await served.service.Discard(request, None)).kept_tokens == 12
        kept = TOKENS[: 4 * 4] + TOKENS[8 * 4 :]
        assert (await served.load(token_ids=kept)).end_token == 12


async def test_a_session_gets_tokens_behind_an_edit_from_another(tmp_path):
    """Of the same tenant, by construction; an impossible lineage is refused."""
    async with serving(tmp_path) as served:
        await served.store()
        await served.store("b", token_ids=OTHERS)
        given = {"source_session_id": "a", "source_token_ids": TOKENS}
        request = pb.GraftRequest(**served.named("b", token_ids=OTHERS, **given))
        request.source_range.start, request.source_range.end = 4, 16
        assert (await served.service.Graft(request, None)).grafted_tokens == 12
        asked = pb.GetSessionRequest(**served.named("b"))
        info = await served.service.GetSession(asked, None)
        assert (info.num_tokens, info.num_spans, info.shared_blocks) == (28, 2, 1)
        request.source_lineage.digest = b"short"
        with pytest.raises(InvalidRequestError, match="lineage"):
            await served.service.Graft(request, None)


async def test_an_engine_may_describe_and_end_its_sessions(tmp_path):
    """One that is not stored is an error, not an empty answer."""
    async with serving(tmp_path) as served:
        asked = pb.GetSessionRequest(**served.named())
        with pytest.raises(UnknownSessionError):
            await served.service.GetSession(asked, None)
        await served.store()
        assert not (await served.service.GetSession(asked, None)).ended
        await served.service.EndSession(pb.EndSessionRequest(**served.named()), None)
        assert (await served.service.GetSession(asked, None)).ended


async def test_a_session_is_retained_on_request(tmp_path):
    """As long as the settings allow; so is its prefix, under its own name."""
    async with serving(tmp_path) as served:
        wish = pb.RetainSessionRequest(**served.named(retain_s=60))
        assert (await served.service.RetainSession(wish, None)).retained_s == 0
        await served.store()
        assert (await served.service.RetainSession(wish, None)).retained_s == 60
        asked = pb.GetSessionRequest(**served.named())
        info = await served.service.GetSession(asked, None)
        assert info.retain_s == 60
        assert 0 < info.retained_for_s <= 60
        prefix = served.named("prefix", retain_s=1e6, prefix_token_ids=TOKENS)
        granted = await served.service.RetainSession(pb.RetainSessionRequest(**prefix), None)
        assert granted.retained_s == 3600
        asked = pb.GetSessionRequest(**served.named("prefix"))
        info = await served.service.GetSession(asked, None)
        assert (info.num_tokens, info.ttl_s, info.shared_blocks) == (16, 3600, 1)
        for wrong in (-1, float("nan"), float("inf")):
            wish.retain_s = wrong
            with pytest.raises(InvalidRequestError):
                await served.service.RetainSession(wish, None)


async def test_expected_tools_are_shown(tmp_path):
    """Until the session is used; nothing is expected of an unstored one."""
    async with serving(tmp_path) as served:
        hint = pb.ExpectSessionRequest(**served.named(awaited_tools=["bash", "read"]))
        assert not (await served.service.ExpectSession(hint, None)).stored
        await served.store()
        assert (await served.service.ExpectSession(hint, None)).stored
        asked = pb.GetSessionRequest(**served.named())
        info = await served.service.GetSession(asked, None)
        assert (info.awaited_tools, info.superseded) == (["bash", "read"], False)
        hint = pb.ExpectSessionRequest(**served.named(superseded=True))
        assert (await served.service.ExpectSession(hint, None)).stored
        info = await served.service.GetSession(asked, None)
        assert (info.awaited_tools, info.superseded) == ([], True)
        await served.load()
        assert not (await served.service.GetSession(asked, None)).superseded
        hint = pb.ExpectSessionRequest(**served.named(awaited_tools=["two\nlines"]))
        with pytest.raises(InvalidToolNamesError, match="printable"):
            await served.service.ExpectSession(hint, None)


async def test_a_stopping_kvd_grants_nothing(tmp_path):
    """Existing leases may still be completed."""
    async with serving(tmp_path) as served:
        await served.store()
        found = await served.load()
        served.draining.begun.set()
        with pytest.raises(StoppingError):
            await served.load()
        with pytest.raises(StoppingError):
            await served.store("b", OTHERS)
        ended = pb.CompleteLoadRequest(engine_id=served.engine.engine_id, lease_id=found.lease_id)
        await served.service.CompleteLoad(ended, None)


async def test_calls_for_a_detached_engine_are_refused(tmp_path):
    """Its id is as good as a key."""
    async with serving(tmp_path) as served:
        stranger = pb.PrepareLoadRequest(**served.named(token_ids=TOKENS))
        stranger.engine_id += 1
        with pytest.raises(NotAttachedError):
            await served.service.PrepareLoad(stranger, None)
