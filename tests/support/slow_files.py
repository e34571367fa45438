"""Files that `make quick` omits: each needs at least two seconds of CPU time. Not a test itself."""

from __future__ import annotations

SLOW = frozenset(
    {
        "test_async_ends",
        "test_bench_cli",
        "test_bench_passes",
        "test_bench_peer",
        "test_bench_plots",
        "test_bench_runner",
        "test_cli_generate",
        "test_cli_main",
        "test_cli_refusals",
        "test_cli_traces",
        "test_coupled",
        "test_doctor",
        "test_engine_company",
        "test_engine_scheduling",
        "test_engine_trim",
        "test_gpu_passes",
        "test_grammar_distributions",
        "test_growth",
        "test_lending",
        "test_planner_auto",
        "test_simulator",
        "test_soak",
        "test_synthetic",
        "test_temperature_zero",
        "test_text_detokenize",
        "test_tune_layers",
        "test_weights_cli",
        "test_weights_fetch",
        "test_weights_interrupted",
    }
)
"""Names of test files; their tests are marked `slow`."""
