"""Strategies: kinds of jobs. `base` is their interface, `registry` finds them, `diloco` is the one that comes along."""
