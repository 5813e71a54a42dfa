"""The ordered candidates of a function under a policy: a pure function of facts."""
