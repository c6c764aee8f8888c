"""The core's records as protobuf messages, and back; filters that callers name; events."""
