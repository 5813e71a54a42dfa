"""Which operations, functions and backends exist, and how they are found."""
