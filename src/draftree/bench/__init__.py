"""Benchmarks: workloads, runner, provenance and reports."""
