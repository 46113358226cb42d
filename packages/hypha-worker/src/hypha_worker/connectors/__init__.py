"""Where resources come from: peers, the scheduler's slices, hubs, URLs and files."""
