"""More than 1,000 random policy files: each one loads or gives errors, and a file with errors changes nothing."""

import io
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fla.backends import default_dispatcher, explain, load_policy
from fla.backends.policy_files import PolicyFileError, read_policy
from tests.backends.toy import Toy

YAML = pytest.importorskip('ruamel.yaml').YAML
pytest.importorskip('pydantic')

Q = torch.zeros(2, 8)
TOKENS = st.sampled_from(['a', 'b', 'default', 'triton', 'reference', 'vendor', 'impl:vendor.a', 'A', 'aa', '', ' ', 3])
LISTS = st.one_of(TOKENS, st.lists(TOKENS, max_size=3))
OPS = st.sampled_from(['OP', 'OP.f', 'OP.*', '*', 'kda', 'OP.g', 'nope', 'no*', ''])
TERMS = st.sampled_from(
    [
        'q.dtype',
        'q.shape[1]',
        'q.shape[-1]',
        'q.shape[9]',
        'q.device.type',
        'scale',
        'flag',
        'x',
        'q',
        '8',
        "'cpu'",
        'float32',
    ]
)
COMPARED = st.tuples(
    TERMS, st.sampled_from(['==', '!=', '<', '>=', 'is', 'is not', '+', 'in']), TERMS | st.just('None')
).map(' '.join)
WHENS = st.recursive(
    COMPARED | TERMS,
    lambda inner: st.tuples(inner, st.sampled_from(['and', 'or']), inner).map(' '.join) | inner.map('not ({})'.format),
    max_leaves=4,
)
NUMBERS = st.one_of(st.integers(-9, 9), st.floats(), st.text(max_size=2), st.none(), st.booleans())
RULES = st.fixed_dictionaries(
    {'ops': OPS | st.lists(OPS, max_size=2), 'use': LISTS}, optional={'when': WHENS, 'priority': NUMBERS, 'wen': st.none()}
)
FIELDS = {
    'prefer': LISTS,
    'allow': LISTS,
    'deny': LISTS,
    'order': st.dictionaries(OPS, LISTS, max_size=2),
    'lock': st.dictionaries(OPS, LISTS, max_size=2),
    'boost': st.dictionaries(OPS, st.dictionaries(TOKENS.map(str), NUMBERS, max_size=2), max_size=2),
    'rules': st.lists(RULES, max_size=3),
    'on_error': st.sampled_from(['raise', 'fallback', 'panic', None]),
    'breaker': st.dictionaries(st.sampled_from(['threshold', 'cooldown', 'probe_timeout', 'x']), NUMBERS, max_size=3),
    'strict': NUMBERS,
    'require_first': NUMBERS,
    'check_values': NUMBERS,
}
MADE = st.fixed_dictionaries({}, optional={**FIELDS, 'perfer': st.just('a')})
GOOD_TOKENS = st.lists(st.sampled_from(['a', 'b', 'default']), min_size=1, max_size=3)
GOOD = st.fixed_dictionaries(
    {},
    optional={
        'prefer': GOOD_TOKENS,
        'deny': st.just(['b']),
        'order': st.fixed_dictionaries({}, optional={'OP': GOOD_TOKENS, 'OP.f': GOOD_TOKENS}),
        'boost': st.fixed_dictionaries({}, optional={'OP*': st.fixed_dictionaries({'a': st.integers(-9, 9)})}),
        'rules': st.lists(
            st.fixed_dictionaries(
                {'ops': st.sampled_from(['OP', 'OP.f', 'OP.*', '*']), 'use': GOOD_TOKENS},
                optional={'when': st.sampled_from(['flag', 'q.shape[1] >= 8', 'scale is None and not flag'])},
            ),
            max_size=3,
        ),
        'on_error': st.sampled_from(['raise', 'fallback']),
    },
)


@pytest.fixture
def case(tmp_path):
    return tmp_path / 'policy.yaml'


def as_yaml(content):
    stream = io.BytesIO()
    yaml = YAML(typ='safe', pure=True)
    yaml.default_flow_style = False
    yaml.dump(content, stream)
    return stream.getvalue().decode()


def made_toy():
    toy = Toy()
    toy.add('a', priority=1)
    toy.add('b', priority=2)
    return toy


def fuzz(path, text, toy):
    """Loads a file and checks the outcome; returns whether it is in force."""
    path.write_bytes(text.replace(b'OP', toy.op.encode()))
    before = default_dispatcher().policies.now.file, explain(toy.f, Q, Q)
    errors = None
    try:
        version = load_policy(path)
    except PolicyFileError as error:
        errors = error.errors
    if errors is not None:
        assert errors
        assert all(one.startswith(f'{path}:') for one in errors)
        assert (default_dispatcher().policies.now.file, explain(toy.f, Q, Q)) == before
        return False
    assert default_dispatcher().policies.now.file is version
    winner = explain(toy.f, Q, Q).winner
    if winner is not None:
        assert toy.ran(Q, Q) == winner
    return True


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def files(most, texts, check):
    """Checks random files; returns the distinct ones that loaded, and those that were refused."""
    found = {True: set(), False: set()}

    @settings(SETTINGS, max_examples=most)
    @given(text=texts)
    def each(text):
        found[check(text)].add(text)

    each()
    return found[True], found[False]


def test_random_structures_load_or_give_errors(case):
    """Valid and invalid keys, values and names, in any mixture."""
    loaded, refused = files(600, MADE.map(as_yaml).map(str.encode), lambda text: fuzz(case, text, made_toy()))
    assert len(loaded) > 10
    assert len(loaded) + len(refused) > 500


def test_random_valid_files_load(case):
    texts = st.tuples(GOOD, st.sampled_from([json.dumps, as_yaml])).map(lambda made: made[1](made[0]).encode())
    loaded, refused = files(600, texts, lambda text: fuzz(case, text, made_toy()))
    assert not refused
    assert len(loaded) > 500


def test_random_bytes_load_or_give_errors(case):
    texts = st.binary(max_size=60) | st.text(alphabet='{}[]:-&*!|>"\'#%@,?\n abprefer0', max_size=60).map(str.encode)
    loaded, refused = files(250, texts, lambda text: fuzz(case, text, made_toy()))
    assert len(loaded) + len(refused) > 200


def errors_of(path, text):
    path.write_text(text, encoding='utf-8')
    try:
        read_policy(path)
    except PolicyFileError as error:
        return error.errors
    return ()


def test_another_error_hides_none(case):
    """Holds for an error of form and for an unknown name."""
    toy = made_toy()

    def check(content):
        text = content.replace('OP', toy.op)
        errors = errors_of(case, text)
        for more in ('perfer: a', 'zzz: 3\nprefer: [qqq]'):
            assert set(errors) < set(errors_of(case, f'{text}{more}\n'))
        return not errors

    some = MADE.filter(bool).map(as_yaml)
    loaded, refused = files(150, some, check)
    assert len(loaded) + len(refused) > 120
