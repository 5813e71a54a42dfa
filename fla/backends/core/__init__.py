"""What every other folder uses: errors, signatures, questions about tensors, logging, the lock."""
