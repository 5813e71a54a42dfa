"""What several linear recurrences share: argument checks, gates, the chunked delta rule in PyTorch."""
