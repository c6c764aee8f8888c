"""Records as protobuf messages, and back."""
