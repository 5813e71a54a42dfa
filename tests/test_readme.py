"""The examples of README.md run, in order, and print what it says they print."""

from tests import markdown


def test_examples():
    assert markdown.run('README.md') >= 1


def test_a_transformers_model_is_served():
    """The example that needs transformers is in README.md, and its output names backends of this package."""
    every = markdown.blocks((markdown.ROOT / 'README.md').read_text(encoding='utf-8'))
    (place,) = [place for place, block in enumerate(every) if block.info == 'python needs transformers>=5.24']
    assert every[place].text.count('\n') < 12
    assert every[place + 1].info == 'text output'
    served = [line.split(': ')[1] for line in every[place + 1].text.splitlines()]
    assert served == ['reference, 3 calls', 'reference, 12 calls']
