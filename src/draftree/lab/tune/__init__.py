"""Search for the fastest way to draft for a model on this machine.

* `candidates`: the drafters that are compared, and their variants.
* `contest`: successive halving by measured speed, interleaved text by text, with a journal that continues it.
* `replays`: candidates on recorded texts of the target, which predicts their speed without its passes.
* `drafts`: the search of `draftree tune`; its result is what `draft="auto"` prefers.
* `layers`: the search for the sublayers that a model skips when it drafts itself.

Invariants: every speed is a ratio to plain decoding of the same text, measured next to it; on an exact target a
candidate whose text differs from plain decoding's is dropped. Imported by `cli`.
"""

from __future__ import annotations
