"""DiLoCo: workers train alone for a round, a parameter server averages what they learned, and so on (pure).

`slices` says who trains on what, `forecast` how fast everyone is and how many batches that makes, `rounds` when to
synchronise. The shell around them is `hypha_scheduler.training`.
"""
