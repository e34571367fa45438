"""Tools: definitions, formats of calls by model family, incremental parsing and forced calls."""
