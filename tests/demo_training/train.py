"""Trains the demo model within a time budget, on one thread, and exports it as it goes.

Run as `python -m tests.demo_training.train --text … --conversations … --out …`.

Owns: the schedule, the optimizers, checkpoints. Export and the model's shape are `export.py`'s.

Invariants:
1. Learning rate and row length depend on the share of the time budget used so far, which the
   checkpoint carries: a run resumed with `--resume` goes on where the schedule was. Validation,
   saving and compiling do not count. (Being driven by time, runs do not repeat bit for bit.)

*Source:* Muon for the hidden matrices (Jordan et al., 2024), AdamW for embeddings and norms.
"""
# ruff: noqa: S311 - draws need no secrecy; the log goes to standard output

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tests.demo_training.corpus import Corpus, load_corpus
from tests.demo_training.export import export_weights, model_config, write_tokenizer
from tests.demo_training.forward import FastLlama
from tests.demo_training.mixture import Batch, Mixture, Shares
from tests.demo_training.tokenizer import MAX_TOKENS, ChatEncoder

MUON_LR = 0.02
ADAM_LR = 3e-3
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 100
ECHO_UNTIL = 0.06
"""Share of the budget in which batches are mostly echoes, so that induction heads form first."""
ECHO_SHARES = Shares(text=10, dialogue=5, document_dialogue=10, retrieval=0, echo=75)
SHARES = Shares(text=14, dialogue=8, document_dialogue=13, retrieval=65, echo=0)
DECAY_FROM = 0.45
"""Share of the budget after which the learning rate falls linearly to zero."""
LONG_ROWS_FROM = 0.65
"""Share of the budget after which rows have the full context's length."""
TOKENS_PER_STEP = 4096
SHORT_ROW_TOKENS = 512
VALIDATE_EVERY_STEPS = 250
SAVE_EVERY_S = 240.0
EXPORT_EVERY_S = 480.0


@dataclass(frozen=True)
class Settings:
    """The command line."""

    text: Path
    conversations: Path
    out: Path
    checkpoint: Path
    minutes: float
    seed: int
    resume: bool


class Trainer:
    """One run: model, optimizers, random state, and the time used so far."""

    def __init__(self, settings: Settings) -> None:
        """Build everything, and load the checkpoint if the settings ask for it."""
        self._settings = settings
        self._rng = random.Random(settings.seed)
        torch.manual_seed(settings.seed)
        corpus = load_corpus(settings.text, settings.conversations)
        settings.out.mkdir(parents=True, exist_ok=True)
        write_tokenizer(settings.out, corpus, random.Random(settings.seed))
        encoder = ChatEncoder(settings.out / "tokenizer.json")
        self._mixture = Mixture(corpus, encoder)
        self._validation = _validation_batches(corpus, encoder)
        self.model = LlamaForCausalLM(model_config()).float()  # type: ignore[no-untyped-call]
        self._fast = FastLlama(self.model)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" in n]
        embeddings = [
            p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" not in n
        ]
        norms = [p for p in self.model.parameters() if p.ndim == 1]
        self._muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY)
        self._adam = torch.optim.AdamW(
            [
                {"params": embeddings, "weight_decay": WEIGHT_DECAY},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=ADAM_LR,
            betas=(0.9, 0.95),
        )
        self.step = 0
        self.used_s = 0.0
        self.tokens = 0
        if settings.resume:
            self._load_checkpoint()

    @property
    def progress(self) -> float:
        """Share of the time budget used, zero to one."""
        return min(1.0, self.used_s / (self._settings.minutes * 60))

    def run(self) -> None:
        """Train until the budget is used; save, validate and export on the way."""
        export_weights(self.model, self._settings.out)
        print(f"{self._mixture.num_text_tokens} text tokens", flush=True)
        saved_s, exported_s = self.used_s, self.used_s
        averages = {"text": math.nan, "answers": math.nan}
        while self.progress < 1.0:
            started = time.monotonic()
            self._train_step(averages)
            seconds = time.monotonic() - started
            self.used_s += min(seconds, 20.0)  # compilation must not eat the schedule
            if self.step % 20 == 0:
                self._log(averages, seconds)
            if self.step % VALIDATE_EVERY_STEPS == 0:
                self._validate()
            if self.used_s - saved_s > SAVE_EVERY_S:
                self._save_checkpoint()
                saved_s = self.used_s
            if self.used_s - exported_s > EXPORT_EVERY_S:
                export_weights(self.model, self._settings.out)
                exported_s = self.used_s
        self._validate()
        self._save_checkpoint()
        export_weights(self.model, self._settings.out)

    def _train_step(self, averages: dict[str, float]) -> None:
        scale = self._learning_rate_scale()
        for optimizer, rate in ((self._muon, MUON_LR), (self._adam, ADAM_LR)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        row_tokens = SHORT_ROW_TOKENS if self.progress < LONG_ROWS_FROM else MAX_TOKENS
        shares = ECHO_SHARES if self.progress < ECHO_UNTIL else SHARES
        num_rows = TOKENS_PER_STEP // row_tokens
        batch = self._mixture.batch(self._rng, shares, num_rows, row_tokens)
        losses = self._fast.losses(batch.inputs, batch.labels)
        weights = batch.weights.reshape(-1)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in (self._muon, self._adam):
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        self.step += 1
        self.tokens += TOKENS_PER_STEP
        for name, chosen in (("text", weights == 1.0), ("answers", weights > 1.0)):
            if chosen.any():
                value = float(losses.detach()[chosen].mean())
                old = averages[name]
                averages[name] = value if math.isnan(old) else 0.95 * old + 0.05 * value

    def _learning_rate_scale(self) -> float:
        decay = min(1.0, (1.0 - self.progress) / (1.0 - DECAY_FROM))
        return max(0.0, min(1.0, (self.step + 1) / WARMUP_STEPS) * decay)

    def _validate(self) -> None:
        """Print the held-out loss in nats per token of articles and of dialogues."""
        with torch.no_grad():
            means = []
            for batch in self._validation:
                losses = self._fast.losses(batch.inputs, batch.labels)
                weights = batch.weights.reshape(-1)
                means.append(float((losses * weights).sum() / weights.sum()))
        print(f"step {self.step} held out: articles {means[0]:.3f} dialogues {means[1]:.3f}")

    def _log(self, averages: dict[str, float], seconds: float) -> None:
        print(
            f"step {self.step} progress {self.progress:.3f} tokens {self.tokens / 1e6:.2f}M "
            f"text {averages['text']:.3f} answers {averages['answers']:.3f} {seconds:.2f} s/step",
            flush=True,
        )

    def _save_checkpoint(self) -> None:
        path = self._settings.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        state = {
            "model": self.model.state_dict(),
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
            "rng": self._rng.getstate(),
            "step": self.step,
            "used_s": self.used_s,
            "tokens": self.tokens,
        }
        torch.save(state, temporary)
        temporary.replace(path)

    def _load_checkpoint(self) -> None:
        state = torch.load(self._settings.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        self._rng.setstate(state["rng"])
        self.step, self.used_s, self.tokens = state["step"], state["used_s"], state["tokens"]


def _validation_batches(corpus: Corpus, encoder: ChatEncoder) -> list[Batch]:
    """Two fixed batches of short rows, from held-out articles and held-out dialogues."""
    held_out = Corpus(corpus.held_out_articles, corpus.held_out_dialogues, [], [])
    mixture = Mixture(held_out, encoder)
    num_rows = TOKENS_PER_STEP // SHORT_ROW_TOKENS
    return [
        mixture.batch(random.Random(0), shares, num_rows, SHORT_ROW_TOKENS)
        for shares in (Shares(1, 0, 0, 0, 0), Shares(0, 1, 0, 0, 0))
    ]


def parse_settings() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--text", type=Path, required=True, help="WikiText, plain or .gz")
    parser.add_argument("--conversations", type=Path, required=True, help="JSON lines, or .gz")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--checkpoint", type=Path, default=Path("training-checkpoint.pt"))
    parser.add_argument("--minutes", type=float, default=70.0, help="training time in minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    return Settings(
        text=arguments.text,
        conversations=arguments.conversations,
        out=arguments.out,
        checkpoint=arguments.checkpoint,
        minutes=arguments.minutes,
        seed=arguments.seed,
        resume=arguments.resume,
    )


def main() -> None:
    """Train on one thread: matrices this small do not gain from more."""
    torch.set_num_threads(1)
    Trainer(parse_settings()).run()


if __name__ == "__main__":
    main()
