"""Models: one interface for forward passes over token trees, and its implementations in PyTorch and C.

* `base.LanguageModel` is the seam. A slot holds a committed prefix and a tentative tree; `run` computes a pass, `apply`
  edits slots, and both take plain data, so that another process can replay them (`process.ProcessModel`).
* `source.EncoderDecoder` is a model whose slots are opened on a source: token ids, features or hidden states.
* `kv` stores keys, values and recurrent states. `torch` runs models of transformers, `native` the usual decoders on
  native kernels.
* `check` compares a small tree scored in one pass with each of its branches scored alone, before a model is used.
* `table.TableLM` and `replay.ReplayModel` compute nothing: a probability table for tests, and a recorded sequence.

Invariants: nothing is concatenated, and positions and windows go by depth, so a commit moves a few rows in place. Slots
are assigned from the lowest index. The same operations on two models give the same slot ids. Native passes give
bit-identical logits alone, in any tree and in any batch (`is_exact`); PyTorch passes give the same tokens up to
near-ties. Passes and edits happen under `model.lock`. Keys and values can be cut anywhere, a recurrent state only where
it was kept (`cut_length`); settled tokens move it on.

The package uses `core`, `sampling` and `weights`; everything above it may import it.
"""
