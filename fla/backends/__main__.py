"""`python -m fla.backends`; see `cli`."""

from fla.backends.cli.main import main

raise SystemExit(main())
