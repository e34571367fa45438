"""Verification of drafts that devices make: sessions, their sequences in the engine, and the endpoint of their frames.

A `Session` is a device's lease on its sequences. `service` turns frames into rounds of the engine: a sequence either
takes the drafts of its device or is written by the server alone. With `--split`, devices run the first layers, and
`layers` computes the rest from their hidden states, all waiting sequences in one pass. Requests are numbered and
answered once, so that a frame that is sent again changes nothing.
"""
