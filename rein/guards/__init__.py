"""Rules over metrics: each says go on, skip or stop, with a reason. Knows nothing of snapshots or models."""
