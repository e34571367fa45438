"""Learning from verified texts while serving.

`store` holds the settings of `learn`, the interface `Learner`, and `LearningStore`, which keeps the learners of one
engine and saves them to files. `corrections` is the learner of a head's logits; that of tables of texts is in
`drafters/suffix.py`.

Invariants: what is learned changes drafts, never texts; the engine's thread changes learners with the store's lock
held; a file belongs to one learner of one target, and one engine.
"""
