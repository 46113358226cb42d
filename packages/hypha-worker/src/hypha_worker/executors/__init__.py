"""Executors, which run tasks: processes, and the built-in parameter server; `runtimes` lists the ways of running."""
