"""The live function: decorator, entry point, policy stack, scopes."""
