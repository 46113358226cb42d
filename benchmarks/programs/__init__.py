"""What the processes of the benchmarks run."""
