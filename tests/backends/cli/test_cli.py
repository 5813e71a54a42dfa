"""The command line: the output of each command, and its exit code."""

import json
import subprocess
import sys

import pytest

from fla.backends import Policy, default_dispatcher, freeze_dispatch, refresh, set_policy, thaw_dispatch
from fla.backends.cli.main import main
from fla.backends.lint import RULES
from fla.backends.policy.environment import VARIABLES
from tests import process
from tests.backends.toy import Toy


@pytest.fixture
def toy():
    """An operation with one backend in fla's own namespace, for the duration of the test."""
    made = Toy()
    made.add('mine', env_var='FLA_TOY_MINE', priority=7)
    yield made
    for name in [entry.name for entry in made.registry.registrations()]:
        made.registry.unregister(name)


def usage_error(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ('source', 'code', 'out', 'err'),
    [
        ('def f_verifier(q):\n    return True, None\n', 0, '', 'no findings'),
        ('def f_verifier(q):\n    return True\n', 1, 'x.py:2: verdict: f_verifier returns True; ', '1 finding'),
        (None, 2, '', "'x.py' is neither an importable package nor a path"),
    ],
)
def test_exit_codes_of_the_process(tmp_path, source, code, out, err):
    if source is not None:
        (tmp_path / 'x.py').write_text(source)
    done = process.run_module('fla.backends', 'lint', 'x.py', cwd=tmp_path)
    assert (done.returncode, done.stdout[: len(out)]) == (code, out), done.stderr
    assert bool(done.stdout) == bool(out)
    assert err in done.stderr
    assert 'Traceback' not in done.stderr


def test_a_closed_pipe_is_not_an_error(tmp_path):
    (tmp_path / 'x.py').write_text('def f_verifier(q):\n    return True\n' * 2000)
    command = f'"{sys.executable}" -m fla.backends lint x.py | head -n 1; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(['bash', '-c', command], cwd=tmp_path, capture_output=True, text=True, env=_environment())
    assert (done.returncode, done.stdout.count('\n')) == (0, 1)
    assert 'BrokenPipe' not in done.stderr


def _environment():
    import os
    from pathlib import Path

    import fla

    return {**os.environ, 'PYTHONPATH': str(Path(fla.__file__).parents[1])}


def test_lint_json(tmp_path, capsys):
    (tmp_path / 'x.py').write_text('def f_verifier(q):\n    return True\n')
    assert main(['lint', '--json', str(tmp_path)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding['line'] == 2
    assert finding['rule'] == 'verdict'
    assert finding.keys() == {'file', 'line', 'rule', 'problem', 'remedy'}
    (tmp_path / 'x.py').write_text('')
    assert main(['lint', '--json', str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_lint_rules(capsys):
    assert main(['lint', '--rules']) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith('  ')]
    assert listed == list(RULES)


def test_lint_names_the_nearest_path(tmp_path, monkeypatch, capsys):
    (tmp_path / 'kernels').mkdir()
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'kernels'?" in usage_error(capsys, 'lint', 'kernel')


def test_lint_does_not_log_what_it_finds(library, capsys):
    library.add('op', "raise ValueError('broken')")
    assert main(['lint', library.name]) == 1
    out, err = capsys.readouterr()
    assert 'ValueError: broken' in out
    assert err == '1 finding\n'


def test_lint_of_a_package_whose_parent_fails(library, capsys):
    library.write('__init__.py', "raise ValueError('broken')")
    assert main(['lint', f'{library.name}.ops']) == 1
    assert f'importing {library.name}.ops raises ValueError: broken' in capsys.readouterr().out
    assert 'neither' in usage_error(capsys, 'lint', f'{library.name}.opps')


def test_describe(toy, capsys):
    assert main(['describe', toy.op]) == 0
    out = capsys.readouterr().out
    assert f'{toy.op}.f' in out
    assert 'mine' in out
    assert 'FLA_TOY_MINE' in out
    assert "unknown operation 'nowhere'" in usage_error(capsys, 'describe', 'nowhere')


def test_validate(toy, capsys):
    assert main(['validate']) == 0
    toy.add('lonely', g_verifier=lambda self, q: (True, None))
    assert main(['validate']) == 1
    out, err = capsys.readouterr()
    assert 'g_verifier has no method g beside it' in out
    assert 'no problems' in err


def test_snapshot(toy, capsys):
    assert main(['snapshot', '--json']) == 0
    assert json.loads(capsys.readouterr().out)[toy.op]['mine']['priority'] == 7
    assert main(['snapshot']) == 0
    assert 'impl_id=vendor.mine' in capsys.readouterr().out


def test_plugins(library, monkeypatch, capsys):
    assert main(['plugins']) == 0
    assert 'no plugins' in capsys.readouterr().out
    default_dispatcher().reset()
    library.write('good.py', '__version__ = "1.2"\ndef register(registries):\n    pass\n')
    library.write('bad.py', 'raise ValueError("broken")\n')
    monkeypatch.setenv('FLA_PLUGIN_MODULES', f'{library.name}.good,{library.name}.bad')
    assert main(['plugins']) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.split() == [f'{library.name}.good', '1.2', 'FLA_PLUGIN_MODULES', 'loaded']
    assert bad.endswith('failed: ValueError: broken')


def test_env(toy, monkeypatch, capsys):
    toy.add('other', env_var='FLA_TOY_OTHER', default_enable=lambda: True)
    toy.add('off', env_var='FLA_TOY_OFF', default_enable=False)
    monkeypatch.setenv('FLA_TOY_MINE', '0')
    monkeypatch.setenv('FLA_PREFER', 'mine')
    assert main(['env']) == 0
    lines = {line.split()[0]: ' '.join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert {f'FLA_{short}' for short in VARIABLES} <= lines.keys()
    assert lines['FLA_PREFER'].startswith("policy 'mine' ")
    assert lines['FLA_STRICT'].startswith('policy (unset) boolean')
    assert lines['FLA_TOY_MINE'] == f"each call '0' boolean: switches {toy.op}.mine (unset: on)"
    assert lines['FLA_TOY_OTHER'] == f'each call (unset) boolean: switches {toy.op}.other (unset: by hardware)'
    assert lines['FLA_TOY_OFF'] == f'each call (unset) boolean: switches {toy.op}.off (unset: off)'


def test_env_warns_of_unknown_variables(monkeypatch, caplog):
    monkeypatch.setenv('FLA_STRIKT', '1')
    assert main(['env']) == 0
    assert "FLA_STRIKT is set, but nothing reads it. Did you mean 'FLA_STRICT'?" in caplog.text


def test_manifest(toy, tmp_path, capsys):
    assert main(['manifest', '--platform', 'cpu', '--platform', 'cuda']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed['selections'][f'{toy.op}.f']['any'][0]['backend'] == 'mine'
    assert main(['manifest', '--platform', 'cpu', '--platform', 'cuda', '--out', str(tmp_path / 'm.json')]) == 0
    assert json.loads((tmp_path / 'm.json').read_text()) == printed
    assert printed['sha256'] in capsys.readouterr().err
    assert main(['manifest', '--out', str(tmp_path / 'no' / 'm.json')]) == 2
    assert 'cannot write' in capsys.readouterr().err
    assert "invalid choice: 'h100'" in usage_error(capsys, 'manifest', '--platform', 'h100')


def test_policy_files_are_checked(toy, tmp_path, capsys, monkeypatch):
    pytest.importorskip('ruamel.yaml')
    pytest.importorskip('pydantic')
    good, bad = tmp_path / 'good.yaml', tmp_path / 'bad.yaml'
    good.write_text('prefer: mine')
    bad.write_text('prefer: mein\ndney: mine')
    assert main(['check', str(good)]) == 0
    assert 'no problems' in capsys.readouterr().err
    assert main(['check', str(good), str(bad), str(tmp_path / 'none.yaml')]) == 1
    out = capsys.readouterr().out
    assert f"{bad}:1: unknown backend 'mein'" in out
    assert f"{bad}:2: unknown key 'dney'" in out
    assert 'none.yaml' in out
    assert default_dispatcher().policies.now.file is None
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(good))
    assert main(['validate']) == 0
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(bad))
    capsys.readouterr()
    assert main(['validate']) == 1
    assert "bad.yaml:1: unknown backend 'mein'" in capsys.readouterr().out
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(tmp_path / 'none.yaml'))
    assert main(['validate']) == 1
    assert 'FLA_DISPATCH_CONFIG=' in capsys.readouterr().out


def test_names_in_variables_are_validated(toy, capsys, monkeypatch):
    for name, value in {'PREFER': 'mein', 'DENY_BACKENDS': 'nobody', 'PER_OP': f'{toy.op}=mein;no_such=mine'}.items():
        monkeypatch.setenv(f'FLA_{name}', value)
    refresh()
    assert main(['validate']) == 1
    out = capsys.readouterr().out
    assert "FLA_PREFER: unknown backend 'mein'. Did you mean 'mine'?" in out
    assert "FLA_DENY_BACKENDS: unknown backend 'nobody'" in out
    assert f"FLA_PER_OP: unknown backend 'mein' for '{toy.op}'" in out
    assert "FLA_PER_OP: unknown operation 'no_such'" in out


def test_usage(capsys):
    assert 'COMMAND' in usage_error(capsys)
    assert 'invalid choice' in usage_error(capsys, 'expalin')
    with pytest.raises(SystemExit) as caught:
        main(['--help'])
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    for command in ('lint', 'describe', 'validate', 'check', 'snapshot', 'plugins', 'env', 'manifest'):
        assert f'\n    {command}' in help_text


def test_commands_need_dispatch(monkeypatch, capsys):
    monkeypatch.setattr(default_dispatcher(), 'baseline', True)
    assert 'FLA_DISABLE_BACKEND_DISPATCH is set' in usage_error(capsys, 'describe')
    assert main(['env']) == 0


def test_commands_change_nothing(toy):
    """Policy and registries stay as they are, and commands work while dispatch is frozen."""
    set_policy(Policy(prefer=('mine',)))
    before = default_dispatcher().policies.state.layers
    freeze_dispatch()
    try:
        for command in (['describe'], ['validate'], ['snapshot'], ['plugins'], ['env'], ['manifest']):
            assert main(command) == 0, command
    finally:
        thaw_dispatch()
    assert default_dispatcher().policies.state.layers == before
