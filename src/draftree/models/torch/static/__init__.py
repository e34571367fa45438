"""Passes of fixed shapes over slots, which a CUDA graph can replay."""
