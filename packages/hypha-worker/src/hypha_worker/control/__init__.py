"""Control socket of a worker: commands of its owner on the same machine, over a Unix socket in the work directory."""
