"""Logits become distributions and picks: the only place where they do."""
