"""Conversion between text and tokens: tokenizer, chat templates, streaming, stop strings, vocabularies."""
