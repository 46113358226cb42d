"""The output of executors' processes, kept in files of the work directory: written by a worker, read by its owner."""
