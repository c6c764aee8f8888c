"""Answers are kept valid for a grammar, whatever the model prefers."""

import gzip
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema.validators import validator_for
from transformers import AutoTokenizer

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import InvalidGrammarError
from inference_svc.core.grammar import Grammar, GrammarKind, choice_grammar, schema_grammar
from inference_svc.core.tools.parts import MAX_BLANKS
from inference_svc.installation import SHIPPED_MODEL
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar
from inference_svc.runtime.compute.grammars import Grammars
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.worker_thread import WorkerThread

SCHEMAS = Path(__file__).parents[3] / "data" / "json_schemas.json.gz"
MAX_TOKENS = 400
CLOSING = ('"', "}", "]", '"}', '"]', ",", ":")


class Rambler:
    """A model with random answers, whose tendency to end grows with their length."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_ids = frozenset({tokenizer.eos_token_id})
        self.grammars = Grammars(tokenizer, self.vocab_size, self.eos_ids)
        texts = tokenizer.batch_decode([[token_id] for token_id in range(self.vocab_size)])
        self._closing = np.array([text in CLOSING for text in texts])

    def answer(self, grammar, seed=0, num_more=0, **sampling):
        """Return its answer; None if it does not end. Its logits may have padding."""
        rng = np.random.default_rng(seed)
        params = SamplingParams(seed=seed, grammar=grammar, **sampling)
        sampler = Sampler(params, self.eos_ids, self.grammars.compile(grammar))
        said = []
        for step in range(MAX_TOKENS):
            logits = rng.normal(size=self.vocab_size + num_more).astype(np.float32)
            logits[: self.vocab_size][self._closing] += 0.06 * step
            logits[self.tokenizer.eos_token_id] += 3 + 0.1 * step
            token_id = sampler.sample(torch.from_numpy(logits), said).token_id
            if token_id in self.eos_ids:
                return self.tokenizer.decode(said)
            said.append(token_id)
        return None


@pytest.fixture(scope="module")
def rambler():
    return Rambler(AutoTokenizer.from_pretrained(SHIPPED_MODEL))


WAYS = (
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "frequency_penalty": 0.5, "logit_bias": {5: 9.0, 9: -9.0}},
)


def schemas():
    return json.loads(gzip.decompress(SCHEMAS.read_bytes()))


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_answers_are_valid_for_every_schema(rambler, way, every):
    """Of a public test set: each answer is valid JSON, and valid for its schema.

    Each sampling method has a ninth of them, or all.
    """
    rows, sampling = schemas(), WAYS[way]
    assert len(rows) > 200
    for number, row in list(enumerate(rows))[way % every :: every]:
        text = rambler.answer(schema_grammar(row["schema"]), number, **sampling)
        assert text is not None, row["name"]
        validator_for(row["schema"])(row["schema"]).validate(json.loads(text))


def test_answers_match_a_regular_expression(rambler):
    """Completely."""
    grammar = Grammar(GrammarKind.REGEX, r"[a-f]{3,9}-(é|漢)+\.")
    for seed in range(20):
        assert re.fullmatch(grammar.source, rambler.answer(grammar, seed))


def test_one_of_several_texts(rambler):
    """With any characters; each of them is possible."""
    choices = ["yes", "no", 'a "quoted" \\ word', "two\nlines"]
    said = {rambler.answer(choice_grammar(choices), seed) for seed in range(60)}
    assert said == set(choices)


def test_a_context_free_grammar(rambler):
    """It cannot be a regular expression."""
    grammar = Grammar(GrammarKind.LARK, 'start: "(" start ")" | "x"')
    for seed in range(10):
        text = rambler.answer(grammar, seed)
        depth = text.count("(")
        assert text == "(" * depth + "x" + ")" * depth


def test_the_number_of_blanks_is_limited(rambler):
    """A model could write them for ever."""
    grammar = schema_grammar({"type": "array", "items": {"type": "null"}, "minItems": 2})
    matcher = rambler.grammars.compile(grammar)
    blank_id = rambler.tokenizer(" ", add_special_tokens=False).input_ids[-1]
    assert rambler.tokenizer.decode([blank_id]) == " "
    num_blanks = 0
    matcher.accept(rambler.tokenizer.convert_tokens_to_ids("["))
    while True:
        logits = np.zeros(rambler.vocab_size, np.float32)
        matcher.mask(logits)
        if np.isneginf(logits[blank_id]):
            break
        matcher.accept(blank_id)
        num_blanks += 1
    assert num_blanks == MAX_BLANKS


def test_padding_logits_are_never_chosen(rambler):
    """Models pad their rows of logits."""
    grammar = schema_grammar({"type": "object"})
    for seed in range(5):
        assert isinstance(json.loads(rambler.answer(grammar, seed, num_more=64)), dict)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (schema_grammar({"type": "nope"}), "nope"),
        (schema_grammar({"unevaluatedItems": False}), "unevaluatedItems"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "the grammar is not valid"),
        (Grammar(GrammarKind.REGEX, "("), "unclosed group"),
        (Grammar(GrammarKind.LARK, "start: nobody"), "nobody"),
        (Grammar(GrammarKind.LARK, "start: start"), "no text follows"),
        (schema_grammar({"$ref": "#"}), "no text follows"),
        (
            schema_grammar(
                {"type": "integer", "minimum": 10**8, "maximum": 10**12 - 1, "multipleOf": 9973}
            ),
            "too many expressions",
        ),
    ],
)
def test_unsupported_grammars_are_refused(rambler, grammar, said):
    """In one line; none is applied in part."""
    with pytest.raises(InvalidGrammarError, match=said) as refused:
        rambler.grammars.compile(grammar)
    assert "\n" not in str(refused.value)
    assert "state" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_grammar_that_fails_within_the_answer_is_its_clients(rambler):
    """Which would be refused again: no client should send it a second time by itself."""
    grammar = Grammar(GrammarKind.LARK, 'start: "a"{100000}')
    with pytest.raises(InvalidGrammarError, match="Too many items") as refused:
        rambler.answer(grammar)
    assert not refused.value.retryable
    assert "verbose" not in str(refused.value)


def test_a_model_that_cannot_end_has_no_grammars(rambler):
    """Nor has one without a tokenizer."""
    for grammars in (
        Grammars(rambler.tokenizer, rambler.vocab_size, frozenset()),
        Grammars(None, 100, frozenset({1})),
    ):
        with pytest.raises(InvalidGrammarError, match="leave the grammar out"):
            grammars.compile(schema_grammar({}))


class NotedMatcher:
    """llguidance's matcher, recording the threads that compute masks; it fails on request."""

    def __init__(self, matcher):
        self._matcher = matcher
        self.names = []
        self.fails = False

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def compute_bitmask(self):
        self.names.append(threading.current_thread().name)
        return self._matcher.compute_bitmask()

    def is_error(self):
        return self.fails

    def get_error(self):
        return "too many items"


@pytest.fixture
def thread():
    made = WorkerThread("masks")
    yield made
    made.close()


def number_grammar(rambler, thread=None):
    """Return a grammar of numbers with at most nine digits."""
    made = rambler.grammars.compile(Grammar(GrammarKind.REGEX, "[1-9][0-9]{0,8}"))
    return AnswerGrammar(NotedMatcher(made._matcher), made._vocabulary, thread)


def mask_of(rambler, grammar):
    logits = np.zeros(rambler.vocab_size, np.float32)
    grammar.mask(logits)
    return np.isneginf(logits)


def digit_id(rambler, digit):
    return rambler.tokenizer.convert_tokens_to_ids(digit)


def test_a_prepared_mask_fits_the_state_of_its_use(rambler, thread):
    """Whether it is ready in time, prepared twice, not at all, or used again."""
    plain, ahead = number_grammar(rambler), number_grammar(rambler, thread)
    for step, digit in enumerate("12345"):
        ahead.start_mask()
        if step % 2:
            thread.submit(int).result()  # earlier preparations have ended
        if step == 2:
            ahead.start_mask()  # a step that is repeated
        if step != 3:
            assert (mask_of(rambler, ahead) == mask_of(rambler, plain)).all()
        if step == 4:
            assert (mask_of(rambler, ahead) == mask_of(rambler, plain)).all()
        for grammar in plain, ahead:
            grammar.accept(digit_id(rambler, digit))
    ahead.start_mask()
    for grammar in plain, ahead:
        for _ in range(5):
            grammar.undo_accept()
    assert (mask_of(rambler, ahead) == mask_of(rambler, plain)).all()
    assert mask_of(rambler, ahead)[digit_id(rambler, "0")]


def test_masks_are_computed_on_their_thread(rambler, thread):
    """A repeated step uses the first mask; drafts, and waiting turns, prepare none."""
    grammar = number_grammar(rambler, thread)
    for _ in range(2):
        grammar.start_mask()
        thread.submit(int).result()
    mask_of(rambler, grammar)
    assert grammar._matcher.names == ["masks_0"]
    has_begun, may_go_on = threading.Event(), threading.Event()
    thread.submit(lambda: (has_begun.set(), may_go_on.wait()))
    has_begun.wait()
    grammar.start_mask()
    mask_of(rambler, grammar)
    may_go_on.set()
    thread.submit(int).result()
    assert grammar._matcher.names == ["masks_0", threading.current_thread().name]


def test_a_failing_mask_is_the_turns_error(rambler, thread):
    """When its logits are sampled; other turns of the step continue."""
    grammar = number_grammar(rambler, thread)
    sampler = Sampler(SamplingParams(), rambler.eos_ids, grammar)
    grammar._matcher.fails = True
    sampler.start()
    thread.submit(int).result()
    assert grammar._matcher.names == ["masks_0"]
    with pytest.raises(InvalidGrammarError, match="too many items"):
        sampler.sample(torch.zeros(rambler.vocab_size), [])


@pytest.mark.parametrize("overlap_tokens", [0, 10**6])
def test_an_answer_does_not_depend_on_where_masks_are_computed(rambler, overlap_tokens):
    """Also with several tokens per step, as with drafts: only the first one's is prepared."""
    grammars = Grammars(rambler.tokenizer, rambler.vocab_size, rambler.eos_ids, overlap_tokens)
    grammar = schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 3})
    params = SamplingParams(seed=3, temperature=1.0)
    plain = Sampler(params, rambler.eos_ids, rambler.grammars.compile(grammar))
    other = Sampler(params, rambler.eos_ids, grammars.compile(grammar))
    rng = np.random.default_rng(1)
    for step in range(60):
        if step % 3 == 0:
            other.start()
        logits = torch.from_numpy(rng.normal(size=rambler.vocab_size).astype(np.float32))
        assert other.sample(logits, []) == plain.sample(logits, [])
    grammars.close()
