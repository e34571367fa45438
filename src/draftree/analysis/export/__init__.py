"""Traces in other formats: Chrome's trace events for timelines, tables as CSV files and data frames."""
