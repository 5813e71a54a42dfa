"""After a backend raised: retry with the next candidate, circuit breaker."""
