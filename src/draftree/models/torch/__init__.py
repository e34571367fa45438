"""Passes of transformers models in torch."""
