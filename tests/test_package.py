"""What the package is called, what `import fla` gives, and what a wheel of it contains."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.version import Version

import fla
from fla.utils import owners

ROOT = Path(fla.__file__).parents[1]


def test_version_differs_from_flash_linear_attention():
    assert Version(fla.__version__) >= Version('0.7')
    assert fla.__distribution__ == owners.OURS == 'fla-dispatch'


def test_import_fla_gives_its_packages_on_first_use():
    """In a fresh process. `import fla` itself imports nothing, not even torch."""
    source = """
        import sys

        import fla

        loaded = [name for name in sys.modules if name.split('.')[0] in ('fla', 'torch')]
        assert loaded == ['fla'], loaded
        assert {'backends', 'layers', 'modules', 'ops', 'utils'} <= set(dir(fla))

        from fla import ops
        assert ops is fla.ops is sys.modules['fla.ops']
        assert {'attn', 'gated_delta_rule', 'kda', 'chunk_kda'} <= set(dir(ops))
        loaded = {name for name in sys.modules if name.split('.')[0] in ('fla', 'torch')}
        assert loaded == {'fla', 'fla.ops'}, loaded

        assert fla.ops.kda.chunk_kda is fla.ops.chunk_kda
        assert fla.modules.RMSNorm(4).weight.shape == (4,)
        assert fla.layers.KimiDeltaAttention and fla.utils.assert_close and fla.backends.explain
        """
    subprocess.run([sys.executable, '-c', dedent(source)], cwd=ROOT, check=True, timeout=120)


def test_every_name_in_dir_can_be_read():
    for package in (fla, fla.backends, fla.layers, fla.modules, fla.ops, fla.utils):
        for name in dir(package):
            getattr(package, name)


def test_operations_exports_are_those_of_their_packages():
    names = {}
    exec('from fla.ops import *', names)
    found = {name for name in names if not name.startswith('_')}
    assert found == {
        'chunk_gated_delta_rule',
        'chunk_gdn',
        'chunk_kda',
        'fused_recurrent_gated_delta_rule',
        'fused_recurrent_kda',
        'parallel_attn',
    }
    packages = (fla.ops.attn, fla.ops.gated_delta_rule, fla.ops.kda)
    for name in found:
        assert names[name] is getattr(fla.ops, name)
        assert names[name] in [getattr(package, name, None) for package in packages]


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    setuptools = pytest.importorskip('setuptools', minversion='77')
    folder = tmp_path_factory.mktemp('wheel')
    for name in ('LICENSE', 'README.md', 'pyproject.toml'):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / 'fla', folder / 'fla', ignore=shutil.ignore_patterns('__pycache__'))
    command = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '--no-index', '.']
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (setuptools.__version__, done.stderr)
    (built,) = folder.glob('*.whl')
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_wheel_contains_every_file_of_the_package(wheel):
    packed = {name for name in wheel.namelist() if name.startswith('fla/')}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'fla').rglob('*.py')}
    assert packed == there | {'fla/py.typed'}


def test_wheel_metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith('.dist-info/METADATA'))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata['Name'], metadata['Version']) == (fla.__distribution__, fla.__version__)
    assert metadata['License-Expression'] == 'MIT'
    assert metadata['Description-Content-Type'] == 'text/markdown'
    assert {'Typing :: Typed', 'Programming Language :: Python :: 3.10'} <= set(metadata.get_all('Classifier'))
    assert metadata.get_all('Project-URL') is None
