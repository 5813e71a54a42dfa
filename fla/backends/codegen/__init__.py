"""A plan as Python source: for the call, and for `explain`."""
