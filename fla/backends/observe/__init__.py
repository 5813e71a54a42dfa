"""Traces, counters, telemetry, and tables of the registered backends."""
