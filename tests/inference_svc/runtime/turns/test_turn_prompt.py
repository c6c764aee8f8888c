"""A turn's prompt: its input, encoded for the context that remains after making room."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from inference_svc.core.answers import GrowingAnswer, SamplingParams
from inference_svc.core.chat import Message
from inference_svc.core.context import Context
from inference_svc.core.errors import (
    EmptyTurnError,
    InputTooLongError,
    InvalidSamplingError,
    InvalidTurnError,
)
from inference_svc.core.grammar import Grammar, GrammarKind
from inference_svc.core.ranges import num_in
from inference_svc.core.submission import ChatInput, Submission, TextInput, TokenInput
from inference_svc.core.truncation import USUAL_SINKS, OverflowPolicy
from inference_svc.core.turn_record import AnswerToken
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.turn_prompt import MidTurnCut, PromptMaker, TurnLimits
from inference_svc.runtime.worker_thread import WorkerThread
from shared.types.session_key import SessionKey
from tests.argument_templates import EFFORTFUL, STYLED
from tests.tokenizers import framing_texts, make_tokenizer
from tests.tool_templates import FAMILIES, text_of, tokenizer_of

WINDOW_TOKENS = 100
SYSTEM = Message("system", "Be brief.")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    text = TurnText(tokenizer, frozenset({tokenizer.eos_token_id}))
    text.try_out()
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, len(tokenizer), frozenset({tokenizer.eos_token_id}), 10)
    yield PromptMaker(text, thread, limits, has_tokenizer=True)
    thread.close()


def submission(given, policy=None, **sampling):
    return Submission(
        key=SessionKey("default", "m", "s"),
        input=given,
        sampling=SamplingParams(**sampling),
        has_max_tokens=True,
        request_id="r",
        digest="d",
        expected_turn=None,
        waits=False,
        is_final=False,
        arrived_ns=0,
        overflow=policy or OverflowPolicy(),
    )


def question(text, *before):
    return ChatInput((*before, Message("user", text)))


async def chat(prompts, tokenizer, *before):
    """Make a context of one question and its answer, which was cut."""
    prompt = await prompts.make(submission(question("What is a block?", *before)), Context())
    answer = tokenizer("It is kept in blocks. " * 3, add_special_tokens=False).input_ids
    return prompt.context.with_answer(answer)


async def test_a_prediction_is_plain_text_of_limited_length(prompts, tokenizer):
    """At most the answer's length; names of control tokens are text in it, as everywhere."""
    given = replace(submission(question("Why?")), prediction="It is kept. <|end|>")
    predicted_ids = (await prompts.make(given, Context())).predicted_ids
    assert tokenizer.decode(predicted_ids) == "It is kept. <|end|>"
    assert not set(predicted_ids) & set(tokenizer.all_special_ids)
    long = replace(given, prediction="It is kept. " * WINDOW_TOKENS)
    assert len((await prompts.make(long, Context())).predicted_ids) == WINDOW_TOKENS
    assert not (await prompts.make(submission(question("Why?")), Context())).predicted_ids


async def test_a_first_turn_records_its_system_message(prompts, tokenizer):
    """It is kept when later turns make room."""
    context = await chat(prompts, tokenizer, SYSTEM)
    system = tokenizer.decode(context.token_ids[: context.system_tokens])
    assert system == "<|start|>system\nBe brief.<|end|>\n"
    prompt = await prompts.make(submission(question("Why? " * 12)), context)
    assert prompt.ranges[0][0] == context.system_tokens
    assert tokenizer.decode(prompt.context.token_ids).startswith(system + "<|start|>")
    assert (prompt.system_tokens, prompt.context.system_tokens) == (0, context.system_tokens)
    assert [discard.ranges for discard in prompt.discards] == [prompt.ranges]


async def test_if_all_messages_are_dropped_nothing_is_closed(prompts, tokenizer):
    """The new question begins the context, or follows the system message directly."""
    for before in ((), (SYSTEM,)):
        context = await chat(prompts, tokenizer, *before)
        policy = OverflowPolicy(ratio=1.0)
        prompt = await prompts.make(submission(question("Why? " * 12), policy), context)
        assert prompt.ranges == ((context.system_tokens, len(context.token_ids)),)
        kept = tokenizer.decode(context.token_ids[: context.system_tokens])
        text = tokenizer.decode(prompt.context.token_ids)
        assert text.startswith(kept + "<|start|>user\nWhy?")
        assert prompt.context.system_tokens == context.system_tokens


async def test_text_is_cut_anywhere_and_token_ids_at_their_messages(prompts, tokenizer):
    """A special token in raw text begins no message."""
    rendered = "<|start|>user\n" + "Why? " * 8
    ids = tuple(tokenizer(rendered, add_special_tokens=False).input_ids)
    raw = TextInput(rendered, has_special=True)
    half = USUAL_SINKS + -(-(len(ids) - USUAL_SINKS) // 2)
    for given, gone in (
        (raw, (USUAL_SINKS, half)),
        (TokenInput(ids), (0, len(ids))),
    ):
        first = await prompts.make(submission(given), Context())
        assert first.context.token_ids == ids
        second = await prompts.make(
            submission(TokenInput((5,) * (WINDOW_TOKENS - len(ids)))), first.context
        )
        assert second.ranges == (gone,)


async def test_a_turn_that_cannot_fit_is_refused(prompts):
    """Whatever would be dropped."""
    with pytest.raises(InputTooLongError):
        await prompts.make(submission(TokenInput((5,) * WINDOW_TOKENS)), Context())


@pytest.mark.parametrize(
    "given",
    [
        TextInput("a block " * 10_000),
        TextInput("<|end|>" * 10_000),
        question("a block " * 10_000),
        question("x", *[Message("user", "It is kept in blocks. ")] * 1000),
    ],
)
async def test_of_a_text_that_is_far_too_long_the_beginning_is_encoded(prompts, given):
    """And nothing else: all other turns would wait for it to be refused."""
    said = f"the first {8 * WINDOW_TOKENS} characters of the input"
    with pytest.raises(InputTooLongError, match=said):
        await prompts.make(submission(given), Context())
    with pytest.raises(InputTooLongError, match=said):  # where clients only count, too
        await prompts.encode(given)


async def test_a_long_text_of_few_tokens_is_read(prompts, tokenizer):
    """However many characters they have; what follows is counted on, piece by piece."""
    word = max((tokenizer.decode([one]) for one in range(2, len(tokenizer))), key=len)
    text = word * (8 * WINDOW_TOKENS // len(word) + 1)
    assert len(text) > 8 * WINDOW_TOKENS
    made = await prompts.make(submission(TextInput(text)), Context())
    assert len(made.input_ids) < WINDOW_TOKENS
    with pytest.raises(InputTooLongError, match=f"the first {16 * WINDOW_TOKENS} characters"):
        await prompts.encode(TextInput(text + "a block " * 10_000))


async def test_a_long_answer_is_read_by_the_template(prompts):
    """Which may leave thoughts out: only what it writes is too long."""
    answer = Message("assistant", "It is kept in blocks. " * 1000)
    with pytest.raises(InputTooLongError, match=r"^0 tokens of history"):
        await prompts.make(submission(question("And then?", SYSTEM, answer)), Context())


async def test_what_is_no_input_is_refused(prompts, tokenizer):
    """Nothing, and token ids from the first one on that the model has not."""
    with pytest.raises(EmptyTurnError):
        await prompts.make(submission(TextInput("")), Context())
    with pytest.raises(InvalidTurnError, match="vocabulary"):
        await prompts.make(submission(TokenInput((5, len(tokenizer)))), Context())
    last = (len(tokenizer) - 1,)
    assert (await prompts.make(submission(TokenInput(last)), Context())).input_ids == [*last]


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
async def test_unknown_tokens_are_refused(prompts, tokenizer, name):
    """In every parameter; the message has the size of the vocabulary."""
    for token_id in (0, len(tokenizer) - 1):
        given = {token_id: 1.0} if name == "logit_bias" else (token_id,)
        await prompts.make(submission(TokenInput((5,)), **{name: given}), Context())
    for token_id in (-1, len(tokenizer)):
        given = {5: 1.0, token_id: 1.0} if name == "logit_bias" else (5, token_id)
        with pytest.raises(InvalidSamplingError, match=name) as refused:
            await prompts.make(submission(TokenInput((5,)), **{name: given}), Context())
        assert str(len(tokenizer)) in refused.value.remedy


async def test_everything_but_the_last_token_of_a_full_window_may_be_dropped(prompts):
    """That one is not computed yet."""
    policy = OverflowPolicy(ratio=1.0, sink_tokens=0)
    prompt = await prompts.make(submission(TextInput("a"), policy, max_tokens=500), Context())
    cut = MidTurnCut(prompt, GrowingAnswer(SamplingParams(), frozenset()))
    context = [*prompt.context.token_ids]
    context += [5] * (WINDOW_TOKENS + 1 - len(context))
    assert cut(context) == ((0, WINDOW_TOKENS),)


async def test_a_full_window_is_cut_repeatedly(prompts):
    """Tokens withheld for a stop string stay; cuts add up to the context's loss."""
    params = SamplingParams(stop=("xyz",), max_tokens=500)
    answer = GrowingAnswer(params, frozenset())
    prompt = await prompts.make(submission(TokenInput((5,) * 60), max_tokens=500), Context())
    cut = MidTurnCut(prompt, answer)
    context = list(prompt.context.token_ids)
    for number in range(200):
        answer.push(AnswerToken(100 + number, "x"))
        context.append(100 + number)
        if len(context) == WINDOW_TOKENS + 1:
            ((start, end),) = cut(context)
            assert (start, answer.num_held) == (USUAL_SINKS, 1)
            context = context[:start] + context[end:]
    assert context[-1] == 299
    assert len(context) <= WINDOW_TOKENS


async def test_an_answer_that_fills_the_window_alone_is_not_cut(prompts, tokenizer):
    """Its message stays, and the sinks before it."""
    first = await prompts.make(submission(question("Why? " * 8), max_tokens=500), Context())
    cut = MidTurnCut(first, GrowingAnswer(SamplingParams(), frozenset()))
    context = [*first.context.token_ids]
    context += [5] * (WINDOW_TOKENS + 1 - len(context))
    (first_cut,) = cut(context)
    kept = context[: first_cut[0]] + context[first_cut[1] :]
    assert kept[:USUAL_SINKS] == context[:USUAL_SINKS]
    assert tokenizer.decode(kept[USUAL_SINKS:]).startswith("<|start|>assistant\n")
    assert num_in([first_cut]) < len(first.context.token_ids)
    kept += [5] * (WINDOW_TOKENS + 1 - len(kept))
    assert cut(kept) == ()


async def test_a_dropped_answer_is_not_closed(prompts, tokenizer):
    """The answer and its prompt are gone: the next question follows the previous one."""
    first = await prompts.make(submission(question("What is a block?")), Context())
    starts = first.window.frame_tokens.starts(first.context.token_ids, first.context.framed)
    context = first.context.with_answer(tokenizer("It is", add_special_tokens=False).input_ids)
    for gone, closing in [(((starts[-1], len(context.token_ids)),), ""), ((), "<|end|>\n")]:
        kept = context.without(gone)
        prompt = await prompts.make(submission(question("Why?")), kept)
        before = tokenizer.decode(kept.token_ids)
        text = tokenizer.decode(prompt.context.token_ids)
        assert text.startswith(f"{before}{closing}<|start|>user\nWhy?")


class Wordy(TurnText):
    """Begins a conversation with a long message of its own."""

    def encode_chat(self, messages, history_ids, tools=(), **_options):
        """See TurnText."""
        return [7] * (50 if history_ids else WINDOW_TOKENS)


async def test_raw_text_has_a_begin_token_only_at_the_start_of_a_session():
    """If the tokenizer uses one."""
    tokenizer = framing_texts(make_tokenizer("byte_level"))
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, len(tokenizer), frozenset(), 10)
    prompts = PromptMaker(TurnText(tokenizer, frozenset()), thread, limits, has_tokenizer=True)
    for context, begin in ((Context(), [tokenizer.bos_token_id]), (Context((5, 6), 2), [])):
        prompt = await prompts.make(submission(TextInput("hello")), context)
        plain = tokenizer("hello", add_special_tokens=False).input_ids
        assert prompt.input_ids == [*begin, *plain]
    thread.close()


@pytest.mark.parametrize("has_tokenizer", [True, False])
async def test_stop_strings_need_answers_with_text(has_tokenizer):
    """Otherwise they would never occur."""
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, 256, frozenset(), 10)
    text = TurnText(None, frozenset())
    prompts = PromptMaker(text, thread, limits, has_tokenizer=has_tokenizer)
    asked = submission(TokenInput((5,)), stop=("x",))
    if has_tokenizer:
        assert (await prompts.make(asked, Context())).input_ids == [5]
    else:
        with pytest.raises(InvalidTurnError, match="stop strings need a tokenizer"):
            await prompts.make(asked, Context())
    thread.close()


async def test_a_conversation_start_that_does_not_fit_is_refused():
    """The whole context would be dropped, but the template's opening is longer."""
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, 256, frozenset(), 10)
    prompts = PromptMaker(Wordy(None, frozenset()), thread, limits, has_tokenizer=False)
    context = Context((5,) * 60, 60)
    with pytest.raises(InputTooLongError, match=r"0 tokens of history, 100 new"):
        await prompts.make(submission(question("Why?"), OverflowPolicy(ratio=1.0)), context)
    thread.close()


@pytest.mark.parametrize(
    ("shown_marks", "sampling", "thought"),
    [
        ({"<think>", "</think>"}, {}, "<think>"),
        (set(), {}, ""),
        ({"</s>"}, {}, ""),
        ({"<think>"}, {"grammar": Grammar(GrammarKind.REGEX, "a")}, ""),
    ],
)
async def test_a_prompt_that_begins_a_thought(shown_marks, sampling, thought):
    """It is part of the answer if its marks are shown, and not with a grammar."""
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, 1 << 16, frozenset(), 10)
    prompts = PromptMaker(text_of(FAMILIES["qwen3_thinking"]), thread, limits, has_tokenizer=True)
    asked = replace(submission(question("One?"), **sampling), shown_marks=frozenset(shown_marks))
    prompt = await prompts.make(asked, Context())
    thread.close()
    assert prompt.thought == thought


HIGH = {"reasoning_effort": "high"}


@pytest.mark.parametrize(("usual", "own"), [({}, HIGH), (HIGH, {}), (HIGH, {"other": 1})])
async def test_a_prompt_uses_all_of_its_arguments(usual, own):
    """The operator's and the client's, also if all earlier messages are dropped."""
    text = TurnText(tokenizer_of(EFFORTFUL), frozenset(), usual)
    text.try_out()
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, 1 << 16, frozenset(), 10)
    prompts = PromptMaker(text, thread, limits, has_tokenizer=True)
    asked = replace(question("Why?"), arguments=own)
    first = await prompts.make(submission(asked), Context())
    said = text.decode(first.input_ids)
    assert said.startswith("<|im_start|>system\nEffort: high<|im_end|>")
    system = text.decode(first.input_ids[: first.system_tokens])
    assert system == "<|im_start|>system\nEffort: high<|im_end|>\n"
    assert await prompts.encode(asked) == first.input_ids
    assert (await prompts.framing(own)) == text_of(EFFORTFUL).framing(HIGH)
    began_with = first.template_arguments
    assert '"reasoning_effort":"high"' in began_with
    context = Context().with_input([5] * 90).with_answer([6] * 5)
    drops = submission(asked, OverflowPolicy(ratio=1.0, sink_tokens=0))
    again = await prompts.make(drops, context, began_with)
    assert again.ranges == ((0, 95),)
    assert (text.decode(again.input_ids), again.template_arguments) == (said, "")
    thread.close()


async def test_a_turn_without_arguments_uses_its_sessions():
    """Those that changed the session's beginning."""
    text = text_of(STYLED)
    thread = WorkerThread("text")
    limits = TurnLimits(WINDOW_TOKENS, 1 << 16, frozenset(), 10)
    prompts = PromptMaker(text, thread, limits, has_tokenizer=True)
    for began_with, style in (('{"style":"!"}', "!"), ("", "")):
        prompt = await prompts.make(submission(question("Why?")), Context((5, 6), 2), began_with)
        assert text.decode(prompt.input_ids).endswith(f"<|im_start|>assistant{style}\n")
    thread.close()


async def test_states_are_marked_where_others_may_branch_off(prompts, tokenizer):
    """Behind the system message, before the prompt for the answer, and every so many tokens."""
    first = await prompts.make(submission(question("Why?", SYSTEM)), Context())
    token_ids = first.context.token_ids
    system, asked = (tokenizer.decode(token_ids[:mark]) for mark in first.marks(0))
    assert system == "<|start|>system\nBe brief.<|end|>\n"
    assert tokenizer.decode(token_ids) == asked + "<|start|>assistant\n"
    regular = set(range(10, len(token_ids), 10))
    assert set(first.marks(10)) == regular | set(first.marks(0))
    context = first.context.with_answer(tokenizer("Because.", add_special_tokens=False).input_ids)
    later = await prompts.make(submission(question("And?")), context)
    *marks, asked = later.marks(0)
    assert marks == list(first.marks(0))[:1]
    assert tokenizer.decode(later.context.token_ids[asked:]) == "<|start|>assistant\n"
    plain = await prompts.make(submission(TextInput("Why? " * 9)), Context())
    assert plain.marks(0) == ()
    assert plain.marks(16)[0] == 16
