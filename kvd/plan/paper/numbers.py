"""The numbers that the paper and its preprint state, each with its place in the text. Pure.

Only numbers in the text are here. Most figures show more (absolute TTFTs by model, the rates
between the ends of Figure 25, …), but bars and curves are not measured off the page.

*Source:* CachedAttention (USENIX ATC 2024), §4; AttentionStore (its earlier
preprint), §4. The two differ in the workload: the paper's 9K sessions have 5.75 turns on average
and 42K of the turns are measured, the preprint's have 3.51, and 22K.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PAPER, PREPRINT = "paper", "preprint"

LLAMA_13B, LLAMA_65B = "llama-13b", "llama-65b"
LLAMA_70B, FALCON_40B = "llama-70b", "falcon-40b"
PAPER_MODELS = (LLAMA_13B, LLAMA_65B, LLAMA_70B, FALCON_40B)


@dataclass(frozen=True, slots=True)
class Stated:
    """A number in the text.

    Attributes:
        value: the number.
        by: PAPER or PREPRINT.
        where: section and figure, as that document numbers them.
        hedge: its qualification: "around", "up to", "over"; "": none.
        derived: how it follows from the text, if it is not stated literally.
    """

    value: float
    by: str
    where: str
    hedge: str = ""
    derived: str = ""


def _by_model(
    by: str, where: str, values: tuple[float, float, float, float], hedge: str = ""
) -> dict[str, Stated]:
    """Return a number for each of PAPER_MODELS, in that order."""
    return {
        model: Stated(value, by, where, hedge)
        for model, value in zip(PAPER_MODELS, values, strict=True)
    }


def _both(
    where: str,
    paper: tuple[float, float, float, float],
    preprint: tuple[float, float, float, float],
    hedge: str = "",
) -> dict[str, dict[str, Stated]]:
    """Return the numbers that both documents state by model, at the same place."""
    return {
        PAPER: _by_model(PAPER, where, paper, hedge),
        PREPRINT: _by_model(PREPRINT, where, preprint, hedge),
    }


ByModel = Mapping[str, Mapping[str, Stated]]  # by document and model

NUM_SESSIONS = 9_000
WARMUP_TURNS = 10_000
# The billed capacity: storage is the 16.4 % of §4.2 only if 10 TB are 10,240 GB.
BILLED_DRAM_BYTES, BILLED_SSD_BYTES = 128 * 10**9, 10_240 * 10**9
NUM_GPUS = {LLAMA_13B: 2, LLAMA_65B: 4, LLAMA_70B: 4, FALCON_40B: 4}

# Hit rates are percentages of all turns, first turns included.
HIT_RATE: ByModel = _both("§4.2, Fig. 13", (86, 71, 89, 90), (76, 56, 87, 89), "around")
# percent of RE's
TTFT_REDUCTION: ByModel = _both("§4.2, Fig. 14", (85, 61, 87, 86), (84, 50, 88, 88))
PREFILL_SPEEDUP: ByModel = _both("§4.2, Fig. 15", (6.8, 2.6, 7.8, 7.2), (6.3, 2.0, 8.1, 8.2))
GPU_SPEEDUP: ByModel = _both("§4.2, Fig. 16", (4.0, 1.9, 3.3, 3.4), (2.7, 1.6, 2.2, 1.7))
# percent of RE's
COST_SAVING: ByModel = _both("§4.2, Fig. 17", (70, 43, 66, 68), (56, 31, 49, 35))
# percent of CA's own cost
STORAGE_SHARE: ByModel = _both("§4.2, Fig. 17", (16.4, 9.0, 9.0, 9.0), (16.4, 8.9, 9.0, 8.9))

# The best of the four models each.
MOST_TTFT_REDUCTION = {
    PAPER: Stated(87, PAPER, "Abstract", "up to"),
    PREPRINT: Stated(88, PREPRINT, "Abstract", "up to"),
}
MOST_PREFILL_SPEEDUP = {
    PAPER: Stated(7.8, PAPER, "Abstract", "up to"),
    PREPRINT: Stated(8.2, PREPRINT, "Abstract"),
}
MOST_COST_SAVING = {
    PAPER: Stated(70, PAPER, "Abstract", "up to"),
    PREPRINT: Stated(56, PREPRINT, "Abstract", "up to"),
}

SMALL, LARGE = "128G/2T", "128G/10T"
FIFO, LRU, CA = "fifo", "lru", "ca"

# (policy, storage) -> percent of all turns
POLICY_HIT_RATE: Mapping[str, Mapping[tuple[str, str], Stated]] = {
    PAPER: {
        (LRU, SMALL): Stated(12.9, PAPER, "§4.3.3, Fig. 21a", derived="0.5 DRAM + 12.4 disk"),
        (FIFO, SMALL): Stated(9.5, PAPER, "§4.3.3, Fig. 21a", derived="0.5 DRAM + 9.0 disk"),
        (CA, SMALL): Stated(40, PAPER, "§4.3.3, Fig. 21a", "around", "LRU + 27, FIFO + 31"),
        (LRU, LARGE): Stated(58, PAPER, "§4.3.3, Fig. 21a"),
        (FIFO, LARGE): Stated(48, PAPER, "§4.3.3, Fig. 21a"),
        (CA, LARGE): Stated(86, PAPER, "§4.3.3, Fig. 21a"),
    },
    PREPRINT: {
        (LRU, SMALL): Stated(4.4, PREPRINT, "§4.3.3, Fig. 21a", derived="0.2 DRAM + 4.2 disk"),
        (FIFO, SMALL): Stated(9.3, PREPRINT, "§4.3.3, Fig. 21a", derived="0.4 DRAM + 8.9 disk"),
        (CA, SMALL): Stated(27, PREPRINT, "§4.3.3, Fig. 21a", "around", "LRU + 22, FIFO + 18"),
        (LRU, LARGE): Stated(31, PREPRINT, "§4.3.3, Fig. 21a"),
        (FIFO, LARGE): Stated(48, PREPRINT, "§4.3.3, Fig. 21a"),
        (CA, LARGE): Stated(76, PREPRINT, "§4.3.3, Fig. 21a"),
    },
}
# (policy, storage) -> percent of all turns that hit in DRAM
POLICY_DRAM_RATE: Mapping[str, Mapping[tuple[str, str], Stated]] = {
    PAPER: {
        (LRU, SMALL): Stated(0.5, PAPER, "§4.3.3"),
        (FIFO, SMALL): Stated(0.5, PAPER, "§4.3.3"),
        (LRU, LARGE): Stated(0.6, PAPER, "§4.3.3", "approximately"),
        (FIFO, LARGE): Stated(0.5, PAPER, "§4.3.3", "approximately"),
        (CA, LARGE): Stated(85.7, PAPER, "§4.3.3", "over", "99.6 % of 86"),
    },
    PREPRINT: {
        (LRU, SMALL): Stated(0.2, PREPRINT, "§4.3.3"),
        (FIFO, SMALL): Stated(0.4, PREPRINT, "§4.3.3"),
        (LRU, LARGE): Stated(0.4, PREPRINT, "§4.3.3", "approximately"),
        (FIFO, LARGE): Stated(0.8, PREPRINT, "§4.3.3", "approximately"),
        (CA, LARGE): Stated(75.9, PREPRINT, "§4.3.3", "over", "99.9 % of 76"),
    },
}
# of CA's GPU time over that of LRU or FIFO, in whichever storage it is largest
POLICY_GPU_SPEEDUP: Mapping[str, Stated] = {
    PAPER: Stated(2.7, PAPER, "§4.3.3, Fig. 21b", "up to"),
    PREPRINT: Stated(1.9, PREPRINT, "§4.3.3, Fig. 21b", "up to"),
}
# points by which OF's hit rate is below CA's
OVERFLOW_LOSS: ByModel = _both("§4.3.4, Fig. 22a", (17.6, 41.5, 18.1, 18.4), (52, 56, 57, 48))
# RCC / CCpUT -> percent of the turns that have a history ("not considering the newly arrived
# conversations": with them 98 cannot be, as 17 % of the turns are first ones)
CAPACITY_HIT_RATE: Mapping[float, Stated] = {
    0.1: Stated(51, PAPER, "§4.3.6, Fig. 23a (preprint: Fig. 25a, the same)"),
    0.25: Stated(98, PAPER, "§4.3.6, Fig. 23a (preprint: Fig. 25a, the same)"),
}
HBM_ONLY, HBM_DRAM, ALL_TIERS = "HBM 10G", "+ DRAM 128G", "+ SSD 10T"
MEDIA_HIT_RATE: Mapping[str, Mapping[str, Mapping[str, Stated]]] = {
    PAPER: {
        HBM_ONLY: _by_model(PAPER, "§4.3.7, Fig. 24a", (0, 0, 0, 0), "nearly"),
        HBM_DRAM: _by_model(PAPER, "§4.3.7, Fig. 24a", (3.4, 1.7, 7.7, 19.1)),
        ALL_TIERS: _by_model(PAPER, "§4.3.7, Fig. 24a", (86, 71, 89, 90)),
    },
    PREPRINT: {
        HBM_ONLY: _by_model(PREPRINT, "§4.3.8, Fig. 26a", (0, 0, 0, 0), "nearly"),
        HBM_DRAM: _by_model(PREPRINT, "§4.3.8, Fig. 26a", (1.9, 0.9, 4.4, 11.2)),
        ALL_TIERS: _by_model(PREPRINT, "§4.3.8, Fig. 26a", (76, 56, 87, 89)),
    },
}
# Figure 25 of the paper: what the text says of the ends of the range of arrival rates
RATE_HIT_RATE = {
    0.5: Stated(82, PAPER, "§4.3.8, Fig. 25a"),
    2.0: Stated(77, PAPER, "§4.3.8, Fig. 25a"),
}
RATE_TTFT_S = {
    0.5: Stated(0.122, PAPER, "§4.3.8, Fig. 25b"),
    2.0: Stated(0.154, PAPER, "§4.3.8, Fig. 25b"),
}
RATE_PREFILL_TOKENS_PER_S = {
    0.5: Stated(858_000, PAPER, "§4.3.8, Fig. 25c"),
    2.0: Stated(681_000, PAPER, "§4.3.8, Fig. 25c"),
}
RATE_GPU_HOURS = {
    0.5: Stated(6.25, PAPER, "§4.3.8, Fig. 25d"),
    2.0: Stated(7.01, PAPER, "§4.3.8, Fig. 25d"),
}

# Figures 23 and 24 of the preprint: one document, six questions about it, Mistral-7B on one A100.
LONG_DOCUMENT_TOKENS = 28_672  # "28K", the longest one
LONG_QUESTIONS = 6
LONG_QUESTION_TOKENS, LONG_ANSWER_TOKENS = 256, 64
LONG_RE_TTFT_S = Stated(2.5, PREPRINT, "§4.3.6, Fig. 23a")
LONG_TTFT_S = Stated(0.12, PREPRINT, "§4.3.6, Fig. 23a", "about")
LONG_TTFT_REDUCTION = Stated(95, PREPRINT, "§4.3.6, Fig. 23a")
LONG_PREFILL_SPEEDUP = Stated(22, PREPRINT, "§4.3.6, Fig. 23b", "up to")
LONG_RE_PREFILL_SHARE = Stated(41, PREPRINT, "§4.3.6, Fig. 24a")  # percent of GPU time
LONG_PREFILL_SHARE = Stated(1.2, PREPRINT, "§4.3.6, Fig. 24a")
LONG_OUTPUT_GAIN = Stated(67, PREPRINT, "§4.3.6, Fig. 24b", "up to")  # percent, tokens per second
