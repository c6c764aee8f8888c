"""OpenAI's words: chat completions and responses. `docs/openai.md`."""
