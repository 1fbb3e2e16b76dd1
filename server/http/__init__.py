"""The HTTP API: OpenAI's routes, health, load and metrics. Needs the `http` extra."""
