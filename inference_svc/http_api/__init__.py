"""The HTTP API: the service behind OpenAI's and Anthropic's protocols."""
