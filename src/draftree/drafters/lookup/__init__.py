"""Lookup of continuations in earlier text."""
