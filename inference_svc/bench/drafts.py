"""Part `drafts`: how much drafting speeds answers up, by traffic and batch.

    drafted  the engine, which drafts what its lookup finds, as far as that pays
    plain    the same engine without drafts

Traffic is `copy`, a file that is written a second time, or `chat`, questions. A model without a
tokenizer gets random tokens for both, and shows the cost of drafts that are useless. Times are as
in `decode`: from when every answer has begun until the first of them is complete.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc import core
from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.decode import METRIC, decode_tokens_per_s
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import DraftsOptions, RunOptions
from inference_svc.bench.workspace import Workspace

COPY, CHAT = TRAFFIC = ("copy", "chat")
BEGUN_TOKENS = 32  # of the copy that are part of the prompt
SPARE_TOKENS = 128  # for these, the text between, and a question
WARM_UP = 1
LEAST_OF_COPY, LEAST_OF_CHAT = 1.2, 0.97
QUESTIONS = (
    "What is the difference between a river and a canal?",
    "Give me three ideas for a dinner without meat.",
    "Explain to a child why the sky is blue.",
    "Which year did people first land on the moon, and who were they?",
    "Write a short poem about an old bicycle.",
    "How do I boil an egg so that the yolk stays soft?",
    "Describe a walk through a market in the morning.",
    "What should I look for when I buy a used car?",
)


def window_tokens(options: DraftsOptions) -> int:
    """Return the length of the longest sequence, in tokens."""
    return options.history_tokens + SPARE_TOKENS + options.steps


async def measure_drafts(
    options: DraftsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure every traffic and batch."""
    most = max(options.batches)
    prompt_tokens = most * window_tokens(options)  # all prompts of a batch are one step
    async with running_engine(
        work.model,
        None,
        kv_tokens=2 * prompt_tokens,
        cache={"residents": False},
        scheduler={
            "max_running": most,
            "max_loading": most,
            "step_tokens": prompt_tokens,
            "mixed_step_tokens": prompt_tokens,
            "answer_tokens": options.steps + 1,
            "draft_tokens": options.draft_tokens,
        },
    ) as engine:
        return tuple(
            [
                await _Batch(options, engine, work.model.loaded.tokenizer, traffic, batch).measure(
                    run
                )
                for traffic in TRAFFIC
                for batch in options.batches
            ]
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """One kind of traffic and batch size."""

    options: DraftsOptions
    engine: LocalEngine
    tokenizer: Any | None
    traffic: str
    batch: int

    async def measure(self, run: RunOptions) -> Case:
        """Measure all rounds, and compare the variants."""
        options, what = self.options, f"{self.traffic}, batch {self.batch}"
        found = Interleaved(what, {"batch": self.batch, "steps": options.steps})
        lengths = {"drafted": options.draft_tokens, "plain": 0}

        async def take(name: str) -> dict[str, float]:
            await self.engine.settle()
            return await self._answer_all(lengths[name])

        await take_rounds(
            found,
            lambda _: list(lengths),
            range(-WARM_UP, options.pairs),
            take,
            lambda name: run.on_progress(f"drafts, {what}: {name}"),
        )
        least = LEAST_OF_COPY if self.traffic == COPY else LEAST_OF_CHAT
        found.compare(METRIC, "drafted", "plain", at_least=least)
        return found.case()

    async def _answer_all(self, draft_tokens: int) -> dict[str, float]:
        engine = self.engine
        engine.parts.drafter.most_tokens = draft_tokens
        answers = await asyncio.gather(
            *(
                engine.turn(
                    engine.key(f"drafts-{index}"),
                    self._prompt(index),
                    self.options.steps + 1,
                    source="none",
                )
                for index in range(self.batch)
            )
        )
        return {
            METRIC: decode_tokens_per_s(answers),
            "drafted_tokens": sum(times.drafted_tokens for times in answers) / self.batch,
            "accepted_tokens": sum(times.accepted_tokens for times in answers) / self.batch,
        }

    def _prompt(self, index: int) -> list[int]:
        """Return the prompt of one session: always the same, so that its answer is, too."""
        if self.tokenizer is None:
            return self.engine.new_tokens(self.options.history_tokens)
        if self.traffic == CHAT:
            asked = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
            if self.tokenizer.chat_template is None:
                return _ids(self.tokenizer, asked[0]["content"])
            shown = self.tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, tokenize=False
            )
            return _ids(self.tokenizer, shown)
        files = sorted(Path(core.__file__).parent.glob("*.py"), key=lambda file: file.name)
        files = [file for file in files if file.name != "__init__.py"]
        text = files[index % len(files)].read_text(encoding="utf-8")
        written = _ids(self.tokenizer, text)[: self.options.history_tokens]
        between = _ids(self.tokenizer, "\n\n# The same file once more:\n\n")
        return [*written, *between, *written[:BEGUN_TOKENS]]


def _ids(tokenizer: Any, text: str) -> list[int]:
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return token_ids
