"""Evaluations of competing requests, one a module; `bidding.evaluation` finds every module of this package."""
