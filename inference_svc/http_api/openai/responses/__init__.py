"""The Responses API: a turn with an id of its own, its input, and its objects and events."""
