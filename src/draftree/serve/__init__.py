"""OpenAI-compatible HTTP server with continuous batching and speculation per request."""
