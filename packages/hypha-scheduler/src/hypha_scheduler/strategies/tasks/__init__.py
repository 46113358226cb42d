"""Tasks that use each other's results: a list of task objects, each run by an executor of any class.

`config` is the job table and `definition_faults` what is wrong between its tasks; `graph` expands it to instances.
`instances` has their states, `placement` decides which runs on which lease, `retries` which runs again, and
`outputs` where outputs are; `operator` combines them. All are pure; `hypha_scheduler.jobs.runner` does the
I/O.
"""
