"""Trees grown level by level from the distributions of a model.

A drafter derives from `TreeBuildingDrafter` and sets a `TreeBuilder` (both in `builder`), which chooses children by the
shape of the tree and asks a `Stepper` for logits. There is a stepper for each kind of model: `ModelStepper` for a draft
model with slots of its own, `PartialStepper` for layers of the target, `HeadStepper` for a head with a pass per level,
`BlockStepper` for a head with one pass for all levels, and `AssistantStepper` for one that attends to the target's keys
and values. `LogitCorrector` corrects logits of the first level by what
was learned from verified tokens. `vocabularies` maps between the tokens of a draft model and the target's.

Invariants: all frontier nodes of all sequences are in one pass; a stepper's rows depend on the text only, so copies of
a prefix change no draft; a stepper mutates the states that it opened and no others.

Methods in `drafters` import this package, and tests of a stepper.
"""

from __future__ import annotations
