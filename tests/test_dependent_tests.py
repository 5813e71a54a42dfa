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
    'fla/utils/__init__.py': 'def size(): ...\n',
    'fla/ops/__init__.py': '',
    'fla/backends/__init__.py': (
        'from fla.backends.plan.plan import Plan, dispatch\nfrom fla.backends.plan.stack import Stack\n'
        'def validate(): ...\ndef use_backend(): ...\nif TYPE_CHECKING:\n    from fla.backends.tuning import measure\n'
        "def __getattr__(name): return load(f'{__name__}.{LAZY[name]}')\n"
    ),
    'fla/backends/__main__.py': 'from fla.backends.cli.main import main\nmain()\n',
    'fla/backends/cli/__init__.py': '',
    'fla/backends/cli/main.py': 'main = 1\n',
    'fla/backends/lint/__init__.py': 'def run(): ...\n',
    'fla/backends/plan/__init__.py': '',
    'fla/backends/plan/plan.py': (
        '"""Mentions fla.ops.scan.kernels, which is prose."""\nfrom fla.backends.plan.stack import Stack\n'
        "Plan = 1\ndef dispatch(name: Stack):\n    raise KeyError(f'fla.ops.{name} is not a module')\n"
    ),
    'fla/backends/plan/stack.py': (
        'from fla.backends.plan import files\nclass Stack:\n    size = 1\n    def read_file(self): return files.read()\n'
    ),
    'fla/backends/plan/files.py': 'def read(): ...\n',
    'fla/backends/tuning.py': 'def measure(): ...\n',
    'fla/ops/scan/__init__.py': 'from .chunk import scan\nfrom .gate import gate\n',
    'fla/ops/scan/chunk.py': (
        "from ...backends import dispatch\n@dispatch('scan')\ndef scan():\n"
        '    from fla.ops.scan.kernels.launch import launch\n    launch()\n'
    ),
    'fla/ops/scan/gate.py': 'def gate(): ...\n',
    'fla/ops/scan/kernels/__init__.py': '',
    'fla/ops/scan/kernels/launch.py': 'def launch(): ...\n',
    'fla/ops/scan/naive.py': 'def step(): ...\n',
    'fla/ops/scan/backends/__init__.py': "register('fla.ops.scan.backends.vendor:Vendor', name='vendor')\n",
    'fla/ops/scan/backends/vendor.py': 'class Vendor:\n    def scan(self): ...\n',
    'fla/ops/attn/__init__.py': "from fla.backends import dispatch\n@dispatch('attn')\ndef attend(): ...\n",
    'fla/ops/attn/backends/__init__.py': '',
    'fla/modules/__init__.py': '',
    'fla/modules/norm.py': "from fla.backends import dispatch\n@dispatch('modules')\ndef norm(): ...\n",
    'fla/modules/backends/__init__.py': '',
    'tests/__init__.py': '',
    'tests/conftest.py': "pytest_plugins = ['tests.support.plugin']\n",
    'tests/support/plugin.py': '',
    'tests/ops/conftest.py': '',
    'tests/ops/toy.py': 'import fla.ops.scan.naive\ndef go(): fla.ops.scan.naive.step()\ndef rest(): ...\n',
    'tests/ops/test_scan.py': 'from fla.ops import scan\nscan.scan()\n',
    'tests/ops/test_naive.py': 'def test():\n    from tests.ops import toy\n    toy.go()\n',
    'tests/ops/test_gate.py': 'from fla.ops.scan import gate\nfrom tests.ops.toy import rest\ngate(), rest()\n',
    'tests/ops/test_dynamic.py': "import importlib\nimportlib.import_module(f'fla.ops.attn.{name}')\n",
    'tests/ops/test_literal.py': "import importlib\nimportlib.import_module('fla.modules.norm')\n",
    'tests/ops/test_value.py': 'from fla.ops.scan import kernels\nfrom fla.ops import scan as package\nlook_at(package)\n',
    'tests/ops/test_star.py': 'from fla.ops.scan import *\ngate()\n',
    'tests/test_named.py': "from fla.backends import use_backend\nuse_backend('vendor', op='scan')\n",
    'tests/test_child.py': "CODE = '''\n    from fla.ops import attn\n    attn.attend()\n'''\n",
    'tests/test_fragment.py': "CODE = 'import fla.utils; %s'\n",
    'tests/test_module.py': "run('python', '-m', 'fla.backends')\n",
    'tests/test_method.py': 'from fla.backends import Stack\nStack().read_file()\n',
    'tests/test_no_method.py': 'from fla.backends import Stack\nStack().size\n',
    'tests/test_lazy.py': 'from fla.backends import measure\nmeasure()\n',
    'tests/test_all.py': 'from fla.backends import validate\nvalidate()\n',
    'tests/test_lint.py': 'from fla.backends.lint import run\nrun()\n',
    'tests/test_walk.py': "CODE = 'import pkgutil\\nimport fla\\npkgutil.walk_packages(fla.__path__)'\n",
    'tests/test_demo.py': "DEMO = ROOT / 'examples/demo.py'\n",
    'tests/test_script.py': "SCRIPT = ROOT / 'scripts' / 'update.py'\n",
    'tests/test_docs.py': "PAGES = (ROOT / 'docs').rglob('*.md')\n",
    'tests/test_readme.py': "run('README.md')\n",
    'tests/test_alone.py': 'import fla\n',
    'examples/demo.py': 'import helper\nimport fla.modules.norm\nfla.modules.norm.norm(helper)\n',
    'examples/helper.py': '',
    'scripts/update.py': "RESULTS = ROOT / 'benchmarks' / 'results'\n",
    'benchmarks/results/a.json': '{}',
    'benchmarks/speed.py': 'import fla.ops.scan\n',
    'docs/page.md': 'See `tests/test_alone.py`, and [this](../LICENSE).\n',
    'README.md': '[docs](docs/page.md)\n\n```python\nimport fla.utils\nfla.utils.size()\n```\n',
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


IN_OPS = [f'ops/test_{name}' for name in ('dynamic', 'gate', 'literal', 'naive', 'scan', 'star', 'value')]
# case → what changes, and all tests that it must select
SCAN = ['ops/test_scan', 'ops/test_star', 'ops/test_value', 'test_all', 'test_lint', 'test_named']
IN_STACK = [f'test_{name}' for name in ('lint', 'method', 'module', 'no_method')]
EDGES = {
    'a test itself': ('tests/test_demo.py', ['test_demo']),
    'a package that re-exports': ('fla/ops/scan/__init__.py', sorted([*SCAN, 'ops/test_gate', 'ops/test_naive'])),
    'a name behind a relative import': ('fla/ops/scan/chunk.py', SCAN),
    'another name of the package': ('fla/ops/scan/gate.py', ['ops/test_gate', *SCAN[1:]]),
    'in a function': ('fla/ops/scan/kernels/launch.py', [name for name in SCAN if name != 'test_all']),
    'backends by the name of the operation': ('fla/ops/scan/backends/__init__.py', SCAN),
    'a path of registration': ('fla/ops/scan/backends/vendor.py', SCAN),
    'support of tests': ('fla/ops/scan/naive.py', ['ops/test_naive', 'test_lint']),
    'support itself': ('tests/ops/toy.py', ['ops/test_gate', 'ops/test_naive']),
    'f-string': ('fla/ops/attn/backends/__init__.py', ['ops/test_dynamic', 'test_all', 'test_child', 'test_lint']),
    'a literal; a script that a test runs': ('fla/modules/norm.py', ['ops/test_literal', 'test_demo', 'test_lint']),
    'backends elsewhere': ('fla/modules/backends/__init__.py', ['ops/test_literal', 'test_all', 'test_demo', 'test_lint']),
    'code in a string': ('fla/ops/attn/__init__.py', ['ops/test_dynamic', 'test_all', 'test_child', 'test_lint']),
    'half a program; code in Markdown': ('fla/utils/__init__.py', ['test_fragment', 'test_lint', 'test_readme']),
    'python -m': ('fla/backends/cli/main.py', ['test_lint', 'test_module']),
    'a method that is named': ('fla/backends/plan/files.py', ['test_lint', 'test_method']),
    'a class, but no annotation': ('fla/backends/plan/stack.py', IN_STACK),
    'a lazy name': ('fla/backends/tuning.py', ['test_lazy', 'test_lint', 'test_module']),
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
    """As paths. `test_lint` and `test_walk` look at the whole package."""
    return [f'tests/{name}.py' for name in [*names, *(['test_walk'] if 'test_lint' in names else [])]]


@pytest.mark.parametrize(
    'changed',
    ['tests/conftest.py', 'tests/support/plugin.py', 'pyproject.toml', 'Makefile', 'tests/data.json', 'fla/table.csv'],
)
def test_everything(script, tree, changed):
    assert script.find([changed], tree) == ALL


def test_dispatch_core(script, tree):
    """Selects every test of an operation, and of the framework's dispatch; not the others."""
    found = script.find(['fla/backends/plan/plan.py'], tree)
    others = ['alone', 'docs', 'fragment', 'lazy', 'method', 'no_method', 'readme', 'script']
    without = {*(f'tests/test_{name}.py' for name in others), 'tests/ops/test_gate.py', 'tests/ops/test_naive.py'}
    assert set(ALL) - set(found) == without


@pytest.mark.parametrize(
    ('gone', 'names'),
    [
        ('fla/ops/scan/naive.py', ['ops/test_naive', 'test_lint']),
        ('fla/ops/scan/backends/vendor.py', SCAN),
        ('fla/ops/scan/gate.py', ['ops/test_gate', *SCAN[1:]]),
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


@pytest.fixture(scope='module')
def here(script):
    return script.Tree(ROOT)


def test_command(script, here, tmp_path, monkeypatch, capsys):
    """Arguments, standard input, paths from another folder, wrong names."""

    def printed(*arguments):
        assert script.main(list(arguments)) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(script, 'Tree', lambda root, gone: here)
    expected = '\n'.join(here.dependents(['tests/ops/vendors.py'])) + '\n'
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


def test_a_vendor_backend(here):
    found = set(here.dependents(['fla/ops/kda/backends/flash_kda.py']))
    assert {
        'tests/ops/kda/test_flash_kda.py',
        'tests/ops/test_delta_rules.py',
        'tests/clients/test_transformers.py',
    } <= found
    assert found.isdisjoint(
        ['tests/backends/runtime/test_agreement.py', 'tests/backends/test_smoke.py', 'tests/ops/attn/test_parallel.py']
    )


def test_a_leaf_of_the_framework(here):
    """The door re-exports `measure`, and still only tests that use it depend on it."""
    found = here.dependents(['fla/backends/tuning/measuring.py'])
    assert 'tests/backends/tuning/test_measure.py' in found
    assert len(found) < len(here.tests) / 4


def test_the_core(here):
    """Selects all tests of dispatched functions; not those of Triton's support, nor those that launch kernels directly."""
    found = here.dependents(['fla/backends/plan/plan.py'])
    dispatch = ('tests/backends/', 'tests/clients/', 'tests/layers/', 'tests/modules/', 'tests/ops/')
    left_out = here.tests - set(found)
    names = ('launch/', 'attn/test_kernels_compile', 'test_l2norm_kernel', 'test_utils')
    helpers = tuple(f'tests/ops/{name}' for name in names)
    assert not [name for name in left_out if name.startswith(dispatch) and not name.startswith(helpers)]
    assert {f'tests/triton_support/test_{name}.py' for name in ('compile_only', 'interpreter', 'plugin')} <= left_out


# Python runs it in every process, those that tests start included. A function that runs while a module is imported does not
# count: a file that is imported but not used does not select a test.
RECORD = """
import atexit, os, sys, threading

ran, depth = set(), threading.local()
root = os.environ['ROOT'] + '/'

def profile(frame, event, argument):
    code = frame.f_code
    if event not in ('call', 'return') or not code.co_filename.startswith((root + 'fla/', root + 'tests/')):
        return
    if code.co_name == '<module>' and frame.f_globals['__name__'] != '__main__':
        depth.imports = getattr(depth, 'imports', 0) + (1 if event == 'call' else -1)
    elif not getattr(depth, 'imports', 0):
        ran.add(code.co_filename)

sys.setprofile(profile)
threading.setprofile(profile)

@atexit.register
def record():
    with open(os.environ['RAN'], 'a') as file:
        file.writelines(f'{name}\\n' for name in ran)
"""
SAMPLES = {
    'tests/backends/cli/test_cli.py::test_validate': 'fla/backends/cli/main.py',
    'tests/backends/tuning/test_measure.py': 'fla/backends/tuning/measuring.py',
    'tests/backends/policy_files/test_load.py': 'fla/backends/policy_files/load.py',
    'tests/backends/fallback/test_failure.py': 'fla/backends/fallback/failure.py',
    'tests/ops/test_kernels.py::test_beta_of_zero': 'fla/ops/gated_delta_rule/kernels/launch.py',
    'tests/ops/test_delta_rules.py::test_the_definition_is_the_product_of_its_transitions': 'fla/ops/kda/naive.py',
    'tests/ops/attn/test_parallel.py': 'fla/ops/attn/backends/reference.py',
    'tests/modules/test_norms.py': 'fla/modules/backends/reference/norms.py',
    'tests/layers/test_keys.py': 'fla/layers/keys.py',
    'tests/test_served.py': 'fla/modules/kernels/linear_cross_entropy.py',
}


@pytest.mark.slow
@pytest.mark.parametrize('sample', SAMPLES)
def test_each_function_that_runs_selects_its_test(here, tmp_path, sample):
    """The profiler's word, not the source's: the files whose functions ran, in all processes of a test."""
    (tmp_path / 'sitecustomize.py').write_text(RECORD)
    ran = tmp_path / 'ran'
    environment = {**os.environ, 'RAN': str(ran), 'ROOT': str(ROOT), 'PYTHONPATH': str(tmp_path)}
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'not gpu and not slow', sample]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {os.path.relpath(name, ROOT) for name in ran.read_text().split()}
    assert {SAMPLES[sample], 'tests/triton_support/plugin.py'} <= names, 'not everything was recorded'
    used = here.used(sample.split('::')[0])
    assert sorted(names - used) == []
