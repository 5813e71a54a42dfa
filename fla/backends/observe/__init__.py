"""What ran: traces, counters, telemetry, tables."""
