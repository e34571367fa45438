"""Loading: from a name, a folder, a file or a transformers model to a checked `LanguageModel`.

`load_model` tries its loaders in order: a GGUF file on its own blocks, a 4-bit checkpoint, a later start from packed
weights, native kernels, PyTorch. Each returns a `LoadedModel`, or the reason why the next one is tried; `remote:` names
begin a session with a verify server instead. `ModelOptions` holds what the user chose.

A first start compares the model's logits with its own forward pass: a chain and a tree that agree give trees, a chain
alone gives chains with a warning, and a model whose chains differ uses the cache of transformers, or is refused. The
start is recorded with a digest of logits, so that later starts import nothing of transformers (`native_start`,
`records`).

Invariants:

* What cannot run is refused before weights are read, where that is possible.
* A model that the user loaded is restored after use (`lending`).
* `trust_remote_code=False` is passed wherever transformers loads something, unless the user allows it.
* `dtype="auto"` depends on the processor's instructions only, so it is the same in every run on a machine.

Modules of first starts (`lowering`, `references`) are imported in functions, because later starts do not need them.
Imported by drafters, the front ends, the laboratory, training, the server and the command line; never by the engine.
"""
