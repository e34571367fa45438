"""Benchmark suites: prompts of several sets, comparable scores, submissions and their tables."""
