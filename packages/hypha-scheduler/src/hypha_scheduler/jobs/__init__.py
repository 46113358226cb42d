"""Jobs: a runner that knows no strategy, and what strategies share: job tables, artifacts, events, the journal."""
