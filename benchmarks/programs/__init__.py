"""Programs of the benchmarks' child processes."""
