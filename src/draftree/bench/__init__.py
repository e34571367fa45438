"""Benchmarks: workloads, runner, provenance, reports."""
