"""Writes docs/models.md, which models are served and how: `python -m tests.zoo.table`."""

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers

from tests.zoo.architectures import architectures
from tests.zoo.checks import AFTER_DISCARD, ALWAYS, OVER_STATES
from tests.zoo.examination import TOLERANCE, Findings, examine
from tests.zoo.overrides import NOT_TRIED

PATH = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = ("model", "class", "mode", "positions", "checked, or why it is refused")
SERVED = """
# Models

{served} of the {total} causal language models of Transformers {version} are served. This page is
written by `python -m tests.zoo.table`, which builds each model with a few small
random layers, calibrates it and compares it with the stock model; `make test` repeats this for a
sample, `make test-long` for all. A model that is not listed here is calibrated in the same way.
The program itself has no list: a model that calibration cannot prove is refused.

**Mode** is how attention is computed, the fastest first:

- *ragged*: attention reads each sequence's KV where it lies;
- *latent*: it reads latents where they lie, and expands them to keys and values only for long
  prompts;
- *indexed*: the same, for the tokens that the model's index selects;
- *gather*: the model expands what it caches to keys itself, from a gathered copy;
- *masked*: the model's own attention over all sequences at once, separated by a mask;
- *single*: the model's own attention, one sequence at a time;
- *own*: the same, over the model's own cache.

**Latents**: a model with latent attention (MLA) caches, for each token and layer, a latent and a
rotated part for all heads together. kvd and the engine's memory hold these: 576 values at
DeepSeek-V3's widths, where keys and values of its 128 heads are 40,960. Transformers expands the
whole history in every step. Here the query is multiplied with the expansion matrix instead and
attends over latents, wherever that takes fewer operations: below about 150 new tokens behind 1,024.
The matrix is found by feeding unit vectors to each layer, and is held beside the model's weights;
it is as large as the weights it replaces. Without such a matrix the mode is *gather*, and
the log of the start gives the reason.

**Positions**: *decoupled* KV is stored without positions, so it stays valid after the first
half of a conversation was dropped. *Coupled* KV is valid only where it was computed: everything
behind a dropped token is recomputed.

**States**: models with recurrent layers (linear attention, Mamba, short convolutions) keep a state
of a sequence, beside keys and values or instead of them. They are always coupled, and stored KV
can be used up to a position with a stored state. In a step over several sequences the
modules that continue from states are called for each sequence, and once for all decoding ones.
In Transformers Mamba's first scan (mamba, falcon_mamba, jamba) can continue from a state for a
single token only, so these modules are called token by token (*one by one*). So are those of
recurrent_gemma, which keep the states themselves: calibration finds them there, and each
sequence's states are written and read there. If `flash-linear-attention`, `causal-conv1d` or
`mamba-ssm` are installed, Transformers uses their kernels on a GPU; calibration then proves
the model with them. Such kernels change states in place, and are given copies.

**Entries**: a model may cache more than keys, values and such states. DeepSeek-V4 keeps
an entry for each 4 or 128 tokens, the latest tokens without an entry, and windows. It runs
over the cache that Transformers makes for it, in mode *own*: calibration inspects this cache after
sequences of many lengths. An entry is stored in pieces, one with each of its tokens, as keys and
values are; everything of bounded size is a state, coupled as above. Other caches are refused.

**Windows**: in many models some layers attend to the last tokens only, others to all (Gemma,
gpt-oss, Cohere). Of windowed layers kvd stores, and a turn loads, only the KV before positions
where turns begin. The engine's memory holds only the last tokens, so more sessions
fit; on pages (a GPU's default) this requires that the longest keys and values are one, two, four …
times the others (Gemma 4, MiMo). Chunked attention counts as a window of a chunk's length: that of
Llama 4, where it runs *ragged*. With `attn_temperature_tuning` and a context beyond `floor_scale`,
as published, it counts positions by its own cache and runs *single*. All of this applies to mode
*ragged*. If all layers have a window (Mistral's first models, StarCoder 2), every eighth is treated
as if it had none, because blocks of tokens must contain something. `inference_svc/README.md` has
the consequences.

**Versions**: the table is for Transformers {version}; others differ where Transformers does. In
5.17, the oldest supported version, models that select keys by an index (DSA) cache keys and values
of each head where later versions cache latents: they are served *masked* and coupled, with many
times as much KV. Cohere Compass is coupled there; `git`, `mllama` and `moshi` are refused. All
other models of 5.17 are served as here.

**Checked**, in float32, each at most {tolerance:.0e} off (relative distance of a token's logits;
the largest found was {worst}):

{checks}
In models whose keys are rotated, it was also checked that the check can fail: keys left at their
old positions give at least {stale:.0e}. So it was in models with states: that of another
position gives at least {other_state:.0e}.
"""


def rows(findings: Iterable[Findings]) -> dict[str, str]:
    """Make the lines of the table, by name."""
    made = {}
    for found in findings:
        outcome = ", ".join(found.distances) or f"refused, `{found.refusal}`: {found.reason}"
        if found.failed:
            outcome = f"FAILS: {'; '.join(found.failed)}"
        mode = f"{found.mode}, one by one" if found.is_one_by_one else found.mode
        cells = (found.name, f"`{found.class_name}`", mode, found.positions, outcome)
        made[found.name] = f"| {' | '.join(cell or '-' for cell in cells)} |"
    return made


def committed_rows() -> dict[str, str]:
    """Read the lines of the committed table, by name."""
    lines = [line for line in PATH.read_text().splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in lines[1:]}


def essence(row: str) -> str:
    """Return a line without the sentence that gives the reason for a refusal."""
    return row.split("`: ", 1)[0]


def committed_version() -> str:
    """Read the Transformers version of the committed table."""
    found = re.search(r"Transformers (\S+) are served", PATH.read_text())
    return found[1] if found else ""


def page(findings: Sequence[Findings]) -> str:
    """Make the whole page."""
    served = [found for found in findings if not found.refusal]
    checks = {check for after in AFTER_DISCARD.values() for check in after}
    listed = [*ALWAYS, *OVER_STATES, *sorted(checks, key=lambda check: check.__name__)]
    head = SERVED.lstrip().format(
        version=transformers.__version__,
        served=len(served),
        total=len(findings),
        tolerance=TOLERANCE,
        worst=f"{max((found.worst for found in served), default=0):.0e}",
        other_state=min(
            (found.other_state for found in served if found.other_state is not None), default=0
        ),
        stale=min((found.stale for found in served if found.stale is not None), default=0),
        checks="".join(f"- {check.__name__}: {_sentence(check.__doc__)}\n" for check in listed),
    )
    table = [
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *rows(findings).values(),
    ]
    not_tried = [f"- {name}: {reason}" for name, reason in NOT_TRIED.items()]
    return "\n".join([head, *table, "", "Not tried:", "", *not_tried, ""])


def _sentence(text: str | None) -> str:
    first = (text or "").splitlines()[0].rstrip(".")
    return first[:1].lower() + first[1:]


def main() -> None:
    """Examine every architecture, and write the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    findings = []
    for architecture in architectures().values():
        findings.append(examine(architecture))
        print(f"{architecture.name}: {findings[-1].mode or findings[-1].refusal}", file=sys.stderr)
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(page(findings))


if __name__ == "__main__":
    main()
