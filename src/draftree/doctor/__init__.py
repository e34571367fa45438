"""Diagnosis of a machine and a model: kernels, expected speed, and the limits."""
