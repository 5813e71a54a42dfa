"""`python -m fla.ops.backends`; see `cli`."""

from fla.ops.backends.cli import main

raise SystemExit(main())
