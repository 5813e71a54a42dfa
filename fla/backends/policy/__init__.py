"""Which backends are allowed and preferred, and which layer decided that."""
