"""Export of heads to the layouts that servers of other projects read.

Each layout is a module. An export has all tensors that the server needs, also those that a head shares with its target,
and refuses heads that the server would read wrongly.
"""
