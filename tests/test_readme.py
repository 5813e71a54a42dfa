"""The examples of README.md run, in order, and print what it says they print."""

import json

from tests import markdown

TEXT = (markdown.ROOT / 'README.md').read_text(encoding='utf-8')


def test_examples():
    assert markdown.run('README.md') >= 1


def test_a_transformers_model_is_served():
    """The example that needs transformers is in README.md, and its output names backends of this package."""
    every = markdown.blocks(TEXT)
    (place,) = [place for place, block in enumerate(every) if block.info == 'python needs transformers>=5.24']
    assert every[place].text.count('\n') < 12
    assert every[place + 1].info == 'text output'
    served = [line.split(': ')[1] for line in every[place + 1].text.splitlines()]
    assert served == ['reference, 3 calls', 'reference, 12 calls']


def test_first_calls_are_those_of_the_results():
    result = json.loads((markdown.ROOT / 'benchmarks/results/qwen3_next.json').read_text(encoding='utf-8'))
    seconds = {
        row['backend']: f'{row["first_s"]:.2g} s'
        for row in result['rows']
        if (row['phase'], row['shape'], row['modules']) == ('prefill', [1, 8192], False)
    }
    text = ' '.join(TEXT.split())
    assert f'the first prefill of Qwen3-Next takes {seconds["this package"]}, with' in text
    assert f'flash-linear-attention 0.6.0 {seconds["flash-linear-attention"]}.' in text
