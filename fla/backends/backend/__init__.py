"""What a backend is: its base class, its declared facts, and whether it is available."""
