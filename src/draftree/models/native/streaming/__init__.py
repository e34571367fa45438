"""Native forward passes whose weights are read from a file layer by layer, within a memory budget.

`store` is a folder: packed products, one layer after the other, small tensors, and C structures with places instead of
pointers. `model.StreamedModel` runs a pass layer by layer; hidden states between layers are float32, so the bits are
those of one call. A thread reads the next layers in cyclic order, and a layer out of order discards what was read
ahead. `model.ResidentDecoder` keeps all layers, mapped in the first passes.
"""
