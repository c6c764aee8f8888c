"""Encoding of the core's records as protobuf messages, decoding of requests, and events."""
