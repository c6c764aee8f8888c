"""OpenAI's words: chats, responses and completions. `docs/openai.md`."""
