"""From slices to model inputs: batches, preprocessing, micro-batches."""
