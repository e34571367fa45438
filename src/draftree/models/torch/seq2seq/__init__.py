"""Encoder-decoder models of transformers, with our attention and slots in the decoder."""
