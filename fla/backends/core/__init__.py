"""Used by every other folder: errors, signatures, questions about tensors, logging, the lock."""
