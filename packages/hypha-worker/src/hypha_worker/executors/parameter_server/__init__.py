"""The parameter server of DiLoCo (arXiv:2311.08105): averages pseudo-gradients and distributes the outer update.

`server` communicates with workers and the scheduler, `round_collector` decides which updates belong to a round and when
it is complete, and `hypha_proto.outer_step` computes on files.
"""
