"""The drop-in for transformers: `model.generate(…, custom_generate=draftree.generate, draft="ngram")`.

`generate` is the callable that transformers calls, and `beams` its beam search. It refuses what is not supported
(`refusals`), reads the drafter, the prompts and the encoder's outputs (`inputs`), and runs the engine on the borrowed
model. Logits processors, stopping criteria and streamer are called as `generate` calls them, by a rule that walks the
drafted trees of a batch in parallel (`steps`). `vllm_proposer` offers drafters without a model to vLLM.

* In every call the last token of the prompt is scored from its slot and compared with the model's own logits; a
  family that differs is refused.
* An argument that cannot be honoured is refused with the reason and an alternative.
* The user's callbacks may have side effects: they are called once per written token, in order, and never for
  rejected tokens.
* Forward passes run through PyTorch, so near-ties can flip.

Only the package's lazy `draftree.generate` and vLLM's configuration name it.
"""
