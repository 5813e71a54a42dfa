"""Every defect listed in docs/defects.md names tests that exist, or says why there is none."""

import ast
import functools
import re

from tests.markdown import ROOT
from tests.tables import table

ROWS = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in (ROOT / 'docs/defects.md').read_text(encoding='utf-8').splitlines()
    if re.match(r'\| [ADC]\d+ \|', line)
]
NODE = re.compile(r'`(tests/[\w/]+\.py)::(\w+)`')


@functools.cache
def names_in(path):
    """The test functions of a file, which is parsed and not imported: some need packages or devices that are missing."""
    tree = ast.parse((ROOT / path).read_text(encoding='utf-8'))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')}


def test_every_defect_is_listed_once():
    expected = [f'{letter}{number}' for letter, count in (('D', 34), ('A', 30), ('C', 13)) for number in range(1, count + 1)]
    assert [row[0] for row in ROWS] == expected


@table('row', ROWS, ids=[row[0] for row in ROWS])
def test_its_tests_exist(row):
    _, what, guard = row
    assert what
    named = NODE.findall(guard)
    assert guard.count('::') == len(named), f'not a test of a file: {guard}'
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert name in names_in(path), f'{path} has no {name}'
    # without a test, a reason in words
    assert named or re.match(r'(not there yet: |A habit of a repository\. )\w', guard)
