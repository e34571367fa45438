"""Logits become laws and picks: the only place where they do."""
