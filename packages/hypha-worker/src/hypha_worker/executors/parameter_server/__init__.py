"""The parameter server: collects the pseudo-gradients of a round, takes the outer step, gives the outer update back.

`collection` says whose updates make a round and when it is complete, `outer_step` computes on files, and `server` does
the talking. Before this room: the training executors' pushes. After it: their bridges, and the scheduler's results.
"""
