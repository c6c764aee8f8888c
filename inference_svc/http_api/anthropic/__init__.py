"""Anthropic's API: messages. `docs/anthropic.md`."""
