"""Analysis: closed forms and readers of records; no torch."""
