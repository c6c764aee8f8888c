"""docs/models.md: which models are served, and how; `python -m tests.zoo.table` writes it anew."""

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

Which of the causal language models of Transformers {version} are served, and how: {served} of
{total} are. Written by `python -m tests.zoo.table`, which builds each of them with a few small
random layers, calibrates it and checks it against the stock model; `make test` does so for a
sample, `make test-long` for all. A model that is not listed here is calibrated all the same.
There is no list in the program: what calibration cannot prove is refused.

**Mode**: *ragged*, attention reads each sequence's KV where it is; *latent*, it reads latents where
they are, and makes no keys and values of them but for long prompts; *indexed*, the same, of those
that the model's index chooses; *gather*, the model makes keys of what it caches, and gets all of
it; *masked*, the model's own attention over all sequences at once, kept apart by a mask; *single*,
the model's own attention, sequence by sequence; *own*, likewise, and over its own cache.

**Latents**: a model of latent attention (MLA) caches a latent and a rotated part of each token and
layer, for all heads together, and that is what kvd and the engine's memory hold: 576 values at
DeepSeek-V3's widths, where keys and values of its 128 heads are 40,960. Transformers makes these of
the whole history in every step. Here a query is multiplied with the matrix that makes keys and
attends over latents, wherever that is fewer products: below some 150 new tokens behind 1,024.
The matrix is found by giving unit vectors to each layer, and held beside the model's own weights:
it is as large as those that it is made of. Where there is no such matrix the mode is *gather*, and
the log of the start says why.

**Positions**: *decoupled*, what is stored knows no position, so that it is of use after the first
half of a conversation was dropped; *coupled*, it is of use only where it was computed: what follows
a dropped token is recomputed.

**States**: models with recurrent layers (linear attention, Mamba, short convolutions) keep a state
of a sequence, beside keys and values or instead of them. Theirs are coupled, always: what is
stored is of use up to a position that has a stored state. In a step over several sequences the
modules that go on from states are called for each sequence, and once for all that decode. Mamba's
first scan (mamba, falcon_mamba, jamba) cannot begin with a state in Transformers, but for a single
token: there these modules are called token by token, *one by one*; so are recurrent_gemma's, which
keep states of whatever ran last themselves: calibration finds them there, and each sequence's are
put there and taken from there. Where
`flash-linear-attention`, `causal-conv1d` or `mamba-ssm` are installed Transformers computes with
their kernels by itself, on a GPU; calibration then proves the model as it runs with them. Kernels
change states in place, and are handed copies.

**Entries**: a model may keep more in its cache than keys, values and such states. DeepSeek-V4 keeps
an entry for each 4 or 128 tokens, the last tokens of which there is none yet, and windows. It runs
over the cache that Transformers makes for it, mode *own*: calibration looks at what that holds
behind sequences of many lengths. An entry is stored in pieces, one with each token, as keys and
values are; what is bounded is a state, coupled as above. Anything else is refused.

**Windows**: in many models some layers attend to the last tokens only, others to all (Gemma,
gpt-oss, Cohere). Of the former kvd has, and a turn loads, KV of the tokens before the places where
turns begin, and no other; the engine's memory holds the last tokens only, so that more sessions
fit: on pages, which are a GPU's, if the longest keys and values are one, two, four … times the
others (Gemma 4, MiMo). A chunk of attention counts as a window of its tokens: Llama 4's, where it
runs *ragged*. With `attn_temperature_tuning` and a context beyond `floor_scale`, as published, it
counts positions by its own cache, and runs *single*.
`inference_svc/README.md` has what follows from that. So it is in mode *ragged*; where all layers
have a window (Mistral's first ones, StarCoder 2), one in eight counts as if it had none: blocks of
tokens are to hold something.

**Versions**: the table is of Transformers {version}; others differ where Transformers does. In
5.17, the oldest that is taken, models that choose keys by an index (DSA) cache keys and values of
each head where later ones cache latents: they are served *masked* and coupled, and their KV is many
times as large. Cohere Compass is coupled there; `git`, `mllama` and `moshi` are refused. All others
that 5.17 has are served as here.

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
    """Return a line without the sentence that says why a model is refused."""
    return row.split("`: ", 1)[0]


def committed_version() -> str:
    """Read which Transformers the committed table is about."""
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
