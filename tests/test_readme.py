"""The examples of README.md run, in order, and print what it says they print."""

from tests import markdown


def test_examples():
    assert markdown.run('README.md') > 5
