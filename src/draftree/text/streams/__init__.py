"""How token ids become text piece by piece: one file for each kind of tokenizer."""
