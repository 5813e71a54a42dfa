"""The lint: each rule finds its mistakes, at their lines, and nothing else.

In the sources below, a line that ends in `#! rule rule` must get findings of exactly those rules; all other lines none.
"""

import re
from textwrap import dedent, indent

import pytest

from fla.backends import BaseBackend, UnknownNameError, dispatch
from fla.backends.backend.untraceable import COMPILED, findings
from fla.backends.lint import REGISTRY_RULES, RULES, SOURCE_RULES
from fla.backends.lint.linter import run
from fla.backends.observe.describe import describe

HEAD = 'from fla.backends import BackendRegistry, BaseBackend, dispatch\n'


def expected(text):
    marks = ((number, line.partition('#! ')[2]) for number, line in enumerate(text.splitlines(), 1))
    return sorted((number, rule) for number, rules in marks for rule in rules.split())


def found(targets):
    return sorted((finding.line, finding.rule) for finding in run(targets))


@pytest.fixture
def check(tmp_path):
    """Lints a source as a file and compares the findings with its marks."""

    def check(source, name='some.py'):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = HEAD + dedent(source)
        file.write_text(text, encoding='utf-8')
        assert found([str(file)]) == expected(text)
        return run([str(file)])

    return check


@pytest.fixture
def check_verifier(check):
    """Lints a backend whose verifier has the given body and then `return True, None`."""

    def check_verifier(body, head='', attributes=''):
        lines = [
            dedent(head),
            'class B(BaseBackend):',
            "    backend_type = 'b'",
            indent(dedent(attributes), '    '),
            '    def f(self, q, k=None):',
            '        return q, k',
            '    def f_verifier(self, q, k=None):',
            indent(dedent(body), '        '),
            '        return True, None',
        ]
        return check('\n'.join(lines))

    return check_verifier


def test_every_rule_is_tested():
    """Each rule marks a line of some source here, so a new rule needs a test."""
    with open(__file__, encoding='utf-8') as stream:
        marked = {rule.strip('",)\'') for line in stream for rule in line.partition('#! ')[2].split()}
    assert set(RULES) - marked == {'syntax'}, 'syntax marks no line; test_syntax covers it'
    assert not set(SOURCE_RULES) & set(REGISTRY_RULES)


# -- verifiers -------------------------------------------------------------------------------------------------------------


def test_a_clean_backend(check):
    check(
        """
        import functools
        import torch

        @functools.cache
        def _limit():
            return 128

        def _narrow(q):
            return q.shape[-1] <= _limit()

        class B(BaseBackend):
            backend_type = 'b'
            env_var = 'FLA_B'
            def is_available(cls):
                import os
                return os.environ.get('HOME') is not None
            def f(self, q, k, scale=None, cu_seqlens=None):
                print(q.data_ptr(), q.shape[0], f'{q.shape}')
                return q @ k * scale
            def f_verifier(self, q, k, cu_seqlens):
                if torch.is_grad_enabled() and q.requires_grad:
                    return False, 'inference only'
                if not q.is_cuda or cu_seqlens is not None:
                    return False, 'fixed length on CUDA only'
                if not _narrow(q):
                    return False, ('K must be at most 128, got %s', q.shape[-1])
                seen = []
                seen.append(q.dtype)
                seen[0] = k.dtype
                if not all(d == torch.bfloat16 for d in seen):
                    return False, f'dtype must be bfloat16, got {q.dtype}'
                return True, None
            def f_prefers(self, q):
                return q.shape[1] % 64 == 0, 'T is no multiple of 64'
        """
    )


@pytest.mark.parametrize('name', COMPILED)
def test_untraceable_agrees_with_the_framework(check_verifier, name):
    """The lint reads source, the framework bytecode: both report the same."""
    body = f'helper = q.{name}  #! untraceable'
    problem = check_verifier(body)[0].problem
    made = {}
    exec(f'def f_verifier(self, q, k=None):\n    {body}', made)
    assert f': {problem.removeprefix("f_verifier ")}; ' in findings(made['f_verifier'])[0]


def test_untraceable(check_verifier):
    check_verifier(
        """
        a = os.environ.get('FLA_X')  #! untraceable
        b = 'FLA_X' in variables  #! untraceable
        print(q)  #! untraceable
        logging.getLogger('fla').warning('no')  #! untraceable
        clock = time.perf_counter()  #! untraceable
        warn = q  # a name of its own
        c = warn
        if (
            q.storage_offset()  #! untraceable
            + k.data_ptr()  #! untraceable
        ):
            pass
        """,
        head='import logging, os, time\nfrom os import environ as variables',
    )


def test_untraceable_only_where_it_is_traced(check_verifier):
    body = "if os.environ.get('FLA_X'):\n    return False, f'K is {q.shape[-1]}'"
    check_verifier(body, head='import os', attributes='traceable = False')
    check_verifier(
        body.replace("'):", "'):  #! untraceable").replace("]}'", "]}'  #! formatted-size"),
        head='import os',
        attributes='traceable = True',
    )


def test_tensor_value(check_verifier):
    check_verifier(
        """
        import torch
        a = q.max().item()  #! tensor-value tensor-value
        b = bool((q == 0).any())  #! tensor-value
        c = q.tolist()  #! tensor-value
        d = torch.all(q > 0)  #! tensor-value
        e = all(x is not None for x in (q, k)), max(1, 2), any([q.is_cuda])
        """
    )


def test_formatted_size(check_verifier):
    check_verifier(
        """
        K, V = q.shape[-1], k.shape[-1]
        twice = 2 * K
        fits = K == 128
        lines = [
            f'K is {q.shape[-1]}',  #! formatted-size
            f'K is {K}',  #! formatted-size
            f'K is {twice:d}',  #! formatted-size
            'K is %s' % q.size(-1),  #! formatted-size
            'K is %s, V is %s' % (K, V),  #! formatted-size
            'K is {}'.format(q.numel()),  #! formatted-size
            'K is ' + str(q.stride()),  #! formatted-size
            f'{len(k)} sequences',  #! formatted-size
            f'{q.dtype} {q.ndim} {fits} {K == 3}',
            K % 64,
        ]
        if K != V:
            return False, ('K is %s, V is %s', K, V)
        """
    )


def test_side_effect(check_verifier):
    check_verifier(
        """
        global _count  #! side-effect
        _count = 1
        self.calls = 1  #! side-effect
        self.seen[q.dtype] = True  #! side-effect
        SEEN.append(q)  #! side-effect
        q.meta['x'] += 1  #! side-effect
        setattr(q, 'x', 1)  #! side-effect
        del self.seen[0]  #! side-effect
        mine = {}
        mine['x'] = 1
        mine.update(y=2)
        """
    )


def test_devices_in_a_verifier(check_verifier):
    check_verifier(
        """
        if q.device.type == 'cuda':  #! slow-device-type
            return False, 'no'
        if cuda.get_device_capability() < (9, 0) or torch.xpu.device_count():  #! device-query device-query
            return False, 'no'
        kind, same = q.type(), q.device == k.device
        """,
        head='import torch\nfrom torch import cuda',
    )


def test_broad_except(check_verifier):
    check_verifier(
        """
        try:
            pass
        except Exception:  #! broad-except
            pass
        try:
            pass
        except (ValueError, BaseException):  #! broad-except
            pass
        try:
            pass
        except:  #! broad-except
            pass
        try:
            pass
        except Exception:
            raise
        try:
            pass
        except ValueError:
            pass
        with contextlib.suppress(Exception):  #! broad-except
            pass
        with contextlib.suppress(ValueError):
            pass
        """,
        head='import contextlib',
    )


def test_verdict(check):
    check(
        """
        def a_verifier(q):
            if q is None:
                return True  #! verdict
            if q == 1:
                return  #! verdict
            if q == 2:
                return None  #! verdict
            if q == 3:
                return q.dtype == 4  #! verdict
            if q == 4:
                return False, None  #! verdict
            if q == 5:
                return False, 'five', 'six'  #! verdict
            if q == 6:
                return 1, None  #! verdict
            if q == 7:
                return (True, None) if q.x else False  #! verdict
            if q == 8:
                return (True, None) if q.x else (False, 'no x')
            if q == 9:
                def helper():
                    return True
                return helper(), 'no'
            return b_verifier(q)

        def b_verifier(q):  #! verdict
            if q:
                return True, None

        def c_prefers(q):
            if q:
                return True, None
            else:
                raise AssertionError

        def d_prefers(q):
            with q:
                try:
                    return True, None
                except KeyError:
                    return False, 'no key'

        def e_prefers(q):  #! verdict
            try:
                return True, None
            except KeyError:
                pass

        def f_prefers(q):
            while True:
                if q:
                    return True, None

        def g_prefers(q):
            match q:
                case 1:
                    return True, None
                case _:
                    return False, 'not 1'

        def h_prefers(q):  #! verdict
            match q:
                case 1:
                    return True, None

        async def i_verifier(q):  #! verdict
            return True, None

        def j_verifier(q):
            yield True, None  #! verdict
            return True, None
        """
    )


def test_helpers_are_checked(check):
    found = check(
        """
        def _module_helper(q):
            return q.data_ptr() % 16 == 0  #! untraceable

        def _not_called(q):
            return q.data_ptr() % 16 == 0

        class B(BaseBackend):
            backend_type = 'b'
            def _method(self, q):
                return self._deeper(q)
            def _deeper(self, q):
                return q.item()  #! tensor-value
            def f(self, q):
                return q
            def f_verifier(self, q):
                return _module_helper(q) and self._method(q), 'no'
        """
    )
    assert [f.problem.partition(')')[0] for f in found] == [
        '_module_helper (called by f_verifier',
        '_deeper (called by f_verifier',
    ]


def test_functions_given_to_dispatch(check):
    check(
        """
        def needs_cuda(q):
            return q.is_cuda  #! verdict?

        def check_f(q):
            if q.shape[0] != 1:
                raise ValueError(f'B must be 1, got {q.shape[0]}')
            print(q)  #! untraceable

        def unrelated(q):
            print(q)

        @dispatch('op', check=check_f, default_verifier=[needs_things])
        def f(q):
            return q

        def needs_things(q):
            return True  #! verdict

        @dispatch('op', default_verifier=lambda q: q.item())  #! tensor-value
        def g(q):
            return q
        """.replace('  #! verdict?', '')
    )


def test_functions_given_to_dispatch_from_another_file(library):
    library.write('checks.py', 'def check_f(q):\n    print(q)  #! untraceable\n')
    for line in ('from ..checks import check_f as it', f'from {library.name}.checks import check_f as it'):
        file = library.write('ops/op.py', f"{HEAD}{line}\n\n@dispatch('op', check=it)\ndef f(q):\n    return q\n")
        assert [f.rule for f in run([str(file.parents[1])])] == ['untraceable']


# -- methods ---------------------------------------------------------------------------------------------------------------


def test_direct_device_check(check):
    source = """
        import torch
        from torch.cuda import is_available
        HAS = is_available()  #! direct-device-check
        def new_enough():
            return torch.cuda.get_device_capability() >= (9, 0)  #! direct-device-check
        ROCM = torch.version.hip is not None  #! direct-device-check
        def wait():
            torch.cuda.synchronize()
    """
    check(source, 'backends/helpers.py')
    check(source.replace('#!', '#'), 'elsewhere/helpers.py')


def test_block_pointer(check):
    check(
        """
        import triton.language as tl
        from triton.language import make_block_ptr  #! block-pointer

        def kernel(x):
            p = tl.make_block_ptr(x)  #! block-pointer
            return tl.load(p), 'make_block_ptr'
        """
    )


def test_ignored_argument(check):
    check(
        """
        class Base(BaseBackend):
            backend_type = 'base_'
            def f_verifier(self, q, k, checked, named):
                return checked is None, 'checked must be None'

        class B(Base):
            def f(
                self,
                q,
                used,
                checked=None,
                named=None,  #! ignored-argument
                *,
                dropped=None,  #! ignored-argument
            ):
                del dropped
                return q + (lambda: used)()
            def g(self, q, k):
                return locals()
            def _private(self, q, k):
                return q
            def stub(self, q, k):
                raise NotImplementedError
            @staticmethod
            def h(
                q,  #! ignored-argument
            ):
                return 1
            def probe(self, device):
                return True

        class NoBackend:
            def f(self, q):
                return 1
        """
    )


def test_ignored_argument_needs_every_base(check):
    check(
        """
        from elsewhere import Verifiers

        class B(Verifiers, BaseBackend):
            backend_type = 'b'
            def f(self, q, k):
                return q
        """
    )


def test_swallowed_arguments(check):
    check(
        """
        class B(BaseBackend):
            backend_type = 'b'
            def f(self, q, **kwargs):  #! swallowed-arguments
                return q
            def g(self, q, *args):  #! swallowed-arguments
                return q
            def h(self, q, *args, **kwargs):
                return q(*args, **kwargs)
        """
    )


# -- files and comments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('content', 'line', 'text'),
    [(b'x = 1\ndef f(:\n', 2, 'SyntaxError'), (b'x = "\xff"\n', 1, 'SyntaxError'), (b'x = 1\0\n', 1, 'null bytes')],
)
def test_syntax(tmp_path, content, line, text):
    (tmp_path / 'broken.py').write_bytes(content)
    (tmp_path / 'fine.py').write_text('def f_verifier():\n    return True\n')
    broken, fine = run([str(tmp_path)])
    assert (broken.rule, broken.line, fine.rule) == ('syntax', line, 'verdict')
    assert text in broken.problem


def test_allowances(check):
    check(
        """
        import triton.language as tl
        a = tl.make_block_ptr  # lint: allow block-pointer because only Triton 3.8 runs this
        # lint: allow block-pointer because only Triton 3.8 runs this
        b = tl.make_block_ptr
        c = [
            # lint: allow block-pointer, verdict because of both  #! allowance
            tl.make_block_ptr,
            tl.make_block_ptr,  #! block-pointer
        ]
        text = '''
        '''; d = tl.make_block_ptr  # lint: allow block-pointer because it starts inside a line
        e = '# lint: allow block-pointer'
        """
    )


@pytest.mark.parametrize(
    ('comment', 'says'),
    [
        ('allow block-pointer', 'gives no reason'),
        ('allow block-pointer because', 'gives no reason'),
        ('allow', 'names no rule'),
        ('allow block-ponter because of me', "unknown rule 'block-ponter'. Did you mean 'block-pointer'?"),
        ('allow verdict because of me', 'verdict is not broken here'),
    ],
)
def test_allowances_that_allow_nothing(tmp_path, comment, says):
    (tmp_path / 'x.py').write_text(f'import triton.language as tl\na = tl.make_block_ptr  # lint: {comment}\n')
    found = run([str(tmp_path)])
    assert [f.rule for f in found] == ['allowance', 'block-pointer']
    assert says in found[0].problem


def test_an_allowance_of_a_registry_rule_may_be_idle(tmp_path):
    (tmp_path / 'x.py').write_text('a = 1  # lint: allow drift because of a package that is not installed here\n')
    assert run([str(tmp_path)]) == []


# -- registries ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def check_package(library):
    """Lints the library as a package and compares the findings with the marks in its files."""

    def check_package(backends=None, operation='op'):
        if backends is not None:
            library.add(operation, backends)
        found = run([library.name])
        marks = []
        for file in (library.root / library.name).rglob('*.py'):
            marks += [(file.resolve(), *mark) for mark in expected(file.read_text(encoding='utf-8'))]
        assert sorted((f.file, f.line, f.rule) for f in found) == sorted(marks)
        return found

    return check_package


def test_a_clean_package(check_package, library):
    library.write('vendor.py', 'import package_that_nobody_has\n')
    check_package(
        f"""
        class A(BaseBackend):
            backend_type, env_var = 'a', '{library.prefix}_A'
            priority = 1
            def f(self, x=None, flag=False):
                return x, flag
            def f_verifier(self, flag):
                return not flag, 'flag is not supported'

        class B(A):
            backend_type, env_var, default_enable = 'b', '{library.prefix}_B', False

        registry.register(A())
        registry.register(B())
        registry.register('{library.name}.vendor:C')
        """
    )
    assert 'package_that_nobody_has' in describe(library.dispatcher), 'unavailable, which is not a mistake'


def test_import_of_a_module(check_package, library):
    library.write('ops/op.py', f"{HEAD}\nimport package_that_nobody_has  #! import\ndispatch('op')\n")
    library.write('unrelated.py', 'import package_that_nobody_has\n')
    assert 'ModuleNotFoundError' in check_package()[0].problem


@pytest.mark.parametrize('error', ["raise SystemExit('no')", "raise OSError('no')"])
def test_import_of_the_package(check_package, library, error):
    library.write('__init__.py', f'{error}  #! import\n')
    assert check_package()[0].problem.startswith(f'importing {library.name} raises ')


@pytest.mark.parametrize('strict', [False, True])
def test_import_of_a_backends_package(library, monkeypatch, strict):
    monkeypatch.setenv(f'{library.prefix}_STRICT', str(int(strict)))
    library.add('op', "raise ValueError('broken')")
    assert {f.rule for f in run([library.name])} == {'import'}


def test_import_of_a_registered_path(check_package, library):
    library.write('late.py', 'Backend = 1 / 0\n')
    library.add(
        'op',
        f"""
        registry.register('{library.name}.late:Backend')  #! import
        registry.register('{library.name}.nowhere:Backend')  #! import
        """,
    )
    assert 'ZeroDivisionError' in check_package()[0].problem


def test_drift(check_package):
    found = check_package(
        """
        class B(BaseBackend):
            backend_type = 'b'
            def f(self, x=None, flag=True, more=None):  #! drift drift
                return x, flag, more
            def f_verifier(self, flg=False):  #! drift
                return flg, 'no'

        registry.register(B())
        """
    )
    assert [f.problem.partition('disagree: ')[2] for f in found] == [
        "default of 'flag' is True, in the public function False",
        "parameter 'more' is unknown to the public function",
        "parameter 'flg' is unknown to the public function",
    ]


def test_drift_of_a_default_verifier(check_package, library):
    library.add('op')
    library.write(
        'ops/op/__init__.py',
        f"""
        from {library.name} import dispatcher
        from fla.backends import dispatch

        def on_cpu(x=1):  #! drift
            return x is None, 'no'

        @dispatch('op', dispatcher=dispatcher, default_verifier=on_cpu)
        def f(x=None):
            return x
        """,
    )
    check_package()


def test_methods_without_a_function(check_package):
    found = check_package(
        """
        class B(BaseBackend):
            backend_type = 'b'
            def f(self, x=None, flag=False):
                return x, flag
            def ff_verifier(self, x):  #! lonely-verifier
                return x is None, 'no'
            def g(self, x):  #! unknown-function
                return x
            def g_verifier(self, x):
                return x is None, 'no'
            def _helper(self):
                return 1

        registry.register(B())
        """
    )
    assert "Did you mean 'f'?" not in found[1].remedy
    assert 'B.g, g_verifier' in found[1].problem


def test_unknown_operation(check_package, library):
    library.add('gated')
    library.add('other')
    library.write(
        'ops/other/__init__.py',
        f"""
        from {library.name} import dispatcher
        from fla.backends import dispatch

        @dispatch('gatde', dispatcher=dispatcher)  #! unknown-operation
        def f(x=None):
            return x
        """,
    )
    assert "Did you mean 'gated'?" in check_package()[0].problem


UNREACHABLE = """
class A(BaseBackend):
    backend_type = 'a'
    priority = 1
    {facts}
    def f(self, x=None, flag=False):
        return x, flag

class B(BaseBackend):
    backend_type = 'b'
    priority = 2  {mark}
    def f(self, x=None, flag=False):
        return x, flag

registry.register(A())
registry.register(B())
"""


@pytest.mark.parametrize(
    ('facts', 'reachable'),
    [
        ('', False),
        ('default_enable = False', True),
        ("env_var = 'PREFIX_A'", True),
        ("package_name = 'torch'", True),
        ("devices = ('cuda',)", True),
        ('def is_available(self): return True', True),
        ("def f_verifier(self): return False, 'no'", True),
        ("def f_prefers(self): return False, 'no'", True),
    ],
)
def test_unreachable(check_package, library, facts, reachable):
    mark = '' if reachable else '#! unreachable'
    check_package(UNREACHABLE.format(facts=facts.replace('PREFIX', library.prefix), mark=mark))


def test_unreachable_behind_the_default(check_package, library):
    source = UNREACHABLE.format(facts="def f_verifier(self): return False, 'no'", mark='#! unreachable')
    found = check_package(source.replace('priority = 2', 'priority = 200'))
    assert "'default' stands before it" in found[0].problem


def test_a_reference_behind_the_default_is_fine(check_package):
    source = UNREACHABLE.format(facts="def f_verifier(self): return False, 'no'", mark='')
    check_package(source.replace('priority = 2', "kind = 'reference'").replace("'b'", "'reference'"))


def test_unreachable_depends_on_the_policy(library, monkeypatch):
    library.add('op', UNREACHABLE.format(facts='', mark=''))
    assert [f.rule for f in run([library.name])] == ['unreachable']
    monkeypatch.setenv(f'{library.prefix}_DENY_BACKENDS', 'a')
    library.dispatcher.refresh()
    assert run([library.name]) == []


def test_toggles(check_package, library):
    check_package(
        f"""
        class A(BaseBackend):
            backend_type = 'a'
            env_var = '{library.prefix}_A'
            def f(self, x=None, flag=False):
                return x, flag

        class B(A):
            backend_type = 'b'

        class C(A):
            backend_type = 'c'
            default_enable = False  #! shared-toggle?
            env_var = '{library.prefix}_A'  #! shared-toggle

        class D(A):
            backend_type = 'd'
            env_var = 'TOGGLE_D'  #! env-prefix

        for backend in (A, B, C, D):
            registry.register(backend())
        """.replace('  #! shared-toggle?', '')
    )


def test_a_plugin_gets_findings_of_its_own_backends_only(library):
    """The plugin's backends stand in fla's registries beside others."""

    @dispatch('plugged')
    def f(x=None):
        return x

    class Foreign(BaseBackend):
        backend_type = 'foreign'

        def g(self, x):
            return x

    from fla.backends import BackendRegistry

    handle = BackendRegistry('plugged').register(Foreign())
    library.write(
        '__init__.py',
        """
        from fla.backends import BackendRegistry, BaseBackend

        class Mine(BaseBackend):
            backend_type = 'mine'
            env_var = 'FLA_MINE'
            def h(self, x):
                return x

        handle = BackendRegistry('plugged').register(Mine())
        """,
    )
    try:
        assert [(f.rule, f.line) for f in run([library.name])] == [('unknown-function', 7)]
    finally:
        handle.remove()
        library.module().handle.remove()


# -- targets ---------------------------------------------------------------------------------------------------------------


def test_targets(tmp_path, library):
    library.add('op', "class B(BaseBackend):\n    backend_type = 'b'\n    def f_verifier(self):\n        return True\n")
    file = library.root / library.name / 'ops' / 'op' / 'backends' / '__init__.py'
    for target in (str(file), str(file.parent), library.name, f'{library.name}.ops.op'):
        assert [f.rule for f in run([target])] == ['verdict'], target
    assert len(run([str(file), library.name])) == 1
    with pytest.raises(UnknownNameError, match='nowhere'):
        run(['nowhere'])


def test_hidden_directories_are_skipped(tmp_path):
    (tmp_path / '.venv').mkdir()
    (tmp_path / '.venv' / 'x.py').write_text('def f_verifier():\n    return True\n')
    assert run([str(tmp_path)]) == []
    (tmp_path / '.venv' / 'x.py').rename(tmp_path / 'x.py')
    assert [f.rule for f in run([str(tmp_path)])] == ['verdict']


def test_findings_name_file_line_rule_and_remedy():
    """The file is relative to the working directory."""
    from pathlib import Path

    from fla.backends.lint import Finding

    finding = Finding(Path.cwd() / 'a' / 'b.py', 3, 'verdict', 'returns True', 'return (True, None)')
    assert re.fullmatch(r'a.b\.py:3: verdict: returns True; return \(True, None\)', str(finding))
    assert finding.to_dict()['file'] == str(Path('a/b.py'))


def test_fla_itself_is_clean():
    assert [str(finding) for finding in run(['fla'])] == []
