"""Anthropic's words: messages. `docs/anthropic.md`."""
