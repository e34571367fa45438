"""The engine: the decoding loop and everything that a batch of sequences shares.

Main types: `Engine` batches sequences continuously and steps them; `run_round` is the loop; `WritingSequence` is one
sequence during generation; `EngineParts` are the model, drafter, verifier and planner of an engine; `Scheduler` admits
sequences and divides the prefill budget; `SlotAllocator` and `PrefixCache` own slots; `Driver` steps an engine on a
thread for asyncio; `PromptEncoder` and `SequenceFactory` turn requests into sequences.

Invariants:

* Plain decoding is the loop with empty trees. One prompt is a batch of one.
* The engine loads no models and names no algorithm; it sees base classes of models, drafters, verifiers and planners.
* The drafter's state of a sequence goes where the target's slot goes: forked, kept with a cached prefix, handed over,
  closed. A draft never depends on what was cached.
* A sequence that fails, fails alone: non-finite logits end their sequence; a pass that raises is retried sequence by
  sequence; only what no sequence caused ends the batch. `Engine.check_integrity` holds after every step.
* A sequence of n tokens has hidden states of its first n - 1 tokens: the target never reads the last one. A sink of
  hidden states excludes cached and shared prefixes, because copied tokens have no states.

The front ends (`llm`, `async_llm`, `build`, `outputs`, `beam`, `speech`), the server and the tools above them may
import this package; nothing below may.
"""
