"""Tuning: measurements of a model that are made once and kept, so that it drafts better."""
