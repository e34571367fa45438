"""Incremental detokenization streams: one file for each kind of tokenizer."""
