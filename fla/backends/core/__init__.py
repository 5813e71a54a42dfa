"""Words that every other room uses: errors, signatures, questions about tensors, logging, the lock."""
