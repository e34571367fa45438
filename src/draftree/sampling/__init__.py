"""Sampling: the only place where logits become distributions and picks."""
