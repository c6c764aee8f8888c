"""What windows save: a session of 16K tokens; five of six layers attend to the last 1,024.

python -m tests.benchmarks.windows

The real pair serves a random model of Gemma 3's layers (five in six have a window), with
`cache.windows` off, then on. A session grows by turns; its bytes in kvd at the end, the bytes that
its last turns load, and their time to the first token are printed, with the ratios. So are the
engine's memory per session, and how many such sessions fit; `--pages`: this alone, on pages, and
also for a model of Gemma 4's layers: those that attend to all have rows twice as long.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from shared.types.units import format_bytes
from tests.models import build_model
from tests.pair import Pair

WINDOW, LAYERS, KV_HEADS, HEAD_DIM = 1024, 6, 4, 64
LAYER_BYTES = 2 * KV_HEADS * HEAD_DIM * 4  # of a token
TURN_TOKENS, TURNS = 1000, 16
LAST = 5  # short turns that are timed
KV_TOKENS, SESSIONS = 40_000, 12  # more than fit
ON_PAGES = "--pages"
GEMMA_3, GEMMA_4 = "Gemma 3's layers", "Gemma 4's layers"
TOKEN_BYTES = {GEMMA_3: LAYERS * LAYER_BYTES, GEMMA_4: (LAYERS + 1) * LAYER_BYTES}


def build(directory: Path, name: str = GEMMA_3) -> Path:
    """Write a model."""
    build_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(7)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "sliding_window": WINDOW,
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 20_480,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    if name == GEMMA_3:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes))
    else:
        config = Gemma4TextConfig(
            **sizes,
            global_head_dim=2 * HEAD_DIM,
            vocab_size_per_layer_input=len(tokenizer),
            hidden_size_per_layer_input=16,
        )
        model = Gemma4ForCausalLM(config)
    model.float().save_pretrained(directory)
    return directory


def _pair(model: Path, directory: Path, *flags: str, windows: bool) -> Pair:
    """Return a pair whose service keeps nothing in memory, unless a flag sets it."""
    directory.mkdir()
    settings = directory / "settings.toml"
    lines = ["[cache]", f"windows = {str(windows).lower()}"]
    working_kv = "pages" if ON_PAGES in sys.argv else "contiguous"
    lines += ["[scheduler]", f"kv_tokens = {KV_TOKENS}", f'working_kv = "{working_kv}"']
    settings.write_text("\n".join(lines) + "\n")
    return Pair(model, directory, "--config", str(settings), *flags)


async def measure(model: Path, directory: Path, *, windows: bool) -> dict[str, float]:
    """Grow one session, and return its measurements."""
    pair = _pair(model, directory, windows=windows)
    async with pair.service, pair.with_kvd("--dram", "1GB", "--ssd", "2GB"):
        for _ in range(TURNS):
            await pair.say("long", TURN_TOKENS)
        await pair.until_saved()
        before = await pair.counters()
        turns = [await pair.say("long", 20) for _ in range(LAST)]
        await pair.until_saved()
        after = await pair.counters()
        stored = await pair.stored("long")
    tokens = sum(turn.usage.reused_tokens for turn in turns)
    assert tokens == sum(turn.usage.history_tokens for turn in turns)
    window_tokens = after["loaded_window_tokens"] - before["loaded_window_tokens"]
    in_windows = LAYER_BYTES * (LAYERS - 1)
    loaded = tokens * LAYER_BYTES + in_windows * (window_tokens if windows else tokens)
    return {
        "stored": stored.bytes,
        "loaded": loaded / LAST,
        "ttft_ms": 1e3 * median(turn.usage.ttft_s for turn in turns),
        "load_ms": 1e3 * median(turn.usage.load_s for turn in turns),
        "tokens": stored.num_tokens,
    }


async def measure_memory(
    model: Path, directory: Path, *, windows: bool, token_bytes: int
) -> dict[str, float]:
    """Keep sessions of as many tokens in memory, and return their size."""
    pair = _pair(model, directory, "--residents", windows=windows)
    async with pair.service, pair.with_kvd("--dram", "1GB", "--ssd", "4GB"):
        await pair.say("0", TURN_TOKENS * TURNS)
        slots = (await _gauges(pair))["resident_token_slots"]
        for number in range(1, SESSIONS):
            await pair.say(str(number), TURN_TOKENS * TURNS)
        sessions = (await _gauges(pair))["resident_sessions"]
    return {
        "held": slots * token_bytes,
        "sessions": sessions,
    }


async def _gauges(pair: Pair) -> dict[str, float]:
    async with pair.service.client() as client:
        return dict((await client.get_model()).gauges)


async def compare(name: str) -> None:
    """Measure a model with windows off and on, and print both."""
    found = []
    with tempfile.TemporaryDirectory() as made:
        model = build(Path(made) / "model", name)
        for windows in (False, True):
            directory = Path(made) / ("on" if windows else "off")
            directory.mkdir()
            figures = await measure_memory(
                model, directory / "memory", windows=windows, token_bytes=TOKEN_BYTES[name]
            )
            if ON_PAGES not in sys.argv:
                figures |= await measure(model, directory / "store", windows=windows)
            found.append(figures)
    off, on = found
    print(f"{name:18}{'all':>12}{'windows':>12}{'ratio':>8}")
    for what in filter(off.__contains__, ("stored", "loaded", "held")):
        sizes = f"{format_bytes(off[what]):>12}{format_bytes(on[what]):>12}"
        print(f"bytes {what:12}{sizes}{on[what] / off[what]:>8.3f}")
    for what in filter(off.__contains__, ("ttft_ms", "load_ms", "tokens", "sessions")):
        print(f"{what:18}{off[what]:>12.1f}{on[what]:>12.1f}{on[what] / off[what]:>8.3f}")


async def main() -> None:
    """Measure all that is requested."""
    for name in (GEMMA_3, GEMMA_4) if ON_PAGES in sys.argv else (GEMMA_3,):
        await compare(name)


if __name__ == "__main__":
    asyncio.run(main())
