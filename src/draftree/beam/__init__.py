"""Beam search, where the live beams of a sequence are one token tree over a shared prefix.

* `search.BeamSearch` searches a batch of prompts: one forward pass of each model and one read from the device per step.
* `sequence.SequenceSearch` is the search of one prompt on the host: live beams, finished hypotheses, the end rules.
* `strategies` choose which continuations are candidates, on tensors, `phrases` holds how much of required phrases a
  sequence contains, and `scoring` turns logits into candidates under the rules of `params.BeamSearchParams` and of a
  generation configuration.
* `forest.Forest` keeps the beams as tentative trees in slots of the model.
* `drafting.BeamDrafter` guesses the next beams, so that one pass may serve several steps.
* `trace.BeamTrace` records a search, and `trace.tree_svg` draws it.

Invariants: candidates have a total order (score, rank of the parent, token id). Drafts, other searches of the batch and
splits of a tree change no result. All slots are closed when a search ends, also after an error. `params`, `result` and
`trie` import no torch, since every start of the command line reads them.

The package uses drafters, models and sampling. It is used by `beams`, `async_beams`, `dropin`, `serve` and `cli`.
"""
