"""Tuning: what is found out about a model once and kept, so that it drafts better."""
