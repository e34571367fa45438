"""Text to tokens and back: tokenizer, chat template, streaming, stop strings, comparison of vocabularies."""
