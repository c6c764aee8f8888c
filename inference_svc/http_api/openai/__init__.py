"""OpenAI's API: chats, responses, conversations, completions, embeddings. `docs/openai.md`."""
