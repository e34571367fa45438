"""Encoder-decoder models whose decoders use the native kernels; their encoders run in PyTorch."""
