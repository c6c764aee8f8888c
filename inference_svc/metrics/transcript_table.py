"""The metrics of transcripts: a part of the service's table (`table.py`)."""

from shared.serving.metric_export import Metric

TRANSCRIPT_METRICS = (
    Metric(
        "inference_transcript_errors_total",
        "counter",
        "Reads and writes of transcripts that failed: no room (full), or another reason",
        ("error",),
    ),
    Metric(
        "inference_transcript_store_calls_total",
        "counter",
        "Calls to the object store of transcripts, by purpose; failed: no answer in time",
        ("call",),
    ),
    Metric(
        "inference_transcript_store_up",
        "gauge",
        "1 if the object store of transcripts has answered the last call; no value without one",
    ),
    Metric(
        "inference_transcripts_behind",
        "gauge",
        "Sessions whose last turns are on this server only and would be lost with it",
    ),
    Metric(
        "inference_histories_asked_total",
        "counter",
        "Conversations without a name for which the object store was asked, by what it had: found, "
        "absent, gone (its session is), silent",
        ("result",),
    ),
    Metric(
        "inference_turns_forked_total",
        "counter",
        "Turns recorded in a fork because another server had continued their session",
        (),
        {"": "turns_forked"},
    ),
)
