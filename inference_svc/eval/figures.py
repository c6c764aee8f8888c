"""The results of a run of the eval: frozen values, which report.py writes down. Pure.

The names of the fields are the names in the JSON document: a field may be added freely, but renamed
or removed only with a new number in SCHEMA.
"""

from dataclasses import asdict, dataclass

from inference_svc.eval.options import Truncation
from shared.measuring.statistics import Interval

SCHEMA = "inference_svc.eval/1"


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Mean loss of some tokens, in three units."""

    nats_per_token: float
    per_token: float
    per_word: float


@dataclass(frozen=True, slots=True)
class MethodPerplexity:
    """One method on one text.

    Attributes:
        after_overflow: perplexity after the first truncation only; words are taken to be as long as
            in the whole text.
        to_reference: its perplexity per word, divided by that of token truncation, on the whole
            text; None without token truncation. The interval comes from the spread over pieces of
            the text, each as long as the larger of the two methods' truncations.
        after_to_reference: the same for the tokens after the first truncation; None also if they
            are fewer than one truncation drops.
        num_computed: number of tokens that went through the model.
    """

    method: str
    all_tokens: Perplexity
    after_overflow: Perplexity
    to_reference: Interval | None
    after_to_reference: Interval | None
    num_computed: int
    num_overflows: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class MethodRetrieval:
    """One method on records.

    Attributes:
        kept: share of right answers about records that are in the context when they are asked for.
        overall: share of right answers about all records.
    """

    method: str
    kept: Interval
    overall: Interval
    num_kept: int
    num_asked: int
    num_computed: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class RotationError:
    """One way to get keys to their new positions, in one dtype.

    Attributes:
        way: "before rope", "double rotation" or "single turn".
        root_mean_square: relative error of keys (Euclidean norm) against those embedded in float64.
        largest: the error of the worst key.
        to_own: root mean square error against the keys that the model itself computes there.
    """

    way: str
    dtype: str
    num_moves: int
    root_mean_square: float
    largest: float
    to_own: float


@dataclass(frozen=True, slots=True)
class Subject:
    """The model, and the machine it was measured on.

    Attributes:
        sink_tokens: number of first tokens that are its attention sinks, as found when it is
            served.
    """

    model: str
    fingerprint: str
    architecture: str
    attention_mode: str
    sink_tokens: int
    num_weights: int
    dtype: str
    device: str
    threads: int
    cpu: str
    libraries: dict[str, str]
    date: str


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """Part `perplexity`.

    Attributes:
        reference_ratio: share of the window that the reference, token truncation, drops.
    """

    text: str
    num_tokens: int
    num_words: int
    window_tokens: int
    truncation: Truncation
    reference_ratio: float
    methods: tuple[MethodPerplexity, ...]


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    """Part `retrieval`.

    Attributes:
        context_tokens: mean number of tokens that were fed before a question.
    """

    num_contexts: int
    num_questions: int
    num_overflows: int
    context_tokens: float
    seed: int
    window_tokens: int
    truncation: Truncation
    methods: tuple[MethodRetrieval, ...]


@dataclass(frozen=True, slots=True)
class RotationReport:
    """Part `rotation`."""

    text: str
    num_keys: int
    window_tokens: int
    dropped_tokens: int
    errors: tuple[RotationError, ...]


@dataclass(frozen=True, slots=True)
class CompressedQuality:
    """One policy at one ratio.

    Attributes:
        kept: share of a text context's tokens that is left, and so of its KV bytes.
        next_tokens: perplexity of the tokens of the text behind the context.
        to_whole: this perplexity per token, divided by that behind the whole context; the interval
            comes from the spread over pieces of the text.
        prefill: CPU time to compute a context, divided by that without scores; median of pairs.
        asked_before: share of right answers where the question was part of the compressed context.
        asked_after: share of right answers where it was not.
    """

    policy: str
    keep_ratio: float
    kept: float
    next_tokens: Perplexity
    to_whole: Interval
    prefill: float
    asked_before: Interval
    asked_after: Interval


@dataclass(frozen=True, slots=True)
class CompressionReport:
    """Part `compression`; the first row is the whole context.

    Attributes:
        num_tokens: number of tokens of text that were judged.
        num_asked: number of questions, the same before and after.
        token_bytes: bytes of a token's KV, as stored.
    """

    text: str
    num_contexts: int
    context_tokens: int
    num_tokens: int
    num_asked: int
    token_bytes: int
    seed: int
    rows: tuple[CompressedQuality, ...]


@dataclass(frozen=True, slots=True)
class EditQuality:
    """One mode, after edits of one kind.

    Attributes:
        reused: share of the tokens behind the edit, inserted ones included, that were not computed;
            mean over edits of text.
        next_tokens: perplexity of the tokens of the text behind the context.
        to_exact: this perplexity per token, divided by that of mode "exact", edit by edit; the
            interval comes from the spread over edits.
        divergence: Kullback-Leibler divergence from predictions of mode "exact", in nats per token;
            the interval comes from the spread over edits.
        agreement: share of next tokens for which both modes have the same first choice.
        kept: share of right answers about records behind the edit.
        brought: share of right answers about records that the edit inserted; None: it inserts none.
        stale: share of answers with the old value of a record that the edit removed.
        old_value: how much likelier the old value is than in mode "exact", in nats, mean.
        num_edits: number of edits of text, and of records.
    """

    kind: str
    mode: str
    reused: float
    next_tokens: Perplexity
    to_exact: Interval
    divergence: Interval
    agreement: Interval
    kept: Interval
    brought: Interval | None
    stale: Interval
    old_value: Interval
    num_edits: int


@dataclass(frozen=True, slots=True)
class EditsReport:
    """Part `edits`: every mode of each kind; the kinds together come last.

    Attributes:
        text: the text that was edited.
        is_overlapping: whether pieces of text overlap, because there is too little of it.
        num_tokens: number of tokens of text that were judged, by each mode of each kind.
        token_bytes: bytes of a token's KV, as stored.
    """

    text: str
    num_contexts: int
    context_tokens: int
    is_overlapping: bool
    num_tokens: int
    token_bytes: int
    seed: int
    rows: tuple[EditQuality, ...]


Part = PerplexityReport | RetrievalReport | RotationReport | CompressionReport | EditsReport


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of one run."""

    part: str
    command: tuple[str, ...]
    elapsed_s: float
    subject: Subject
    found: Part


def as_document(report: EvalReport) -> dict[str, object]:
    """Return plain values for json.dumps."""
    return {"schema": SCHEMA, **asdict(report)}
