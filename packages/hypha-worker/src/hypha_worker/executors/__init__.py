"""Executors, which run jobs: a training process, or the parameter server; `runtimes` lists them."""
