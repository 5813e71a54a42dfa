"""`make demo` trains, writes, compares and reports, and fails if one of its claims is false."""

import io
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fla
from examples.language_model import console, data, report
from examples.language_model.__main__ import tracing
from examples.language_model.generate import compare, generate, prefill
from examples.language_model.model import MIXERS, Config, LanguageModel
from examples.language_model.report import Call, Calls, Difference, Row, difference
from examples.language_model.train import WARMUP, Settings, Step, rate, train
from tests import process

FUNCTIONS = {
    'parallel_attn': 'sdpa',
    'chunk_gated_delta_rule': 'reference',
    'fused_recurrent_gated_delta_rule': 'reference',
    'chunk_kda': 'reference',
    'fused_recurrent_kda': 'reference',
    'causal_conv1d': 'reference',
    'causal_conv1d_update': 'reference',
    'rms_norm': 'reference',
    'rms_norm_gated': 'reference',
    'rotary_embedding': 'reference',
    'swiglu': 'reference',
}

SETTINGS = Settings(torch.device('cpu'), torch.float32, 1.0, 4, batch=2, length=32, learning_rate=1e-2)


def demo(*arguments: str, device: str | None = 'cpu', **environment: str) -> subprocess.CompletedProcess[str]:
    return process.run_module(
        'examples.language_model', *(['--device', device] if device else []), *arguments, **environment
    )


# -- the whole demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_succeeds_on_a_gpu():
    """It finds the GPU by itself, and the kernels serve every function but attention."""
    done = demo('--seconds', '10', device=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'^device: NVIDIA .*, bfloat16', done.stdout, re.MULTILINE)
    assert 'Every claim holds.' in done.stdout
    served = dict(re.findall(r'^  (\w+) +(\w+) ', done.stdout.split('served by')[1], re.MULTILINE))
    assert served == {name: 'sdpa' if name == 'parallel_attn' else 'default' for name in FUNCTIONS}


@pytest.mark.slow
def test_succeeds():
    done = demo('--seconds', '3')
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ''
    assert 'Every claim holds.' in done.stdout
    assert 'FALSE' not in done.stdout
    assert re.search(r'100%  step \d+ .* bytes/s  0:00 left', done.stdout)

    start, end = map(float, re.search(r'ok +the loss falls: (\S+) -> (\S+) nats', done.stdout).groups())
    assert start == pytest.approx(5.55, abs=0.01)
    assert end < start

    row = r'^  (\w+) +(\w+) +(?:\d+|-) +(?:\d+|-) +(?:\d+|-) +(\d\.\de-\d\d)  (\d\.\de-\d\d \w+|-)$'
    rows = re.findall(row, done.stdout, re.MULTILINE)
    assert {function: backend for function, backend, _, _ in rows} == FUNCTIONS
    assert all(float(outputs) > 0 for _, _, outputs, _ in rows)
    assert "not default: runs on cuda, rocm, xpu; 'q' is on cpu" in done.stdout


@pytest.mark.slow
def test_wrong_backends_are_false_claims(tmp_path):
    """A backend with a state that is 1 % off, and one with a gradient that is a tenth too small."""
    (tmp_path / 'wrong.py').write_text(
        textwrap.dedent("""
        from fla.backends import BaseBackend
        from fla.ops.gated_delta_rule.backends.reference import GatedDeltaRuleReference
        from fla.ops.kda.backends.reference import KDAReference


        class WrongState(BaseBackend):
            backend_type, priority = 'wrong_state', 1

            def fused_recurrent_gated_delta_rule(
                self, q, k, v, g=None, beta=None, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, *, use_gate_in_kernel=False, A_log=None,
                dt_bias=None,
            ):
                arguments = {name: value for name, value in locals().items() if name != 'self'}
                o, final = GatedDeltaRuleReference().fused_recurrent_gated_delta_rule(**arguments)
                return o, final * 1.01


        class WrongGradient(BaseBackend):
            backend_type, priority = 'wrong_gradient', 1

            def chunk_kda(
                self, q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, *, A_log=None, dt_bias=None,
            ):
                beta = 0.9 * beta + 0.1 * beta.detach()
                arguments = {name: value for name, value in locals().items() if name != 'self'}
                return KDAReference().chunk_kda(**arguments)


        def register(registries):
            registries('gated_delta_rule').register(WrongState())
            registries('kda').register(WrongGradient())
        """)
    )
    done = demo('--steps', '2', FLA_PLUGIN_MODULES='wrong', PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'Not every claim holds.' in done.stdout
    assert re.search(r'^FALSE greedy: logits of prefill and of 255 decode steps differ', done.stdout, re.MULTILINE)
    assert ', except for gated_delta_rule.fused_recurrent_gated_delta_rule, kda.chunk_kda\n' in done.stdout


@pytest.mark.parametrize(
    ('environment', 'arguments', 'status', 'text'),
    [
        ({'FLA_DISABLE_BACKEND_DISPATCH': '1'}, [], 1, 'FLA_DISABLE_BACKEND_DISPATCH is set: nothing is dispatched'),
        ({'FLA_DENY_BACKENDS': 'reference'}, [], 1, 'no backend served a call'),
        ({}, ['--seconds', '0'], 2, '--seconds must be above 0'),
        ({}, ['--device', 'banana'], 2, '--device'),
    ],
)
def test_the_demo_says_why_it_cannot_run(environment, arguments, status, text):
    done = demo(*arguments, **environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert text in done.stdout + done.stderr
    assert 'Traceback' not in done.stderr


# -- text -------------------------------------------------------------------------------------------------------------------


def test_training_and_held_out_files_are_disjoint():
    text, held_out = data.source_text()
    package = set(Path(fla.__file__).parent.rglob('*.py'))
    assert not set(text.files) & set(held_out.files)
    assert set(text.files) | set(held_out.files) == package
    assert held_out.files
    for part in (text, held_out):
        assert bytes(part.ids.tolist()) == b'\n'.join(path.read_bytes() for path in part.files)


def test_batches_reach_every_byte():
    seen = set()
    for batch, _ in zip(data.batches(torch.arange(20), 4, 5, torch.Generator().manual_seed(0)), range(50), strict=False):
        assert batch.shape == (4, 6)
        assert (batch.diff() == 1).all()
        seen.update(batch.flatten().tolist())
    assert seen == set(range(20))


@pytest.mark.parametrize(('size', 'length', 'most', 'count'), [(100, 9, 4, 4), (100, 9, 99, 10), (10, 9, 3, 1)])
def test_windows_do_not_overlap(size, length, most, count):
    found = data.windows(torch.arange(size), length, most)
    assert found.shape == (count, length + 1)
    assert len(found.unique()) == found.numel()


def test_entropy():
    assert data.entropy(torch.arange(256)) == pytest.approx(8)
    assert data.entropy(torch.zeros(9, dtype=torch.long)) == pytest.approx(0)


def test_a_prompt_is_whole_lines():
    ids = torch.tensor(list(b'one\ntwo\nthree'))
    assert bytes(data.whole_lines(ids, 10).tolist()) == b'one\ntwo\n'
    assert bytes(data.whole_lines(ids, 3).tolist()) == b'one'


# -- model, training, decoding ----------------------------------------------------------------------------------------------


def small_model() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(Config(hidden_size=32, num_heads=2, head_dim=16))
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model.eval()


@pytest.fixture(scope='module')
def model():
    return small_model()


PROMPT = torch.arange(70, 110)[None]


def test_every_model_has_every_mixer():
    for device in ('cpu', 'cuda'):
        assert set(Config.on(torch.device(device)).mixers) == set(MIXERS)


def test_the_model_is_causal(model):
    with torch.no_grad():
        assert torch.allclose(model(PROMPT)[:, :20], model(PROMPT[:, :20]), atol=1e-5)


def test_a_run_by_steps_is_reproducible():
    def losses() -> list[float]:
        batches = data.batches(PROMPT[0].repeat(9), 2, 32, torch.Generator().manual_seed(0))
        return [step.loss for step in train(small_model(), batches, SETTINGS)]

    first = losses()
    assert len(first) == SETTINGS.steps
    assert losses() == first
    assert first[-1] < first[0]


def test_learning_rate():
    rates = [rate(step, step / 200) for step in range(201)]
    assert rates[0] == pytest.approx(1 / WARMUP)
    assert max(rates) > 0.95
    assert rates[-1] == pytest.approx(0.1)


def test_decoding_agrees_with_prefill(model):
    made = generate(model, PROMPT, 12, SETTINGS)
    found = compare(model, made, SETTINGS)
    assert found.difference < 1e-5
    assert (found.same, found.margin) == (12, 0)
    # Another seed draws other bytes. The first logits are the same.
    other = generate(model, PROMPT, 12, SETTINGS, temperature=1.0, seed=1)
    assert torch.equal(other.logits[0], made.logits[0])
    assert other.text != made.text
    assert compare(model, other, SETTINGS).difference < 1e-5


def test_wrong_decoding_is_noticed(model):
    made = generate(model, PROMPT, 12, SETTINGS)
    made.logits[5] *= 1.01
    assert compare(model, made, SETTINGS).difference > 1e-4
    made.ids[0, -3] = int(made.logits[-3].argmin())
    found = compare(model, made, SETTINGS)
    assert found.same < 12
    assert found.margin > 1


# -- report -----------------------------------------------------------------------------------------------------------------


def test_first_calls_are_recorded_with_their_arguments(model):
    """Arguments are copied before the function changes them in place."""
    _, cache = prefill(model, PROMPT, SETTINGS)
    before = cache[0].conv[0].clone()
    with Calls() as calls, torch.no_grad():
        model(PROMPT[:, :1], cache)
        model(PROMPT[:, 1:2], cache)
    assert calls.counters['modules.causal_conv1d_update', 'reference'] == 12
    first = calls.first['modules.causal_conv1d_update', 'reference']
    assert torch.equal(first.arguments['cache'], before)
    assert not first.with_grad
    found = difference(first, 'reference', SETTINGS)
    assert 0 < found.outputs < 1e-6
    assert found.argument == ''


def test_training_prefill_and_decoding_are_traced():
    model = small_model()
    traces = tracing(model, PROMPT[0].repeat(9), PROMPT, SETTINGS)
    assert list(traces) == list(report.PHASES)
    chunked, recurrent = 'kda.chunk_kda', 'kda.fused_recurrent_kda'
    counts = [(calls.counters[chunked, 'reference'], calls.counters[recurrent, 'reference']) for calls in traces.values()]
    assert counts == [(1, 0), (1, 0), (0, report.DECODED)]
    assert [calls.first['attn.parallel_attn', 'sdpa'].with_grad for calls in traces.values()] == [True, False, False]
    assert all(p.grad is None for p in model.parameters())


def test_nan_is_not_a_small_difference(monkeypatch):
    """Nor if other differences of the same call are numbers."""
    results = iter([([torch.ones(2), torch.full((2,), torch.nan), torch.ones(2)], {}), ([torch.ones(2)] * 3, {})])
    monkeypatch.setattr(report, 'run', lambda *_, **__: next(results))
    call = Call('modules.swiglu', {'x': torch.ones(2)}, False, False)
    assert not difference(call, 'default', SETTINGS).is_small
    row = Row('modules.swiglu', 'default', (), {}, [Difference(1e-6), Difference(float('nan')), Difference(1e-6)])
    assert math.isnan(row.worst.outputs)
    assert Difference(1e-6).is_small
    assert not Difference(float('nan')).is_small
    assert not Difference(1e-6, float('nan'), 'g').is_small


# -- terminal ---------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(bar: console.PlainProgress) -> None:
    with bar:
        for number in range(1, 5):
            bar.show(Step(number, 2.0, number / 4, float(number)), 2.0)


def test_progress_without_rich(monkeypatch):
    for name in ('rich', 'rich.progress'):
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    monkeypatch.setattr(sys, 'stdout', terminal)
    bar = console.progress(100)
    assert type(bar) is console.PlainProgress
    shown(bar)
    assert '\r[####################] 100%  step 4     loss 2.00  100 bytes/s  0:00 left' in terminal.getvalue()
    assert terminal.getvalue().count('\n') == 1


def test_progress_with_rich(monkeypatch):
    pytest.importorskip('rich')
    terminal = Terminal()
    monkeypatch.setattr(sys, 'stdout', terminal)
    bar = console.progress(100)
    assert type(bar) is console.RichProgress
    shown(bar)
    assert 'loss 2.00' in terminal.getvalue()


def test_progress_in_a_pipe(capsys):
    shown(console.progress(100))
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith('[#####...............]  25%  step 1 ')
    assert last.endswith('100 bytes/s  0:00 left')


def test_control_characters_do_not_reach_the_terminal():
    assert console.quoted('a\x1b[2J\n\nb\x07', '|') == '  | a?[2J\n  |\n  | b?'
