"""What happens after a backend raised: retry with the next candidate, circuit breaker."""
