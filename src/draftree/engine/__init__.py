"""The engine: sequences, the scheduler and the decoding loop."""
