"""What a backend is: `BaseBackend`, its declared facts, and whether it is available."""
