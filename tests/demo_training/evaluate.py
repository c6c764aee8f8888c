"""Measures a model directory: perplexity next to a 5-gram's, and retrieval from the context.

Run as `python -m tests.demo_training.evaluate --model … --text … --test …`; see `--help`.

Owns: the two measurements and the printed table. The weights are used as shipped, in bfloat16.
Perplexity counts every token of the test text once; except near the start, each has a context of
at least 2,047 tokens less the stride. A retrieval answer is right only if each of its tokens is the
model's first choice, teacher-forced: the same as greedy decoding giving exactly that answer.
"""
# ruff: noqa: S311 - draws need no secrecy; the table goes to standard output

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from inference_svc.eval.retrieval import distinct_keys, record_line, record_question
from tests.demo_training.corpus import Corpus, frequent_words, load_corpus, read_text
from tests.demo_training.ngram import KneserNey
from tests.demo_training.retrieval import Message, RetrievalTasks, Sample, render, shrink_to_fit
from tests.demo_training.tokenizer import MAX_TOKENS, VOCAB_SIZE, ChatEncoder

LENGTHS = (256, 512, 1024, 1536, 1900)
"""Context lengths of the retrieval table, in tokens."""
DEPTHS = (0.1, 0.5, 0.9)
"""Where the wanted record stands: 0 is the start of the context, 1 its end."""
NGRAM_ORDER = 5


@dataclass(frozen=True)
class Perplexity:
    """One model's figures on the test text."""

    model: str
    nats_per_token: float
    per_token: float
    per_word: float


def perplexity(name: str, total_nats: float, num_tokens: int, num_words: int) -> Perplexity:
    """Turn a summed loss into figures; words are blank-separated, plus one end per line."""
    nats = total_nats / num_tokens
    return Perplexity(name, nats, math.exp(nats), math.exp(total_nats / num_words))


@torch.no_grad()
def model_loss(model: LlamaForCausalLM, ids: Sequence[int], bos_id: int, stride: int) -> float:
    """Sum of -ln p over `ids`, in nats, from windows of `MAX_TOKENS` that advance by `stride`."""
    total, done = 0.0, 0
    while done < len(ids):
        end = min(len(ids), max(done + stride, MAX_TOKENS - 1))
        start = max(0, end - (MAX_TOKENS - 1))
        window = torch.tensor([[bos_id, *ids[start:end]]])
        logits = model(input_ids=window[:, :-1]).logits[0].float()  # [tokens, vocab]
        losses = functional.cross_entropy(logits, window[0, 1:], reduction="none")
        total += float(losses[done - start :].sum())
        done = end
    return total


@torch.no_grad()
def target_hits(model: LlamaForCausalLM, sample: Sample) -> list[bool]:
    """For each target token in order: is it the model's first choice?"""
    ids = torch.tensor(sample.ids)
    targets = torch.tensor(sample.is_target).nonzero()[:, 0]
    hidden = model.model(input_ids=ids[None, :-1]).last_hidden_state[0, targets - 1]
    choices = model.lm_head(hidden).argmax(-1)
    hits: list[bool] = (choices == ids[targets]).tolist()
    return hits


def record_sample(
    encoder: ChatEncoder, rng: random.Random, num_tokens: int, depth: float
) -> Sample:
    """Records filling about `num_tokens`, and one question about the record at `depth`."""
    seed = rng.random()

    def build(num_records: int) -> Sample:
        draw = random.Random(seed)
        keys = distinct_keys(draw, num_records)
        lines = [record_line(key, draw.randrange(10_000, 100_000)) for key in keys]
        wanted = min(num_records - 1, int(depth * num_records))
        question = "\n".join([*lines, record_question(keys[wanted])])
        messages = [
            Message("user", f"Remember these lines.\n{question}"),
            Message("assistant", lines[wanted], is_target=True),
        ]
        return render(encoder, messages)

    sample = shrink_to_fit(build, num_tokens // 8, num_tokens, 1)
    if sample is None:
        raise ValueError(f"{num_tokens} tokens do not hold one record and its question")
    return sample


def record_accuracy(
    model: LlamaForCausalLM, encoder: ChatEncoder, num_samples: int
) -> dict[str, dict[str, float]]:
    """Share of exactly right answers by context length, then depth; `num_samples` in each cell."""
    rng = random.Random("records")
    table: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        row = {}
        for depth in DEPTHS:
            samples = [record_sample(encoder, rng, length, depth) for _ in range(num_samples)]
            row[f"{depth:g}"] = sum(all(target_hits(model, s)) for s in samples) / num_samples
        table[str(length)] = row
    return table


def task_accuracy(
    model: LlamaForCausalLM, encoder: ChatEncoder, corpus: Corpus, num_samples: int
) -> dict[str, float]:
    """Share of right answer tokens in each generated task, contexts up to 1024 tokens."""
    tasks = RetrievalTasks(encoder, corpus.held_out_articles, frequent_words(corpus.articles))
    rng = random.Random("tasks")
    accuracy = {}
    for task in (tasks.lines, tasks.recall, tasks.copy, tasks.repeat, tasks.quote, tasks.needle):
        drawn = (task(rng, rng.randint(256, 1024)) for _ in range(num_samples))
        hits = [hit for sample in drawn if sample for hit in target_hits(model, sample)]
        accuracy[task.__name__] = sum(hits) / len(hits)
    return accuracy


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the demo model.")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="the training text")
    parser.add_argument("--conversations", type=Path, required=True, help="the training dialogues")
    parser.add_argument("--test", type=Path, required=True, help="the test text")
    parser.add_argument("--samples", type=int, default=50, help="samples per retrieval figure")
    parser.add_argument("--stride", type=int, default=1024, help="tokens a window advances by")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--retrieval-only", action="store_true", help="leave perplexity out")
    return parser.parse_args()


def compare_perplexity(
    model: LlamaForCausalLM, encoder: ChatEncoder, corpus: Corpus, test: str, stride: int
) -> list[Perplexity]:
    """Score the test text with the model and with 5-grams over the model's training tokens."""
    ids, num_words = encoder.text(test), len(test.split()) + test.count("\n")
    articles = [[encoder.bos_id, *encoder.text(article)] for article in corpus.articles]
    dialogues = [
        render(encoder, [m for t in turns for m in _messages(t.user, t.assistant)]).ids
        for turns in corpus.dialogues
    ]
    rows = [
        perplexity(
            "this model", model_loss(model, ids, encoder.bos_id, stride), len(ids), num_words
        )
    ]
    for name, sequences in (
        ("5-gram, articles", articles),
        ("5-gram, articles + dialogues", articles + dialogues),
    ):
        ngram = KneserNey(sequences, VOCAB_SIZE, NGRAM_ORDER)
        loss = ngram.loss([encoder.bos_id, *ids])
        rows.append(perplexity(name, loss, len(ids), num_words))
    return rows


def _messages(user: str, assistant: str) -> tuple[Message, Message]:
    return Message("user", user), Message("assistant", assistant)


def main() -> None:
    """Measure, print, and write the JSON file if asked."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    encoder = ChatEncoder(arguments.model / "tokenizer.json")
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    corpus = load_corpus(arguments.text, arguments.conversations)
    figures: dict[str, object] = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "samples_per_figure": arguments.samples,
    }
    records = record_accuracy(model, encoder, arguments.samples)
    print("records, exact match   " + "".join(f"depth {depth:<8g}" for depth in DEPTHS))
    for length, row in records.items():
        print(f"{length:>7} tokens         " + "".join(f"{v:<14.1%}" for v in row.values()))
    tasks = task_accuracy(model, encoder, corpus, arguments.samples)
    print("right answer tokens    " + ", ".join(f"{k} {v:.1%}" for k, v in tasks.items()))
    figures |= {"record_exact_match": records, "task_token_accuracy": tasks}
    if not arguments.retrieval_only:
        test = read_text(arguments.test)
        rows = compare_perplexity(model, encoder, corpus, test, arguments.stride)
        print(f"{'test text':<32}{'nats/token':>11}{'ppl/token':>11}{'ppl/word':>11}")
        for r in rows:
            print(f"{r.model:<32}{r.nats_per_token:>11.3f}{r.per_token:>11.1f}{r.per_word:>11.1f}")
        figures["perplexity"] = [asdict(row) for row in rows]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
