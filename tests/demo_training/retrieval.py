"""Generated samples whose answer stands in the context: what teaches the model to look back.

Owns: the tasks and the `Sample` type. Every task takes a budget in tokens and returns a sample that
fits, in the chat format, with only the answers as loss targets (the contexts are random; learning
them would be learning noise). The distance from fact to question is whatever the draw gives, so
long budgets train long distances.

*Source:* the record lines follow LongEval (Li et al., 2023); repeated random spans are the usual
probe for induction heads (Olsson et al., 2022).
"""
# ruff: noqa: S311 - draws need no secrecy

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference_svc.eval.retrieval import distinct_keys, record_line, record_question
from tests.demo_training.tokenizer import VOCAB_SIZE, ChatEncoder

MIN_BUDGET = 96
"""Tokens below which no task is worth generating."""

SYSTEM_PROMPTS = (
    "",
    "",
    "You are a helpful assistant.",
    "You answer from the context.",
    "You remember everything the user has told you.",
)
_RECORD_INTROS = (
    "Below is a record of lines I want you to remember.\n",
    "Remember these lines.\n",
    "",
)
_ACKNOWLEDGEMENTS = ("OK.", "Noted.", "I will remember that.")


@dataclass(frozen=True)
class Sample:
    """Token ids, and for each whether the loss counts the prediction of that token."""

    ids: list[int]
    is_target: list[bool]


@dataclass(frozen=True)
class Message:
    """One chat message; `is_target` marks an answer to learn."""

    role: str
    content: str
    is_target: bool = False


def render(encoder: ChatEncoder, messages: Sequence[Message]) -> Sample:
    """Encode messages; of a target message everything but its role token is a loss target."""
    ids, is_target = [encoder.bos_id], [False]
    for message in messages:
        encoded = encoder.message(message.role, message.content)
        ids += encoded
        is_target += [False, *[message.is_target] * (len(encoded) - 1)]
    return Sample(ids, is_target)


def shrink_to_fit(
    build: Callable[[int], Sample], size: int, budget: int, min_size: int
) -> Sample | None:
    """Call `build(size)` with ever smaller sizes until it fits `budget`; None if it never does."""
    while size >= min_size:
        sample = build(size)
        if len(sample.ids) <= budget:
            return sample
        size = min(size - 1, int(size * budget / len(sample.ids)))
    return None


class RetrievalTasks:
    """Draws samples. Holds the encoder and the text that documents and words are taken from."""

    def __init__(self, encoder: ChatEncoder, articles: Sequence[str], words: Sequence[str]) -> None:
        """Keep the inputs; `articles` supply documents, `words` keys and values."""
        self._encoder = encoder
        self._articles = articles
        self._words = words

    def draw(self, rng: random.Random, budget: int) -> Sample | None:
        """Draw a task, then a sample of it of at most `budget` tokens; None if it did not fit."""
        tasks = (
            self.lines,
            self.recall,
            self.copy,
            self.repeat,
            self.quote,
            self.needle,
            self.echo,
        )
        task = rng.choices(tasks, weights=(58, 18, 4, 4, 7, 6, 3))[0]
        return task(rng, budget)

    def lines(self, rng: random.Random, budget: int) -> Sample | None:
        """Record lines with numbers, then one question per turn."""
        num_questions = rng.randint(1, max(1, min(16, budget // 80)))
        system, intro = rng.choice(SYSTEM_PROMPTS), rng.choice(_RECORD_INTROS)
        seed = rng.random()

        def build(num_records: int) -> Sample:
            draw = random.Random(seed)
            keys = distinct_keys(draw, num_records)
            lines = [record_line(key, draw.randrange(10_000, 100_000)) for key in keys]
            asked = [draw.randrange(num_records) for _ in range(num_questions)]
            exchanges = [(record_question(keys[i]), lines[i]) for i in asked]
            return self._facts_then_questions(draw, system, intro, lines, exchanges)

        return shrink_to_fit(build, max(1, (budget - 35 * num_questions) // 14), budget, 1)

    def recall(self, rng: random.Random, budget: int) -> Sample | None:
        """Word pairs `key: value`, then one question per turn."""
        num_questions = rng.randint(1, max(1, min(24, budget // 40)))
        system, seed = rng.choice(SYSTEM_PROMPTS), rng.random()

        def build(num_pairs: int) -> Sample:
            draw = random.Random(seed)
            keys = draw.sample(self._words, num_pairs)
            lines = [f"{key}: {draw.choice(self._words)}" for key in keys]
            asked = [draw.randrange(num_pairs) for _ in range(num_questions)]
            exchanges = [(f"What is {keys[i]}?", lines[i]) for i in asked]
            return self._facts_then_questions(draw, system, "", lines, exchanges)

        size = min(len(self._words) - 1, (budget - 14 * num_questions) // 5)
        return shrink_to_fit(build, max(1, size), budget, 1)

    def copy(self, rng: random.Random, budget: int) -> Sample | None:
        """A list of random words that the answer repeats."""
        seed, size = rng.random(), rng.randint(8, max(8, budget // 4))

        def build(num_words: int) -> Sample:
            text = " ".join(random.Random(seed).choices(self._words, k=num_words))
            messages = [
                Message("user", f"Repeat this: {text}"),
                Message("assistant", text, is_target=True),
            ]
            return render(self._encoder, messages)

        return shrink_to_fit(build, size, budget, 4)

    def repeat(self, rng: random.Random, budget: int) -> Sample | None:
        """Random tokens in which a span comes back; all but its first token can be known."""
        vocab = range(self._encoder.num_special, VOCAB_SIZE)
        span = rng.choices(vocab, k=rng.randint(8, max(8, min(256, budget // 3))))
        num_filler = rng.randint(0, max(0, budget - 1 - 2 * len(span)))
        before = rng.randint(0, num_filler)
        ids = [self._encoder.bos_id, *rng.choices(vocab, k=before), *span]
        ids += rng.choices(vocab, k=num_filler - before)
        is_target = [False] * (len(ids) + 1) + [True] * (len(span) - 1)
        return Sample(ids + span, is_target) if len(is_target) <= budget else None

    def echo(self, rng: random.Random, budget: int) -> Sample:
        """Short spans, of random tokens or of text, each repeated a few times at uneven gaps.

        Nearly half of all tokens can be known from the context alone. Nothing else makes induction
        heads form as soon: within about a hundred steps.
        """
        ids, is_target = [self._encoder.bos_id], [False]
        vocab = range(self._encoder.num_special, VOCAB_SIZE)
        while len(ids) < budget:
            length = rng.randint(4, 40)
            span = rng.choices(vocab, k=length)
            if rng.random() < 0.5:
                text = self._encoder.text("".join(self._document(rng, 2)))
                start = rng.randrange(max(1, len(text) - length))
                span = text[start : start + length] or span
            for repetition in range(rng.randint(2, 5)):
                gap = rng.choices(vocab, k=rng.choice((0, rng.randint(0, 30))))
                ids += span + gap
                is_target += [False, *[repetition > 0] * (len(span) - 1), *[False] * len(gap)]
        return Sample(ids[:budget], is_target[:budget])

    def quote(self, rng: random.Random, budget: int) -> Sample | None:
        """A document, then sentences of it asked for by their first words."""
        num_questions, seed = rng.randint(1, max(1, budget // 200)), rng.random()

        def build(num_sentences: int) -> Sample:
            draw = random.Random(seed)
            sentences = self._document(draw, num_sentences)
            long_ones = [s for s in sentences if 8 <= len(s.split()) <= 40] or sentences[:1]
            messages = [Message("user", "".join(sentences))]
            for sentence in draw.choices(long_ones, k=num_questions):
                start = " ".join(sentence.split()[:4])
                messages += [
                    Message("user", f"Quote the sentence that starts with: {start}"),
                    Message("assistant", sentence.strip(), is_target=True),
                ]
            return render(self._encoder, messages)

        return shrink_to_fit(build, max(2, (budget - 50 * num_questions) // 28), budget, 2)

    def needle(self, rng: random.Random, budget: int) -> Sample | None:
        """A document with a few numbered facts put between its sentences, then questions."""
        num_facts, seed = rng.randint(1, max(1, min(5, budget // 120))), rng.random()

        def build(num_sentences: int) -> Sample:
            draw = random.Random(seed)
            names = [key.replace("-", " ") for key in distinct_keys(draw, num_facts)]
            facts = [f" The code of the {n} is {draw.randrange(10_000, 100_000)} ." for n in names]
            sentences = self._document(draw, num_sentences)
            for fact in facts:
                sentences.insert(draw.randint(0, len(sentences)), fact)
            messages = [Message("user", "".join(sentences))]
            for i in draw.sample(range(num_facts), num_facts):
                messages += [
                    Message("user", f"What is the code of the {names[i]}?"),
                    Message("assistant", facts[i].strip(), is_target=True),
                ]
            return render(self._encoder, messages)

        return shrink_to_fit(build, max(1, (budget - 45 * num_facts) // 28), budget, 1)

    def _document(self, rng: random.Random, num_sentences: int) -> list[str]:
        """Consecutive sentences of one article, each with its leading blank."""
        sentences = re.split(r"(?<= \.)(?= )", rng.choice(self._articles))
        start = rng.randint(0, max(0, len(sentences) - num_sentences))
        return sentences[start : start + num_sentences]

    def _facts_then_questions(
        self,
        rng: random.Random,
        system: str,
        intro: str,
        lines: list[str],
        exchanges: list[tuple[str, str]],
    ) -> Sample:
        """Facts in one to three user messages, the last with the first question, then the rest."""
        messages = [Message("system", system)] if system else []
        num_parts = rng.choice((1, 1, 1, 2, 3))
        part_size = -(-len(lines) // num_parts)
        parts = [lines[i : i + part_size] for i in range(0, len(lines), part_size)]
        for part in parts[:-1]:
            messages.append(Message("user", intro + "\n".join(part)))
            messages.append(Message("assistant", rng.choice(_ACKNOWLEDGEMENTS)))
        first_question, first_answer = exchanges[0]
        facts = intro + "\n".join(parts[-1])
        messages.append(Message("user", f"{facts}\n{first_question}"))
        messages.append(Message("assistant", first_answer, is_target=True))
        for question, answer in exchanges[1:]:
            messages.append(Message("user", question))
            messages.append(Message("assistant", answer, is_target=True))
        return render(self._encoder, messages)
