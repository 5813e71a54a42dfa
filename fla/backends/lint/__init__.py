"""The lint for backend authors, `python -m fla.backends lint [package or path ...]`; `RULES` lists what it checks. A comment
`# lint: allow RULE because REASON` allows findings on its line, or on the next line if it stands alone."""

from fla.backends.lint.findings import REGISTRY_RULES, RULES, SOURCE_RULES, Finding

__all__ = ['REGISTRY_RULES', 'RULES', 'SOURCE_RULES', 'Finding']
