"""Data node of a Hypha network: prepares, announces and serves datasets.

`catalog` reads the datasets, `verification` checks their slices, with the digests that `digest_cache` remembers,
`announcer` publishes their DHT records, `slice_resolver` serves their slices. `prepare` makes new ones, from tensors or
from the rows that `jsonl` reads. `service` connects them; `cli` is the command `hypha-data`.
"""
