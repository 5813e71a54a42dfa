"""Errors name another distribution with files under `fla/`; calls that succeed never look for one."""

import shutil
import sys
from pathlib import Path

import pytest

import fla
from fla.backends import NoBackendError, UnknownNameError, default_dispatcher, dispatch, validate
from fla.backends.cli.main import main
from fla.utils import owners
from tests import process

SOURCE = Path(fla.__file__).parent
THEIRS = 'fla-core 0.6.0 (installed at '


def distribution(folder, name='fla-core', version='0.6.0', *, record=(), top_level=None, metadata=True):
    """Write the metadata of an installed distribution. `record` lists its files, or is the bytes of a broken list."""
    info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir(parents=True)
    if metadata:
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
    if isinstance(record, bytes):
        (info / 'RECORD').write_bytes(record)
    elif record is not None:
        (info / 'RECORD').write_text(''.join(f'{file},sha256=abc,12\n' for file in [f'{info.name}/METADATA', *record]))
    if top_level is not None:
        (info / 'top_level.txt').write_text(f'{top_level}\n')


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder on sys.path for installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


SHAPES = {
    'owns __init__': ({'record': ['fla/__init__.py', 'fla/ops/gla/chunk.py']}, True),
    'owns other files': ({'name': 'kernels-of-mine', 'record': ['fla/ops/gla/chunk.py']}, True),
    'part of a namespace': ({'name': 'fla-extra', 'record': ['fla/extra/thing.py'], 'top_level': 'fla'}, True),
    'editable': ({'name': 'their-fork', 'record': ['__editable__.their_fork-0.6.0.pth'], 'top_level': 'fla'}, True),
    'no record': ({'name': 'Flash_Linear.Attention', 'record': None}, True),
    'broken record': ({'record': b'\xff\xfe\x00'}, True),
    'broken record of another': ({'name': 'other', 'record': b'\xff\xfe\x00'}, False),
    'record that is not a table': ({'name': 'other', 'record': b'"fla,\n\n,,,,\x00'}, False),
    'without metadata': ({'name': 'other', 'metadata': False, 'record': ['fla/x.py']}, False),
    'names that look alike': ({'name': 'flax', 'record': ['flax/fla/x.py', 'fla.py'], 'top_level': 'flax'}, False),
    'this one': ({'name': 'fla-dispatch', 'record': ['fla/__init__.py'], 'top_level': 'fla'}, False),
    'this one, spelled otherwise': ({'name': 'FLA_dispatch', 'record': ['fla/__init__.py']}, False),
}  # fmt: skip


@pytest.mark.parametrize('shape', SHAPES)
def test_shapes(beside, shape):
    options, counts = SHAPES[shape]
    distribution(beside, **options)
    found = owners.other_owners()
    assert [(owner.name, owner.version, Path(owner.where)) for owner in found] == (
        [(options.get('name', 'fla-core'), '0.6.0', beside)] if counts else []
    )
    assert (owners.conflict() is not None) == counts


def test_this_installation_has_one_owner():
    """Although an editable installation has metadata twice: installed, and beside the source."""
    assert owners.conflict() is None


def test_the_sentence(beside, tmp_path_factory, monkeypatch):
    distribution(beside, record=['fla/__init__.py'])
    assert owners.conflict() == (
        f'files under fla/ also belong to the distribution fla-core 0.6.0 (installed at {beside}); uninstall it: pip '
        'uninstall fla-core; then install fla-dispatch again, whose files may be overwritten or gone'
    )
    second = tmp_path_factory.mktemp('second')
    distribution(second, 'flash-linear-attention', record=['fla/layers/gla.py'])
    monkeypatch.syspath_prepend(str(second))
    text = owners.conflict()
    assert 'distributions flash-linear-attention 0.6.0' in text
    assert 'uninstall them: pip uninstall flash-linear-attention fla-core;' in text


# -- errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('package', ['fla', 'fla.ops', 'fla.modules', 'fla.layers', 'fla.utils'])
def test_names_that_only_the_other_has(beside, package):
    code = f'from {package} import chunk_gla'
    with pytest.raises(ImportError) as caught:
        exec(code)
    assert 'also belong' not in str(caught.value)
    distribution(beside, record=['fla/ops/gla/__init__.py'])
    sys.path_importer_cache.clear()
    owners._owners.cache_clear()
    with pytest.raises(ImportError) as caught:
        exec(code)
    assert f"cannot import name 'chunk_gla' from '{package}'" in str(caught.value)
    assert THEIRS in str(caught.value)
    module = sys.modules[package]
    assert not hasattr(module, 'chunk_gla')
    assert getattr(module, '_private', None) is None
    with pytest.raises(AttributeError, match='fla-core'):
        module.chunk_gla  # noqa: B018


def test_submodules_are_imported_all_the_same(beside):
    distribution(beside, record=['fla/ops/gla/__init__.py'])
    code = 'from fla import layers, modules, ops, utils; from fla.ops import attn, gated_delta_rule, kda'
    done = child(code, SOURCE.parent, PYTHONPATH=str(beside))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh():
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()


def test_errors_of_dispatch(beside, fresh):
    distribution(beside, record=['fla/ops/gla/__init__.py'])

    @dispatch('kda', default_verifier=lambda x: (False, 'never'))
    def never_served(x):
        return x

    with pytest.raises(NoBackendError) as caught:
        never_served(1)
    assert 'never' in str(caught.value)
    assert THEIRS in str(caught.value)

    @dispatch('operation_that_only_the_other_has')
    def unknown(x):
        return x

    with pytest.raises(UnknownNameError) as caught:
        unknown(1)
    assert THEIRS in str(caught.value)


def test_backends_that_cannot_be_imported(beside, fresh, monkeypatch):
    """A package of backends, and a backend that is registered by its path."""
    package = beside / 'madeup_for_owners'
    for name, text in {
        '__init__': '',
        'ops/__init__': '',
        'ops/one/__init__': '',
        'ops/one/backends/__init__': 'from fla.backends.plan.plan import gone',
        'ops/two/__init__': '',
        'ops/two/backends/__init__': 'from fla.backends import BackendRegistry\nimport madeup_for_owners\n'
        'registry = BackendRegistry("two", madeup_for_owners.dispatcher)\n'
        'registry.register("madeup_for_owners.ops.two.backends.b:B", name="b")\n',
        'ops/two/backends/b': 'from fla.ops import chunk_gla',
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f'{name}.py').write_text(text)
    distribution(beside, record=['fla/ops/gla/__init__.py'])
    import madeup_for_owners

    from fla.backends import Dispatcher

    madeup_for_owners.dispatcher = Dispatcher('madeup_for_owners.ops', 'MADEUP')
    madeup_for_owners.dispatcher.discovery.load_all()
    assert THEIRS in madeup_for_owners.dispatcher.discovery.errors['one']
    (entry,) = madeup_for_owners.dispatcher.registries['two'].registrations()
    assert THEIRS in entry.error


def test_command_line_and_validate(beside, fresh, capsys):
    assert main(['env']) == 0
    assert 'no other distribution owns files under fla/' in capsys.readouterr().out
    assert not validate()
    distribution(beside, record=['fla/ops/gla/__init__.py'])
    sys.path_importer_cache.clear()
    owners._owners.cache_clear()
    assert main(['env']) == 1
    assert THEIRS in capsys.readouterr().out
    assert [THEIRS in problem for problem in validate()] == [True]


# -- whole processes --------------------------------------------------------------------------------------------------------


def child(code, folder, **environment):
    """Runs code in a process that finds packages in a folder first."""
    return process.run(code, cwd=folder, **{'PYTHONPATH': str(folder), **environment})


def test_calls_that_succeed_read_no_metadata():
    done = child(
        """
        import torch
        import fla
        from fla.ops import kda
        from fla.layers import KimiDeltaAttention
        from fla.backends import explain
        x = torch.ones(1, 2, 1, 4)
        kda.chunk_kda(x, x, x, -x, x[..., 0])
        explain(kda.chunk_kda, x, x, x, -x, x[..., 0])
        from fla.utils import owners
        print(owners._owners.cache_info().misses)
        """,
        SOURCE.parent,
    )
    assert (done.returncode, done.stdout) == (0, '0\n'), done.stderr


@pytest.fixture
def installed(tmp_path):
    """This package and the other one, in one folder."""
    shutil.copytree(SOURCE, tmp_path / 'fla', ignore=shutil.ignore_patterns('__pycache__'))
    distribution(tmp_path, record=['fla/__init__.py', 'fla/ops/__init__.py', 'fla/ops/gla/__init__.py'])
    theirs = tmp_path / 'fla' / 'ops' / 'gla' / '__init__.py'
    theirs.parent.mkdir()
    theirs.write_text('from fla.utils import input_guard\n')
    return tmp_path


@pytest.mark.parametrize('overwritten', [(), ('fla/__init__.py',), ('fla/__init__.py', 'fla/ops/__init__.py')], ids=len)
def test_one_overwrites_the_other(installed, overwritten):
    """`import fla` works with files of either package, and theirs that need an overwritten file say what happened."""
    for name in overwritten:
        (installed / name).write_text('__version__ = "0.6.0 of theirs"\n')
    done = child(
        """
        import fla
        import fla.ops
        import fla.ops.kda
        try:
            import fla.ops.gla
        except ImportError as error:
            print(error)
        """,
        installed,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot import name 'input_guard' from 'fla.utils'" in done.stdout
    assert f'fla-core 0.6.0 (installed at {installed})' in done.stdout
