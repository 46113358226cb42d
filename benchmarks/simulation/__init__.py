"""Simulated placement of jobs: the real code of workers and schedulers on the in-memory network and a virtual clock.

`network` opens workers and places jobs, `cheats` are peers that misbehave. Used by the benchmark `placement` and by the
repository's tests.
"""
