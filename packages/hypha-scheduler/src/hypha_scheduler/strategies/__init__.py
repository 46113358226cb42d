"""Which tasks a job is made of and when they run: one folder a strategy, each pure."""
