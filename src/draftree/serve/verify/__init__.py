"""Verification of drafts that devices make: sessions, their texts, and the endpoint of their frames."""
