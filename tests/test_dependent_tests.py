"""`scripts/find_dependent_tests.py` names every test that a change can break."""

import importlib.util
import io
import os
import subprocess
import sys

import pytest

from tests.markdown import ROOT

SCRIPT = ROOT / 'scripts' / 'find_dependent_tests.py'


@pytest.fixture(scope='module')
def script():
    spec = importlib.util.spec_from_file_location('find_dependent_tests', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- a made-up tree ---------------------------------------------------------------------------------------------------------

FILES = {
    'fla/__init__.py': '',
    'fla/utils/__init__.py': '',
    'fla/ops/__init__.py': '',
    'fla/backends/__init__.py': 'from fla.backends.plan.plan import Plan\n',
    'fla/backends/__main__.py': 'from fla.backends.cli.main import main\n',
    'fla/backends/cli/__init__.py': '',
    'fla/backends/cli/main.py': 'main = 1\n',
    'fla/backends/plan/__init__.py': '',
    'fla/backends/plan/plan.py': '"""Mentions fla.ops.scan.kernels, which is prose."""\nPlan = 1\n',
    'fla/backends/lint/__init__.py': '',
    'fla/ops/scan/__init__.py': 'from .chunk import scan\n',
    'fla/ops/scan/chunk.py': (
        "from ...backends import dispatch\n@dispatch('scan')\ndef scan():\n    from fla.ops.scan.kernels import launch\n"
    ),
    'fla/ops/scan/kernels/__init__.py': '',
    'fla/ops/scan/kernels/launch.py': '',
    'fla/ops/scan/naive.py': '',
    'fla/ops/scan/backends/__init__.py': "register('fla.ops.scan.backends.vendor:Vendor', name='vendor')\n",
    'fla/ops/scan/backends/vendor.py': '',
    'fla/ops/attn/__init__.py': "from fla.backends import dispatch\ndispatch('attn')\n",
    'fla/ops/attn/backends/__init__.py': '',
    'fla/modules/__init__.py': "from fla.backends import dispatch\ndispatch('modules')\n",
    'fla/modules/norm.py': '',
    'fla/modules/backends/__init__.py': '',
    'tests/__init__.py': '',
    'tests/conftest.py': "pytest_plugins = ['tests.support.plugin']\n",
    'tests/support/plugin.py': '',
    'tests/ops/conftest.py': '',
    'tests/ops/toy.py': 'import fla.ops.scan.naive\n',
    'tests/ops/test_scan.py': 'from fla.ops import scan\n',
    'tests/ops/test_naive.py': 'def test():\n    from tests.ops import toy\n',
    'tests/ops/test_dynamic.py': "import importlib\nimportlib.import_module(f'fla.ops.attn.{name}')\n",
    'tests/ops/test_literal.py': "import importlib\nimportlib.import_module('fla.modules.norm')\n",
    'tests/test_named.py': "from fla.backends import use_backend\nuse_backend('vendor', op='scan')\n",
    'tests/test_child.py': "CODE = '''\n    from fla.ops import attn\n'''\n",
    'tests/test_fragment.py': "CODE = 'import fla.utils; %s'\n",
    'tests/test_module.py': "run('python', '-m', 'fla.backends')\n",
    'tests/test_all.py': 'from fla.backends import validate\nvalidate()\n',
    'tests/test_lint.py': 'from fla.backends.lint import run\n',
    'tests/test_walk.py': "CODE = 'import pkgutil\\nimport fla\\npkgutil.walk_packages(fla.__path__)'\n",
    'tests/test_demo.py': "DEMO = ROOT / 'examples/demo.py'\n",
    'tests/test_script.py': "SCRIPT = ROOT / 'scripts' / 'update.py'\n",
    'tests/test_docs.py': "PAGES = (ROOT / 'docs').rglob('*.md')\n",
    'tests/test_readme.py': "run('README.md')\n",
    'tests/test_alone.py': 'import fla\n',
    'examples/demo.py': 'import helper\nimport fla.modules.norm\n',
    'examples/helper.py': '',
    'scripts/update.py': "RESULTS = ROOT / 'benchmarks' / 'results'\n",
    'benchmarks/results/a.json': '{}',
    'benchmarks/speed.py': 'import fla.ops.scan\n',
    'docs/page.md': 'See `tests/test_alone.py`, and [this](../LICENSE).\n',
    'README.md': '[docs](docs/page.md)\n\n```python\nimport fla.utils\n```\n',
    'LICENSE': '',
    'Makefile': '',
    'pyproject.toml': '',
}
ALL = sorted(name for name in FILES if name.split('/')[-1].startswith('test_'))


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


IN_OPS = ['ops/test_dynamic', 'ops/test_literal', 'ops/test_naive', 'ops/test_scan']
# what is changed, and all that it is to select
SCAN = ['ops/test_naive', 'ops/test_scan', 'test_all', 'test_lint', 'test_named']
EDGES = {
    'a test itself': ('tests/test_demo.py', ['test_demo']),
    'from package import module': ('fla/ops/scan/__init__.py', SCAN),
    'relative, through another file': ('fla/ops/scan/chunk.py', SCAN),
    'in a function': ('fla/ops/scan/kernels/launch.py', SCAN),
    'backends by the name of the operation': ('fla/ops/scan/backends/__init__.py', SCAN),
    'a path of registration': ('fla/ops/scan/backends/vendor.py', SCAN),
    'support of tests': ('fla/ops/scan/naive.py', ['ops/test_naive', 'test_lint']),
    'support itself': ('tests/ops/toy.py', ['ops/test_naive']),
    'f-string': ('fla/ops/attn/backends/__init__.py', ['ops/test_dynamic', 'test_all', 'test_child', 'test_lint']),
    'a literal; a script that a test runs': ('fla/modules/norm.py', ['ops/test_literal', 'test_demo', 'test_lint']),
    'backends elsewhere': ('fla/modules/backends/__init__.py', ['ops/test_literal', 'test_all', 'test_demo', 'test_lint']),
    'code in a string': ('fla/ops/attn/__init__.py', ['ops/test_dynamic', 'test_all', 'test_child', 'test_lint']),
    'half a program; code in Markdown': ('fla/utils/__init__.py', ['test_fragment', 'test_lint', 'test_readme']),
    'python -m': ('fla/backends/cli/main.py', ['test_lint', 'test_module']),
    'beside a script': ('examples/helper.py', ['test_demo']),
    'script by parts of its path': ('scripts/update.py', ['test_script']),
    'data by parts of its path': ('benchmarks/results/a.json', ['test_script']),
    'a page': ('docs/page.md', ['test_docs']),
    'a link': ('LICENSE', ['test_docs']),
    'the readme': ('README.md', ['test_readme']),
    'a test that a page names': ('tests/test_alone.py', ['test_alone', 'test_docs']),
    'conftest of a folder': ('tests/ops/conftest.py', IN_OPS),
    'what nothing uses': ('benchmarks/speed.py', []),
}  # fmt: skip


@pytest.mark.parametrize('edge', EDGES)
def test_edges(script, tree, edge):
    changed, names = EDGES[edge]
    assert script.find([changed], tree) == expected(names)


def expected(names):
    """As paths; whatever changes in the package, `test_lint` and `test_walk` look at it."""
    return [f'tests/{name}.py' for name in [*names, *(['test_walk'] if 'test_lint' in names else [])]]


@pytest.mark.parametrize(
    'changed',
    ['tests/conftest.py', 'tests/support/plugin.py', 'pyproject.toml', 'Makefile', 'tests/data.json', 'fla/table.csv'],
)
def test_everything(script, tree, changed):
    assert script.find([changed], tree) == ALL


def test_dispatch_core(script, tree):
    """Every test that imports an operation, or the core; not those that do neither."""
    found = script.find(['fla/backends/plan/plan.py'], tree)
    without = {f'tests/test_{name}.py' for name in ('alone', 'fragment', 'script', 'docs', 'readme')}
    assert set(ALL) - set(found) == without


@pytest.mark.parametrize(
    ('gone', 'names'),
    [
        ('fla/ops/scan/naive.py', ['ops/test_naive', 'test_lint']),
        ('fla/ops/scan/backends/vendor.py', SCAN),
        ('docs/page.md', ['test_docs', 'test_readme']),  # the readme's link is broken
        ('tests/test_alone.py', ['test_docs']),
        ('tests/ops/conftest.py', IN_OPS),
        ('fla/never_there.py', ['test_lint']),
    ],
)
def test_deleted_files(script, tree, gone, names):
    (tree / gone).unlink(missing_ok=True)
    if gone == 'docs/page.md':
        (tree / 'docs/other.md').write_text('')
    assert script.find([gone], tree) == expected(names)


def test_folders_and_several_files(script, tree):
    one, two = script.find(['fla/modules/norm.py'], tree), script.find(['docs/page.md'], tree)
    assert script.find(['fla/modules/norm.py', 'docs'], tree) == sorted({*one, *two})


def test_since(script, tree):
    """Changed, new, moved and deleted files; what git ignores does not count."""

    def git(*arguments):
        identity = ['-c', 'user.name=n', '-c', 'user.email=e', '-c', 'commit.gpgsign=false']
        subprocess.run(['git', *identity, *arguments], cwd=tree, check=True, capture_output=True)

    git('init', '-q')
    (tree / '.gitignore').write_text('ignored.py\n')
    git('add', '.')
    git('commit', '-qm', 'all')
    (tree / 'fla/utils/__init__.py').write_text('changed = 1\n')
    (tree / 'fla/new.py').write_text('')
    (tree / 'fla/ignored.py').write_text('')
    git('mv', 'fla/modules/norm.py', 'fla/modules/norms.py')
    (tree / 'docs/page.md').unlink()
    changed = script.changed_since('HEAD', tree)
    assert changed == ['docs/page.md', 'fla/modules/norm.py', 'fla/modules/norms.py', 'fla/new.py', 'fla/utils/__init__.py']
    with pytest.raises(SystemExit, match='no_such_revision'):
        script.changed_since('no_such_revision', tree)


# -- this repository --------------------------------------------------------------------------------------------------------


def test_command(script, tmp_path, monkeypatch, capsys):
    """Arguments, standard input, paths from another folder; and names that are wrong."""

    def printed(*arguments):
        assert script.main(list(arguments)) == 0
        return capsys.readouterr().out

    expected = '\n'.join(script.find(['tests/ops/vendors.py'], ROOT)) + '\n'
    assert 'tests/ops/kda/test_flash_kda.py\n' in expected
    assert printed('tests/ops/vendors.py') == expected
    monkeypatch.setattr(sys, 'stdin', io.StringIO('tests/ops/vendors.py\n\n'))
    assert printed('-') == expected
    monkeypatch.chdir(ROOT / 'tests')
    assert printed('ops/vendors.py') == expected
    assert printed(str(ROOT / 'tests' / 'ops' / 'vendors.py')) == expected
    assert printed(''.join(['.editor', 'config'])) == ''  # as one string, this file would name it
    with pytest.raises(SystemExit, match='is not in'):
        script.main(['/elsewhere/x.py'])
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, '')
    assert '--since REV' in done.stderr


def test_a_vendor_backend(script):
    found = set(script.find(['fla/ops/kda/backends/flash_kda.py'], ROOT))
    assert {
        'tests/ops/kda/test_flash_kda.py',
        'tests/ops/test_delta_rules.py',
        'tests/clients/test_transformers.py',
    } <= found
    assert found.isdisjoint(
        ['tests/backends/runtime/test_agreement.py', 'tests/backends/test_smoke.py', 'tests/ops/attn/test_parallel.py']
    )


def test_the_core(script):
    """Whatever dispatches; Triton's own support and three helpers of kernels do not."""
    found = script.find(['fla/backends/plan/plan.py'], ROOT)
    dispatch = ('tests/backends/', 'tests/clients/', 'tests/layers/', 'tests/modules/', 'tests/ops/')
    left_out = set(script.find(['tests'], ROOT)) - set(found)
    without = [f'tests/ops/test_{name}.py' for name in ('compile_ahead', 'kept_launch', 'l2norm_kernel')]
    assert sorted(name for name in left_out if name.startswith(dispatch)) == without
    assert {f'tests/triton_support/test_{name}.py' for name in ('compile_only', 'interpreter', 'plugin')} <= left_out


# Python runs it in every process, those that tests start included.
RECORD = """
import atexit, os, sys

@atexit.register
def record():
    loaded = [name for name in sys.modules if name.split('.')[0] in ('fla', 'tests')]
    with open(os.environ['LOADED'], 'a') as file:
        file.writelines(f'{name}\\n' for name in loaded)
"""
SAMPLES = {
    'tests/backends/cli/test_cli.py::test_validate': 'fla.ops.kda.backends.flash_kda',
    'tests/ops/test_kernels.py::test_beta_of_zero': 'fla.ops.gated_delta_rule.kernels.backward',
    'tests/modules/test_paths.py::test_import_paths': 'fla.modules.rotary',
    'tests/ops/test_delta_rules.py::test_the_definition_is_the_product_of_its_transitions': 'fla.ops.kda.naive',
}


@pytest.mark.slow
@pytest.mark.parametrize('sample', SAMPLES)
def test_whatever_a_test_imports_selects_it(script, tmp_path, sample):
    """Asked of Python, not of the source: the modules that processes had loaded when they ended."""
    (tmp_path / 'sitecustomize.py').write_text(RECORD)
    loaded = tmp_path / 'loaded'
    environment = {**os.environ, 'LOADED': str(loaded), 'PYTHONPATH': str(tmp_path)}
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'not gpu and not slow', sample]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tree = script.Tree(ROOT)
    names = {name for name in loaded.read_text().split() if name in tree.modules}
    assert {SAMPLES[sample], 'tests.triton_support.plugin'} <= names, 'not everything was recorded'
    test = sample.split('::')[0]
    missed = [name for name in sorted(names) if test not in tree.dependents([tree.modules[name]])]
    assert not missed
