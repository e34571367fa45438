"""Encoder-decoder models whose decoders run in C."""
