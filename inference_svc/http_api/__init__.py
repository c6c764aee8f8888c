"""An HTTP API in front of the same service, in the words of others: OpenAI's and Anthropic's."""
