"""The drop-in for transformers: `model.generate(…, custom_generate=draftree.generate, draft="ngram")`.

`front` is the callable that transformers calls. It refuses what is not supported (`refusals`), chooses a drafter
(`drafting`) and runs the engine on the borrowed model. Logits processors, stopping criteria and streamer are called
as `generate` calls them, step by step (`steps`), by a rule that walks the drafted trees of a batch in parallel
(`walk`).
"""
