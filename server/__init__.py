"""The HTTP server: OpenAI's endpoints over the engine."""
