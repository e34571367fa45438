"""Tuning: one-time measurements of a model that improve its drafting, stored for later runs."""
