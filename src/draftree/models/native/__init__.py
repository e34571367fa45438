"""Native kernels: C forward passes of decoders of the usual architecture.

* `describe` derives a `blueprint.Blueprint` from a model of transformers, by the structure and values of its `modules`
  and not by the name of its family; models that it does not describe run in PyTorch.
* `weights` reads weights, `packing` and `packed` put them into the blocks of the C library; `shares` divides a decoder
  among processes.
* `build` finds or compiles the `library`, `structures` declares its C structures and compares both layouts.
* `decoder.NativeDecoder` runs passes, `logits` searches their logits in place, and `model.NativeModel` is the
  `LanguageModel`; `seq2seq` has decoders with sources, `streaming` weights that are read from a file in every pass.

Invariants: every sum has one order, whatever else is in the pass, so logits have the same bits in every tree and batch.
A variant of the library has one set of compiler flags on every machine. A library from the cache is loaded only if its
content matches the checksum in its name and no other user can write it or its folders. Unpacking returns the bits that
were packed. The C sources are in `csrc`.
"""
