"""Sessions that are compressed after every turn, against the real pair."""

import asyncio
from math import ceil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_svc.client import turn_request
from inference_svc.core.compression import make_compression, special_tokens
from inference_svc.core.ranges import num_in, without
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.inference_processes import InferenceProcess
from tests.models import SPECIAL_TOKENS
from tests.pair import until
from tests.truncation_oracle import TruncationOracle

pytestmark = pytest.mark.asyncio(loop_scope="session")

POLICIES = ("sinks_recent", "snapkv", "h2o")
KEEP_RATIO = 0.5


@pytest.fixture(scope="module")
def truncation_oracle(tiny_model):
    return TruncationOracle(tiny_model)


def compression(policy):
    return pb.Compression(policy=policy, keep_ratio=KEEP_RATIO)


async def read(pair, name):
    async with pair.service.client() as client:
        return await client.get_session(pair.name(name), with_turns=True)


async def test_turns_continue_with_the_kept_tokens(pair, truncation_oracle):
    """No token is recomputed, and answers are those of the plain formula over the kept tokens."""

    async def talk(policy):
        return [await pair.say(policy, 300, compression=compression(policy)) for _ in range(3)]

    async with pair.with_kvd("--dram", "16MB"):
        talks = dict(zip(POLICIES, await asyncio.gather(*map(talk, POLICIES)), strict=True))
        sessions = {policy: await read(pair, policy) for policy in POLICIES}
    for policy, turns in talks.items():
        verdict = truncation_oracle.judge(sessions[policy])
        assert verdict.is_identical, (policy, verdict)
        left = 0
        for turn in turns:
            usage, context = turn.usage, left + 300 + 16
            assert (usage.recomputed_tokens, usage.reused_tokens) == (0, usage.history_tokens)
            left = context - usage.compressed_tokens
            # Beside the ratio the last token, which is not computed, and special tokens stay.
            assert 1 <= left - ceil((context - 1) * KEEP_RATIO) <= 4
        assert sessions[policy].context_tokens == left
        assert [each.reason for each in sessions[policy].discards] == [f"compression:{policy}"] * 3


async def test_tokens_with_the_least_attention_are_dropped(pair, tiny_model):
    """The dropped ranges are those that the policy chooses by the stock model's attention."""
    async with pair.with_kvd("--dram", "16MB"):
        for policy in POLICIES[1:]:
            await pair.say(policy, 300, compression=compression(policy))
        sessions = [await read(pair, policy) for policy in POLICIES[1:]]
    special_ids = AutoTokenizer.from_pretrained(tiny_model).convert_tokens_to_ids(SPECIAL_TOKENS)
    for policy, session in zip(POLICIES[1:], sessions, strict=True):
        turn, chosen = session.turn_records[0], make_compression(policy, KEEP_RATIO)
        token_ids = [*turn.input_ids, *turn.output_ids]
        num_tokens = len(token_ids)
        scores = stock_scores(tiny_model, token_ids[:-1], chosen, len(turn.input_ids))
        protected = [*special_tokens(token_ids, special_ids), (num_tokens - 1, num_tokens)]
        wanted = chosen.drop(num_tokens, scores, protected)
        found = [(each.start, each.end) for each in session.discards[0].ranges]
        scores += [0.0] * (num_tokens - len(scores))
        assert num_in(found) == num_in(wanted) == turn.usage.compressed_tokens
        # By the sum of scores: two tokens with nearly equal scores may change places.
        assert sum(without(scores, found)) == pytest.approx(sum(without(scores, wanted)), rel=1e-4)


async def test_kvd_holds_less_after_a_compression(pair, truncation_oracle, tmp_path):
    """Half of the tokens take two thirds of the blocks, as the last is not full.

    They can be loaded.
    """
    config = tmp_path / "kvd.toml"
    config.write_text('[compaction]\nmin_bytes = 0\nrest = "0s"\n')
    async with pair.with_kvd("--dram", "16MB", "--config", str(config)):
        await pair.say("whole", 700)
        await pair.until_saved()
        whole = await pair.stored("whole")
        turn = await pair.say("less", 700, compression=compression("h2o"))

        async def is_compact():
            less = await pair.stored("less")
            kept = 700 + 15 - turn.usage.compressed_tokens
            return less.num_tokens == kept and less.bytes < 0.7 * whole.bytes

        await until(is_compact)
        again = await pair.say("less", 20, compression=compression("none"))
        session = await read(pair, "less")
    verdict = truncation_oracle.judge(session)
    assert verdict.is_identical, verdict
    assert again.usage.reused_tokens == again.usage.history_tokens


def stock_scores(model_dir, token_ids, policy, prompt_tokens):
    """Compute the attention of the queries that count, summed over heads and layers."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if policy.needs == "window":
        token_ids = token_ids[:prompt_tokens]
    first = len(token_ids) - policy.window_tokens if policy.needs == "window" else 0
    with torch.no_grad():
        weights = model(torch.tensor([token_ids]), use_cache=False, output_attentions=True)
    layers = [layer[0, :, first:].sum(dim=(0, 1)) for layer in weights.attentions]
    return sum(layers).tolist()


@pytest.mark.long
async def test_a_service_may_compress_every_turn(tiny_model, truncation_oracle, short_dir):
    """Its settings do so, for KV that stays in memory, while windows overflow."""
    config = short_dir / "service.toml"
    config.write_text(
        '[compression]\npolicy = "h2o"\nkeep_ratio = 0.4\nmin_tokens = 100\n'
        "[overflow]\nreserve_tokens = 16\n"
    )
    flags = ("--config", str(config), "--residents", "--kv-tokens", "768")
    async with (
        InferenceProcess(tiny_model, short_dir, short_dir / "no-kvd", flags) as service,
        service.client() as client,
    ):
        turns = []
        for num_tokens, max_tokens in ((60, 8), (150, 16), (200, 160), (100, 16)):
            sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
            request = turn_request(list(range(5, 5 + num_tokens)), "s", sampling=sampling)
            turns.append(await client.submit(request))
        session = await client.get_session("s", with_turns=True)
    verdict = truncation_oracle.judge(session)
    assert verdict.is_identical, verdict
    usages = [turn.usage for turn in turns]
    assert usages[0].compressed_tokens == 0  # too short to be compressed
    assert all(usage.compressed_tokens > 0 for usage in usages[1:])
    assert {each.reason for each in session.discards} == {"overflow", "compression:h2o"}
    assert any(each.after_tokens > 200 for each in session.discards if each.reason == "overflow")
    in_memory = [usage.tier_tokens["hbm"] == usage.history_tokens for usage in usages[1:]]
    assert sum(in_memory) >= 2  # two sequences' KV at a time may be too much for so little memory
