"""Slots: preallocated keys and values, and the base class of models that use them.

`slots.KVMemory` keeps one tensor of keys and one of values for all layers of a shape, (slots, layers, kv_heads, length,
head_dim). `slots.SlotPool` allocates slots and compacts the nodes that a commit keeps; tentative nodes are stored after
the prefix in the order in which they were appended. `slots.PartialTree` holds nodes computed by a subset of the layers,
from which a whole pass continues. `slotted.SlottedModel` and `slotted.SourcedModel` are the base classes of models in
PyTorch and C; they leave only the forward pass to them.

Memory is reserved for the whole batch, and again when it is outgrown. On a CPU the system provides pages only when they
are written, so reserving more slots than are open costs nothing.
"""
