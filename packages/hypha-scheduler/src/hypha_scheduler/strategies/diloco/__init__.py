"""DiLoCo (arXiv:2311.08105): workers train independently for a round, then a parameter server averages their updates.

`sample_ledger` decides which worker trains on which slice, `batch_allocation` how many batches each worker processes,
`rounds` when to synchronize; `training_state` and `operator` combine them. All are pure; `hypha_scheduler.jobs.runner`
does the I/O, and `result_model` that of the model.
"""
