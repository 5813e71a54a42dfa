"""The rules, the findings, and the comments that allow a finding."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fla.utils.env import nearest

# Checked in source alone.
SOURCE_RULES = {
    'untraceable': 'a verifier or check does what torch.compile cannot trace or traces wrongly: environment, data_ptr, logs',
    'tensor-value': 'a verifier reads tensor values: a device synchronisation, and data-dependent under torch.compile',
    'formatted-size': 'a verifier formats a size, which specialises a dynamic size under torch.compile',
    'side-effect': 'a verifier or check changes something that outlives it',
    'slow-device-type': 'a verifier reads .device.type, which takes seven times as long as is_cuda',
    'device-query': 'a verifier asks a device runtime (torch.cuda.…) on each call',
    'verdict': 'a verifier can return something other than (True, None) or (False, reason)',
    'broad-except': 'a verifier catches Exception, which hides its own bugs as rejections',
    'direct-device-check': 'a backends package asks torch about devices instead of fla.utils or a declared fact',
    'block-pointer': 'tl.make_block_ptr, which fails on Triton 3.9',
    'ignored-argument': 'a backend names an argument that neither its method nor its verifier uses',
    'swallowed-arguments': 'a backend takes *args or **kwargs and drops them',
    'syntax': 'a file cannot be parsed',
    'allowance': 'a `lint: allow` comment without a reason, with an unknown rule, or with a rule that is not broken there',
}
# Checked by importing the package and asking its registries.
REGISTRY_RULES = {
    'import': 'a module, an operation or a registered path cannot be imported',
    'drift': 'a method and the public function disagree on parameters or defaults',
    'lonely-verifier': 'a verifier or prefers without the method it belongs to',
    'unknown-function': 'a backend has a method, and the operation has no dispatched function of that name',
    'unknown-operation': '@dispatch names an operation without a package or registry',
    'unreachable': 'a backend stands behind a candidate that serves every call on every machine',
    'env-prefix': "a toggle's name does not start with the namespace's prefix, so that typing errors go unnoticed",
    'shared-toggle': 'backends of one operation share a toggle but differ in default_enable',
}
RULES = {**SOURCE_RULES, **REGISTRY_RULES}

_ALLOWANCE = re.compile(r'#\s*lint:\s*allow\b\s*(?P<rules>.*?)(?:\s+because\b\s*(?P<reason>.*))?$')


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake: where, which rule, what is wrong, what to do."""

    file: Path
    line: int
    rule: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f'{shown(self.file)}:{self.line}: {self.rule}: {self.problem}; {self.remedy}'

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {**asdict(self), 'file': shown(self.file)}


def shown(file: Path) -> str:
    """Returns a path for messages, relative to the working directory if it lies below that."""
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)


@dataclass(frozen=True)
class Allowance:
    """A `# lint: allow RULE, RULE because REASON` comment; it covers `line`."""

    comment_line: int
    line: int
    rules: tuple[str, ...]
    reason: str


def allowances(text: str) -> Iterator[Allowance]:
    """Yields the allowances of a file. A comment on a line of its own covers the next line of code."""
    waiting: list[tuple[int, re.Match[str]]] = []
    code_on_line = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            match = _ALLOWANCE.match(token.string)
            if match is None:
                continue
            if code_on_line == token.start[0]:
                yield _allowance(token.start[0], token.start[0], match)
            else:
                waiting.append((token.start[0], match))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code_on_line = token.end[0]
            for line, match in waiting:
                yield _allowance(line, token.start[0], match)
            waiting.clear()
    for line, match in waiting:
        yield _allowance(line, line, match)


def _allowance(comment_line: int, line: int, match: re.Match[str]) -> Allowance:
    rules = tuple(word for word in re.split(r'[,\s]+', match['rules']) if word)
    return Allowance(comment_line, line, rules, (match['reason'] or '').strip())


def apply_allowances(found: Iterable[Finding], texts: Mapping[Path, str]) -> set[Finding]:
    """Returns the findings that no comment allows, and the mistakes in the comments themselves."""
    left = set(found)
    for file, text in texts.items():
        for allowance in allowances(text):
            covered = {f for f in left if f.file == file and f.line == allowance.line and f.rule in allowance.rules}
            problems = list(_problems(allowance, {f.rule for f in covered}))
            if allowance.reason:
                left -= covered
            left.update(Finding(file, allowance.comment_line, 'allowance', *problem) for problem in problems)
    return left


def _problems(allowance: Allowance, used: set[str]) -> Iterator[tuple[str, str]]:
    if not allowance.rules:
        yield 'the comment names no rule', 'write `# lint: allow RULE because REASON`'
    elif not allowance.reason:
        yield 'the comment gives no reason and allows nothing', 'write `# lint: allow RULE because REASON`'
    for rule in allowance.rules:
        if rule not in RULES:
            yield f'unknown rule {rule!r}.{nearest(rule, RULES)}', f'the rules are {", ".join(RULES)}'
        elif rule in SOURCE_RULES and rule not in used:
            # a registry rule may find nothing on this machine and something on another
            yield f'{rule} is not broken here', 'remove the comment'
