"""Slots: preallocated keys and values, and their bookkeeping."""
