"""`rein ui`: local pages over all runs in a folder. Reads what runs left behind, and changes nothing."""
