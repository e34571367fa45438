"""Learned heads: small networks that draft from hidden states of the target."""
