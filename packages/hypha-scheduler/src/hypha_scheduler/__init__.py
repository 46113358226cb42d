"""Hypha scheduler: finds and leases workers, runs a job's tasks on them, follows its progress, and keeps the model.

Start with `service` (the daemon) and `jobs.runner` (one job). Decisions are made by pure modules, which take the clock
as an argument: `allocation.auction`, `allocation.leases`, `jobs.attempt_register` and the operators of `strategies`.
The other modules do the network and file I/O.
"""
