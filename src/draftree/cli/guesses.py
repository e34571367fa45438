"""Option names of other programs, mapped to the ones here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["suggested_option"]

GUESSES: dict[str, tuple[str, ...]] = {
    "--json": ("--format", "--output-format", "--jsonl", "-j"),
    "--max-tokens": ("--max-new-tokens", "--max-length", "--max-completion-tokens", "--num-predict", "--n-predict"),
    "--temperature": ("--temp", "--greedy", "--do-sample"),
    "--draft model:NAME": ("--draft-model", "--model-draft", "--assistant-model", "--assistant", "--speculative-model"),
    "--prompts": ("--prompt-file", "--prompts-file", "--input-file", "--file", "--input"),
    "--batch": ("--batch-size",),
    "--quantization": ("--quantize", "--quant"),
    "--dtype": ("--precision", "--torch-dtype"),
    "--threads": ("--num-threads", "--cpus"),
    "--system": ("--system-prompt",),
    "--n": ("--num-return-sequences", "--num-samples"),
    "--stop": ("--stop-strings", "--stop-sequences", "--stop-sequence"),
    "--seed": ("--random-seed",),
    "--output": ("--out", "--output-file"),
    "--api-key-file": ("--api-key", "--api-keys"),
    "--cors-origin": ("--allowed-origins", "--cors", "--cors-allow-origins"),
    "--allowed-host": ("--allowed-hosts", "--trusted-host", "--trusted-hosts"),
    "--max-batch-size": ("--max-num-seqs", "--parallel"),
    "--max-concurrent-requests": ("--concurrency", "--max-concurrency"),
    "--drain-timeout": ("--timeout-graceful-shutdown", "--graceful-timeout"),
    "--trials": ("--num-trials", "--n-trials"),
}
"""Other programs' names by the option that is meant."""


def suggested_option(given: str, options: Collection[str], close: Sequence[str]) -> str | None:
    """Return the option that an unknown option probably means; None if no option is similar.

    Args:
        given: the unknown option.
        options: all options of the command.
        close: options whose spelling is close, the closest first.
    """
    meant = next((name for name, guesses in GUESSES.items() if given in guesses), None)
    if meant is not None and meant.split()[0] in options:
        return meant
    return next(iter(close), None)
