"""Data node of a Hypha network: prepares, announces and serves datasets.

`catalog` reads the datasets, `announcer` publishes their DHT records, `slice_resolver` serves their slices, `prepare`
makes new ones. `service` connects them; `cli` is the command `hypha-data`.
"""
