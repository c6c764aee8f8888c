"""OpenAI's words: chats, responses, conversations and completions. `docs/openai.md`."""
