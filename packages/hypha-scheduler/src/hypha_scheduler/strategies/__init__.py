"""Training strategies. So far there is one, DiLoCo, in `diloco`.

The code is pure; parts of DiLoCo that do I/O or read its configuration are modules of `hypha_scheduler` itself:
`training`, `membership`, `start_gate`, `submit` and `job_config`.
"""
