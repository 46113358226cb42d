"""Complete Hypha network on one machine, with every node as a process; runs the demo of the command `hypha-local`.

A run goes through `network_layout` (what there will be), `certificates`, `processes` and `probe` (start and wait),
`demo` (the sequence of all steps), `display` (progress), `summary` and `plot` (results).
"""
