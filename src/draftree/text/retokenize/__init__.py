"""Translation of tokens between two tokenizers."""
