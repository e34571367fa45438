"""Diagnosis of a machine and a model: what runs here, how fast it should be, and what limits it."""
