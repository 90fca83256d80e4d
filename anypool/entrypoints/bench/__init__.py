"""`anypool bench`: our engine beside others, with the same model and the same texts, on this machine."""
