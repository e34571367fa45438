"""Analysis: closed forms and readers of records; independent of torch."""
