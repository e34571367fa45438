"""The engine: sequences, the scheduler and the loop."""
