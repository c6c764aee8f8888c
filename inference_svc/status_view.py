"""What `inference-svc status` shows a person: the service, its gauges, its counters. Pure."""

from collections.abc import Iterator

from google.protobuf.json_format import MessageToDict
from rich.table import Table

from inference_svc.core.counters import COUNTERS
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.units import format_bytes, format_duration

MAPS = ("gauges", "counters")  # fields of Model that have tables of their own


def status_tables(model: pb.Model) -> Iterator[Table]:
    """One table each of what is served, how it goes, and what was counted since the start."""
    served = Table("what", "value", box=None)
    fields = MessageToDict(
        model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for name, value in fields.items():
        if name not in MAPS:
            served.add_row(name, str(value))
    yield served
    if model.gauges:
        gauges = Table("\nnow", "\nvalue", box=None)
        for name, number in sorted(model.gauges.items()):
            gauges.add_row(name, format_gauge(name, number))
        yield gauges
    counted = Table("\nsince the start", "\ncount", "\nwhat", box=None)
    for name in (*COUNTERS, *sorted(set(model.counters) - set(COUNTERS))):
        if name in model.counters:  # a service of another version counts other things
            counted.add_row(name, f"{model.counters[name]:,}", COUNTERS.get(name, ""))
    yield counted


def format_gauge(name: str, value: float) -> str:
    """A gauge for people; the end of its name tells the unit."""
    if name.endswith("_per_s"):
        return f"{value:,.0f} /s"
    if name.endswith("_s"):
        return format_duration(value)
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.3g}"
