"""OpenAI's Responses."""
