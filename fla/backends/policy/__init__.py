"""Which backends are allowed and preferred, and who said so."""
