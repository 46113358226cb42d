"""Accounts of a worker: what each lease has earned, on disk in the control folder, for its owner."""
