"""A turn's answer writer: usage is consistent whatever happened to its load."""

import time
from dataclasses import replace

import pytest
from tokenizers import decoders
from transformers import AutoTokenizer

from inference_svc.core.answers import GrowingAnswer, SamplingParams
from inference_svc.core.context import Context
from inference_svc.core.submission import Submission, TokenInput
from inference_svc.core.truncation import FrameTokens, OverflowPolicy, TurnWindow
from inference_svc.core.turn_record import (
    AnswerToken,
    ConversationDigests,
    Discard,
    FinishReason,
    Graft,
)
from inference_svc.runtime.compute.sampling import Sampled, Sampler
from inference_svc.runtime.engine.engine_request import EngineRequest
from inference_svc.runtime.turns.answer_writer import (
    MAX_HELD_TOKENS,
    AnswerWriter,
    Detokenizer,
)
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_prompt import Prompt
from shared.types.histogram import Histogram
from shared.types.lineage import WHOLE, Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S
from tests.tokenizers import framing_texts, make_tokenizer

KEY = SessionKey("default", "m", "s")
SAMPLING = SamplingParams(max_tokens=2)
PROMPT = list(range(10))
HISTORY_TOKENS = 6
WINDOW = TurnWindow(OverflowPolicy(), 12, 1, 2, True, FrameTokens())
PROMPT_OF_TURN = Prompt(Context(tuple(PROMPT[:6]), 6), (), PROMPT[6:], 0, False, WINDOW)


@pytest.fixture
async def running():
    """Make a turn of 10 tokens, 6 of them history, that arrived at 1 s and ran at once."""
    turn = Turn(
        Submission(
            key=KEY,
            input=TokenInput(tuple(PROMPT[HISTORY_TOKENS:])),
            sampling=SAMPLING,
            has_max_tokens=True,
            request_id="r",
            digest="d",
            expected_turn=None,
            waits=False,
            is_final=False,
            arrived_ns=NS_PER_S,
        )
    )
    answer = GrowingAnswer(SAMPLING, frozenset())
    writer = AnswerWriter(turn, answer, None, PROMPT, HISTORY_TOKENS, Histogram())
    return EngineRequest(
        *(1, KEY, list(PROMPT), 2, NS_PER_S),
        history_tokens=HISTORY_TOKENS,
        admitted_ns=2 * NS_PER_S,
        sampler=Sampler(SAMPLING),
        sink=writer,
    )


def answer_with(running, token_id):
    """Build an answer with a step per token."""
    running.append(token_id)
    return running.sink.on_token(Sampled(token_id, None, ()))


def reuse(usage):
    return usage.history_tokens, usage.reused_tokens, usage.recomputed_tokens, usage.new_tokens


async def test_found_tokens_are_reused(running):
    """Every prompt token is reused, recomputed or new; the tiers are those of the load."""
    running.outcome.tokens, running.outcome.tier_tokens = 5, {"hbm": 4, "dram": 1}
    running.outcome.reason = "partial"
    running.sink.on_start(running)
    running.outcome.load_s, running.outcome.stall_s = 0.5, 0.25
    running.num_preemptions = 3
    usage = running.sink.usage(running)
    assert reuse(usage) == (6, 5, 1, 4)
    assert usage.tier_tokens == {"hbm": 4, "dram": 1}
    assert (usage.recompute_reason, usage.queue_s) == ("partial", 1.0)
    assert (usage.load_s, usage.stall_s, usage.preemptions) == (0.5, 0.25, 3)
    started = await anext(running.sink._turn.follow())
    assert (started.history_tokens, started.reused_tokens, started.queue_s) == (6, 5, 1.0)


async def test_a_late_failure_counts_as_recomputed(running):
    """The client was told of reuse; the final usage has what happened."""
    running.outcome.tokens, running.outcome.tier_tokens = 6, {"dram": 6}
    running.sink.on_start(running)
    running.outcome.tokens, running.outcome.tier_tokens, running.outcome.reason = (
        0,
        {},
        "load_failed",
    )
    usage = running.sink.usage(running)
    assert reuse(usage) == (6, 0, 6, 4)
    assert usage.recompute_reason == "load_failed"


async def test_more_than_the_sessions_history_may_be_found(running):
    """Another session has computed some of the new tokens: they count as history."""
    running.outcome.tokens, running.outcome.tier_tokens = 8, {"ssd": 8}
    running.sink.on_start(running)
    assert reuse(running.sink.usage(running)) == (8, 8, 0, 2)


async def test_tokens_computed_ahead_are_not_reused(running):
    """They were loaded like the rest, but computed for this turn.

    Kept ones count, with their tier.
    """
    lineage = Lineage(b"x" * 16, 1)
    running.grafts = [Graft(2, 3, "other", 7, 1, lineage), Graft(7, 4, "other", 20, 1, lineage)]
    running.ahead_tokens, running.ahead_s = 4, 0.5
    running.outcome.tokens, running.outcome.tier_tokens = 9, {"dram": 3, "ssd": 6}
    running.sink.on_start(running)
    usage = running.sink.usage(running)
    assert reuse(usage) == (6, 5, 1, 4)
    assert usage.tier_tokens == {"ssd": 5}
    assert (usage.kept_tokens, usage.healed_tokens) == (5, 2)
    assert usage.queue_s == 0.5
    running.outcome.tokens, running.outcome.tier_tokens = 0, {}
    usage = running.sink.usage(running)
    assert (usage.reused_tokens, usage.kept_tokens) == (0, 0)


async def test_usage_of_a_turn_that_never_started(running):
    """Cancelled in the queue it has used nothing; later, what was found and computed by then."""
    running.sink.finish_reason = FinishReason.CANCELLED
    usage = running.sink.usage(running)
    assert reuse(usage) == (0, 0, 0, 0)
    assert (usage.recompute_reason, usage.output_tokens) == ("", 0)
    running.outcome.tokens, running.outcome.tier_tokens = 5, {"hbm": 5}
    assert reuse(running.sink.usage(running)) == (5, 5, 0, 0)
    running.computed_tokens = 8
    assert reuse(running.sink.usage(running)) == (6, 5, 1, 2)


async def test_history_that_was_found_in_part_has_a_reason(running):
    """Also if it was found in the engine's memory, which gives none."""
    running.outcome.tokens, running.outcome.tier_tokens = 5, {"hbm": 5}
    assert running.sink.usage(running).recompute_reason == "partial"


async def test_the_record_has_input_answer_and_usage(running):
    """The last token of the answer was never fed."""
    running.outcome.tokens, running.outcome.tier_tokens = 6, {"dram": 6}
    running.sink.on_start(running)
    is_over = [answer_with(running, token_id) for token_id in (70, 71)]
    running.computed_tokens = len(PROMPT) + 1
    record = running.sink.record(running, 3, PROMPT_OF_TURN)
    assert is_over == [False, True]
    assert (record.turn, record.input_ids, record.output_ids) == (3, (6, 7, 8, 9), (70, 71))
    assert (record.uncomputed_tokens, record.finish_reason) == (1, "length")
    assert record.usage.reused_tokens == 6


async def test_a_discard_during_the_answer_does_not_change_the_turns_numbers(running):
    """The record has all of the input and answer; usage is of the prompt as it began."""
    running.sink.on_start(running)
    answer_with(running, 70)
    running.discards.append(Discard(((0, 8),), after_tokens=5))
    running.computed_tokens = 10
    running.discard(((0, 8),))
    answer_with(running, 71)
    running.computed_tokens = 3
    record = running.sink.record(running, 3, PROMPT_OF_TURN)
    assert (record.input_ids, record.output_ids) == ((6, 7, 8, 9), (70, 71))
    assert running.sink.context_ids(running) == [8, 9, 70, 71]
    assert running.sink.computed_ids(running) == [8, 9, 70]
    assert record.uncomputed_tokens == 1
    assert reuse(record.usage) == (6, 0, 6, 4)
    assert record.usage.dropped_tokens == 8
    assert record.discards[0].lineage is None, "the tokens tell"


async def test_a_stop_string_across_a_cut_is_in_the_lineage(running):
    """KV was computed with tokens that are not in the record: it names the engine's lineage."""
    sampling = SamplingParams(max_tokens=9, stop=("xyz",))
    answer = GrowingAnswer(sampling, frozenset())
    running.sink._answer, running.max_tokens = answer, 9
    running.lineage = WHOLE
    for text, token_id in (("a", 70), ("x", 71), ("y", 72)):
        running.append(token_id)
        answer.push(AnswerToken(token_id, text))
    running.computed_tokens = 12
    running.discards.append(Discard(((0, 8),), after_tokens=7))
    running.discard(((0, 8),))
    running.append(73)
    answer.push(AnswerToken(73, "z"))
    running.sink.tokens, running.computed_tokens = list(answer.kept), 5
    record = running.sink.record(running, 3, PROMPT_OF_TURN)
    assert record.output_ids == (70,)
    (discard,) = record.discards
    assert (discard.after_tokens, discard.lineage) == (5, running.lineage)
    context = PROMPT_OF_TURN.before.with_turn(record)
    assert context.token_ids == (8, 9, 70)
    assert context.computed_ids == tuple(running.sink.computed_ids(running))
    assert context.lineage == running.lineage != WHOLE


async def test_a_stop_string_within_a_token_keeps_the_rest_of_it(running, tiny_model):
    """The text before it is shown, encoded anew, and is part of the context."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    token_id = max(range(len(tokenizer)), key=lambda one: len(tokenizer.decode([one]).strip()))
    text = tokenizer.decode([token_id])
    stop = text[-1]
    sampling = SamplingParams(max_tokens=9, stop=(stop,))
    writer = running.sink = AnswerWriter(
        running.sink._turn,
        GrowingAnswer(sampling, frozenset()),
        tokenizer,
        PROMPT,
        HISTORY_TOKENS,
        Histogram(),
    )
    writer.on_start(running)
    assert answer_with(running, token_id)
    spelled = tokenizer(text[: text.index(stop)], add_special_tokens=False).input_ids
    assert [token.token_id for token in writer.tokens] == spelled
    assert "".join(token.text for token in writer.tokens) == text[: text.index(stop)]
    assert len(spelled) > 1
    assert writer.context_ids(running) == [*PROMPT, *spelled]


async def test_a_beginning_from_the_prompt_is_the_answers_first_text(running, tiny_model):
    """Once, without a token of its own; stop strings are not searched in it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    writer = running.sink = AnswerWriter(
        running.sink._turn,
        GrowingAnswer(SamplingParams(max_tokens=9, stop=("<think>",)), frozenset()),
        tokenizer,
        PROMPT,
        HISTORY_TOKENS,
        Histogram(),
        beginning="<think>",
    )
    writer.on_start(running)
    assert not answer_with(running, 70)
    assert not answer_with(running, 71)
    writer.on_window_full()
    record = writer.record(running, 3, PROMPT_OF_TURN)
    assert record.output_ids == (70, 71)
    assert (
        record.text
        == "<think>" + tokenizer.decode([*PROMPT, 70, 71])[len(tokenizer.decode(PROMPT)) :]
    )


@pytest.mark.parametrize("logprobs", [0, 1])
async def test_log_probabilities_are_recorded_on_request(running, logprobs):
    """Otherwise there are none."""
    submission = running.sink._turn.submission
    asked = replace(submission, sampling=replace(SAMPLING, logprobs=logprobs))
    running.sink._turn.submission = asked
    running.append(70)
    running.sink.on_token(Sampled(70, -0.5, ((70, -0.5),)))
    record = running.sink.record(running, 3, PROMPT_OF_TURN)
    assert record.logprobs == ((-0.5,) if logprobs else ())
    assert record.top_logprobs == ((((70, -0.5),),) if logprobs else ())


async def test_a_full_window_ends_the_answer(running):
    """Sampled text is shown; the reason is the length."""
    running.sink.on_start(running)
    answer_with(running, 70)
    running.sink.on_window_full()
    record = running.sink.record(running, 3, PROMPT_OF_TURN)
    assert (record.output_ids, record.finish_reason) == ((70,), "length")


async def test_a_record_has_the_digest_of_the_whole_conversation(running):
    """The submission makes it from the answer's text and its session; "" where it cannot."""
    record = running.sink.record(running, 3, PROMPT_OF_TURN)
    assert (record.said, record.history) == ("", "")
    turn = Turn(replace(running.sink._turn.submission, make_digests=ConversationDigests))
    tokenizer = make_tokenizer("byte_level")
    answer = GrowingAnswer(SAMPLING, frozenset())
    writer = running.sink = AnswerWriter(turn, answer, tokenizer, PROMPT, 0, Histogram())
    for token_id in tokenizer.encode(" of a"):
        answer_with(running, token_id)
    assert writer.text
    record = writer.record(running, 3, PROMPT_OF_TURN)
    assert (record.said, record.history) == (writer.text, running.key.session_id)


async def test_a_full_window_shows_withheld_text(running):
    """The beginning of a stop string that does not come is part of the answer."""
    running.sink._answer = GrowingAnswer(SamplingParams(max_tokens=9, stop=("xyz",)), frozenset())
    running.sink.on_start(running)
    for text, token_id in (("a", 70), ("x", 71)):
        running.append(token_id)
        running.sink._answer.push(AnswerToken(token_id, text))
    assert not running.sink.tokens
    running.sink.on_window_full()
    assert [token.token_id for token in running.sink.tokens] == [71]


async def test_the_rest_of_a_cut_token_is_encoded_without_a_begin_token(running):
    """It is in the middle of an answer."""
    tokenizer = framing_texts(make_tokenizer("byte_level"))
    sampling = SamplingParams(max_tokens=9, stop=("f",))
    answer = GrowingAnswer(sampling, frozenset())
    writer = running.sink = AnswerWriter(
        running.sink._turn, answer, tokenizer, PROMPT, HISTORY_TOKENS, Histogram()
    )
    assert answer_with(running, tokenizer.convert_tokens_to_ids("\u0120of"))
    spelled = [token.token_id for token in writer.tokens]
    assert tokenizer.decode(spelled) == " o"


async def test_a_cut_without_a_stop_string_leaves_the_lineage_plain(running):
    """The record has all tokens of the KV: they determine the lineage."""
    running.lineage = WHOLE
    answer_with(running, 70)
    running.computed_tokens = len(PROMPT)
    running.discards.append(Discard(((0, 8),), after_tokens=5))
    running.discard(((0, 8),))
    (discard,) = running.sink.record(running, 3, PROMPT_OF_TURN).discards
    assert (discard.after_tokens, discard.lineage) == (5, None)


@pytest.mark.parametrize("num_sampled", [2, 5])
async def test_the_phases_of_a_turn_are_consecutive(running, num_sampled):
    """In seconds, each from the end of the previous one; the total is up to now."""
    running.started_ns, running.first_token_ns = 3 * NS_PER_S, 7 * NS_PER_S
    running.finished_ns, running.num_sampled = 15 * NS_PER_S, num_sampled
    before_s = time.monotonic()
    usage = running.sink.usage(running)
    assert (usage.queue_s, usage.prefill_s, usage.ttft_s) == (1.0, 4.0, 6.0)
    assert usage.tpot_s == 8.0 / (num_sampled - 1)
    assert before_s - 1 <= usage.total_s <= time.monotonic() - 1


async def test_an_unfinished_phase_takes_until_now(running):
    """Or no time, if an earlier one is unfinished."""
    running.admitted_ns = 0
    before_s = time.monotonic()
    usage = running.sink.usage(running)
    for so_far_s in (usage.queue_s, usage.ttft_s, usage.total_s):
        assert before_s - 1 <= so_far_s <= time.monotonic() - 1
    assert (usage.prefill_s, usage.tpot_s) == (0.0, 0.0)


async def test_times_between_tokens_start_with_the_second(running):
    """There is none before the first one."""
    before_s = time.monotonic()
    for token_id in (70, 71, 72):
        answer_with(running, token_id)
    between = running.sink._itl_s.total
    assert between.count == 2
    assert 0 < between.total <= time.monotonic() - before_s


def push_tokens(tokenizer, prompt, names):
    """Return the text of an answer with these tokens."""
    detokenizer = Detokenizer(tokenizer, tokenizer.convert_tokens_to_ids(prompt))
    token_ids = tokenizer.convert_tokens_to_ids(names)
    assert tokenizer.unk_token_id not in token_ids
    return [detokenizer.push(token_id) for token_id in token_ids]


@pytest.mark.parametrize("num_before", [1, 6, 9])
@pytest.mark.parametrize("between", [[], ["</s>"], ["</s>"] * 7])
def test_a_leading_blank_is_kept(num_before, between):
    """Decoders drop it before a text; also behind hidden tokens."""
    pieces = push_tokens(make_tokenizer("metaspace"), ["lock"] * num_before, [*between, "\u2581of"])
    assert pieces == [*[""] * len(between), " of"]


def test_blanks_before_punctuation_are_kept():
    """The text is the generated one, without corrections."""
    tokenizer = make_tokenizer("word_piece")
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece(cleanup=False)
    assert "".join(push_tokens(tokenizer, ["the"], ["a", ".", "b", "."])) == " a . b ."


def test_invalid_bytes_are_withheld_while_they_may_be_a_character():
    """Then they are shown as replacement characters."""
    pieces = push_tokens(make_tokenizer("byte_level"), ["a"], ["\u00e9"] * 20)
    assert [bool(piece) for piece in pieces].index(True) == MAX_HELD_TOKENS - 1
