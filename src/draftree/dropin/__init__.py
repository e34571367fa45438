"""The drop-in for transformers: `model.generate(…, custom_generate=draftree.generate, draft="ngram")`.

`front` is what transformers calls. It fetches what transformers drops on the way (`handover`), refuses what cannot
be honoured (`refusals`), chooses a drafter (`drafting`) and runs the engine on the borrowed model. Logits processors,
stopping criteria and streamer are called as `generate` calls them, step by step (`steps`), by a rule that walks the
drafted trees of a batch side by side (`walk`).
"""
