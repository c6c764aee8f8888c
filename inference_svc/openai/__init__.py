"""An OpenAI-compatible HTTP API in front of the same service: `docs/openai.md`."""
