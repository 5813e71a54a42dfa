"""The examples in docs/ run, generated parts are up to date, and links and named files exist."""

import contextlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

import fla
from fla.backends import describe
from fla.backends.policy.environment import VARIABLES
from tests import markdown

PAGES = sorted(path.relative_to(markdown.ROOT).as_posix() for path in (markdown.ROOT / 'docs').rglob('*.md'))
WITH_LINKS = ['README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'benchmarks/README.md', *PAGES]


def script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, markdown.ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def update_docs():
    return script('scripts/update_docs.py')


@pytest.fixture(scope='module')
def draw_figures():
    return script('scripts/draw_figures.py')


@pytest.mark.parametrize('page', PAGES)
def test_examples(page):
    markdown.run(page)


def test_generated_parts_are_up_to_date(update_docs):
    stale = [str(path.relative_to(markdown.ROOT)) for path in update_docs.stale()]
    assert not stale, f'run python scripts/update_docs.py: {stale}'


def test_figure_is_up_to_date(draw_figures):
    shown = draw_figures.fingerprint(draw_figures.numbers())
    assert draw_figures.drawn() == shown, 'run python scripts/draw_figures.py'


def test_figure_shows_the_numbers(draw_figures, tmp_path):
    """Another run of a benchmark is another fingerprint, and the drawn figure carries it and the numbers as text."""
    pytest.importorskip('matplotlib')
    case = {'op': 'kda', 'shape': [1, 2, 3, 4]}
    rows = [{**case, 'backend': 'default', 'both_ms': 1.25}, {**case, 'backend': 'flash-linear-attention', 'both_ms': 2.5}]
    path = tmp_path / 'run.json'
    for ms in (1.25, 0.75):
        rows[0]['both_ms'] = ms
        path.write_text(json.dumps({'benchmark': 'delta_rules', 'rows': [*rows, {**case, 'backend': 'reference'}]}))
        (tmp_path / 'model.json').write_text(
            json.dumps(
                {
                    'benchmark': 'qwen3_next',
                    'rows': [
                        {'phase': 'train', 'shape': [5, 6], 'backend': 'this package', 'modules': False, 'gpu_ms': 33.3},
                        {'phase': 'train', 'shape': [5, 6], 'backend': 'this package', 'modules': True, 'gpu_ms': 22.2},
                        {'phase': 'train', 'shape': [5, 6], 'backend': 'transformers', 'modules': False, 'refused': 'no'},
                    ],
                }
            )
        )
        figure = tmp_path / 'figures/speed.svg'
        before = draw_figures.drawn(figure) if figure.exists() else None
        draw_figures.draw(figure, tmp_path)
        assert draw_figures.drawn(figure) == draw_figures.fingerprint(draw_figures.numbers(tmp_path)) != before
        text = figure.read_text(encoding='utf-8')
        assert all(f'>{shown}<' in text for shown in (f'{ms:.3g}', '2.5', '33.3', 'KDA (1, 2, 3, 4)'))
        assert '22.2' not in text


def test_operations_table_follows_the_results(update_docs, tmp_path):
    """Every dispatched function has a row with its backends; times are those of the results."""
    text = update_docs.operations(tmp_path)
    rows = {line.split('|')[1].strip(' `'): line for line in text.splitlines()[2:]}
    dispatched = re.findall(r'^(?:gated_delta_rule|kda|attn|modules)\.(\w+) ', describe(), re.MULTILINE)
    assert sorted(rows) == sorted(dispatched)
    assert rows['swiglu'] == '| `swiglu` | `reference` | `default` | `default` | `liger` (`FLA_LIGER=1`) |  |  |  |'
    assert '`flash_kda` (if installed), `tilelang` (`FLA_TILELANG=1`)' in rows['chunk_kda']
    row = {'module': 'swiglu', 'size': 'large', 'shape': [4, 8]}
    times = {'default': 0.5, 'torch': 2.0, 'torch.compile': 0.75, 'liger': 0.25}
    result = {'benchmark': 'modules', 'rows': [{**row, 'backend': name, 'both_ms': ms} for name, ms in times.items()]}
    (tmp_path / 'modules.json').write_text(json.dumps(result), encoding='utf-8')
    assert '| 4, 8 | 0.5 | torch.compile 0.75 |' in update_docs.operations(tmp_path)


def test_every_variable_is_in_the_table():
    text = (markdown.ROOT / 'docs/environment.md').read_text(encoding='utf-8')
    assert [name for name in VARIABLES if f'| `FLA_{name}` |' not in text] == []


def test_generated_parts_follow_their_sources(update_docs, tmp_path):
    """A part is rewritten, the text around it stays, and a missing result is stated in words."""
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- generated: overhead -->\nold\n<!-- end -->\nafter\n', encoding='utf-8')
    text = update_docs.updated(page, results=tmp_path)
    assert text.startswith('before\n<!-- generated: overhead -->\n\n')
    assert text.endswith('\n\n<!-- end -->\nafter\n')
    assert 'no result' in text
    case = {'name': 'one rejects', 'ceiling': 0.45, 'met': True, 'ns': {'min': 333.3}, 'ratio': {'min': 0.31, 'median': 0.4}}
    result = {
        'benchmark': 'dispatch_overhead',
        'command': 'python benchmarks/dispatch_overhead.py',
        'machine': {'cpu': 'a CPU', 'cores': 2, 'system': 'Linux', 'python': '3.11', 'torch': '2.13'},
        'yardstick_ns': {'min': 1000.0, 'median': 1100.0},
        'dispatch': [case],
        'peers': [],
        'once': [],
    }
    (tmp_path / 'dispatch_overhead.json').write_text(json.dumps(result), encoding='utf-8')
    text = update_docs.updated(page, results=tmp_path)
    assert '| one rejects | 333 | 0.31 | 0.40 | 0.45 | yes |' in text
    assert 'old' not in text
    assert 'no result' not in text


def test_times_of_modules(update_docs, tmp_path):
    """Bandwidth beside a copy's; refused calls are marked, and rows without any time left out."""
    page = tmp_path / 'page.md'
    page.write_text('<!-- generated: modules -->\n<!-- end -->\n', encoding='utf-8')
    assert 'python benchmarks/modules.py' in update_docs.updated(page, results=tmp_path)
    row = {'module': 'swiglu', 'size': 'large', 'shape': [4, 8], 'axes': 'rows, D', 'copy_gbs': 3000.0}
    times = {'forward_ms': 0.5, 'forward_gbs': 2800.4, 'forward_copy_ms': 0.46, 'errors': {'out': 1e-3, 'dx': 2.5e-3}}
    result = {
        'benchmark': 'modules',
        'card': 'a GPU',
        'cores': 16,
        'versions': {'torch': '2.11', 'triton': '3.6.0', 'python': '3.12'},
        'command': 'python benchmarks/modules.py',
        'copy_gbs': 3000.0,
        'complete': False,
        'rows': [
            {**row, **times, 'backend': 'default', 'both_ms': 1.25},
            {**row, **times, 'backend': 'flashinfer', 'both_refused': 'for inference'},
            {**row, **times, 'backend': 'torch'},
            {**row, 'backend': 'liger', 'forward_refused': 'not here', 'both_refused': 'not here'},
        ],
    }
    (tmp_path / 'modules.json').write_text(json.dumps(result), encoding='utf-8')
    text = update_docs.updated(page, results=tmp_path)
    assert '| `swiglu` | 4, 8 | default | 0.500 | 2800 | 92% | 1.250 |  |  | 2.5e-03 |' in text
    assert '| `swiglu` | 4, 8 | flashinfer | 0.500 | 2800 | 92% | refused |  |  | 2.5e-03 |' in text
    assert '| `swiglu` | 4, 8 | torch | 0.500 | 2800 | 92% |  |  |  | 2.5e-03 |' in text
    assert 'liger' not in text
    assert 'incomplete' in text
    assert 'parts' not in text
    result['earlier'] = [{'copy_gbs': 2900.4, 'rows': 1}, {'copy_gbs': 2800.0, 'rows': 1}]
    (tmp_path / 'modules.json').write_text(json.dumps(result), encoding='utf-8')
    text = update_docs.updated(page, results=tmp_path)
    assert 'in 3 parts; in the earlier ones the copy ran at 2900, 2800 GB/s. The run is incomplete' in text


def test_times_of_attention(update_docs, tmp_path):
    """The chosen backend is marked in words, because the table would escape marks."""
    page = tmp_path / 'page.md'
    page.write_text('<!-- generated: attention -->\n<!-- end -->\n', encoding='utf-8')
    row = {'case': 'packed', 'shape': [1, 8, 8, 2, 2, 4, 4]}
    times = {'forward_ms': 0.5, 'both_ms': 1.25, 'both_peak_mib': 7.6, 'errors': {'o': 1e-3, 'dq': 2.5e-3}}
    result = {
        'benchmark': 'attention',
        'card': 'a GPU',
        'cores': 16,
        'versions': {'torch': '2.11', 'triton': '3.6.0', 'python': '3.12'},
        'command': 'python benchmarks/attention.py',
        'complete': True,
        'rows': [
            {**row, **times, 'backend': 'torch', 'chosen': False, 'forward_over_torch': 1.0, 'both_over_torch': 1.0},
            {**row, **times, 'backend': 'default', 'chosen': True, 'forward_over_torch': 0.5, 'both_over_torch': 0.25},
            {**row, 'backend': 'tilelang', 'chosen': False, 'forward_refused': 'no', 'both_refused': 'no'},
        ],
    }
    (tmp_path / 'attention.json').write_text(json.dumps(result), encoding='utf-8')
    text = update_docs.updated(page, results=tmp_path)
    assert '| packed | 1, 8, 8, 2, 2, 4, 4 | torch | 0.500 | 1.250 | 8 | 2.5e-03 | 1.00 | 1.00 |' in text
    assert '| packed | 1, 8, 8, 2, 2, 4, 4 | default, chosen | 0.500 | 1.250 | 8 | 2.5e-03 | 0.50 | 0.25 |' in text
    assert 'tilelang' not in text


def test_times_of_qwen3_next(update_docs, tmp_path):
    """Times by package, eager and in a graph; refused rows are marked, also of a process that ended."""
    page = tmp_path / 'page.md'
    page.write_text('<!-- generated: qwen3-next -->\n<!-- end -->\n', encoding='utf-8')
    assert 'python benchmarks/qwen3_next.py' in update_docs.updated(page, results=tmp_path)
    row = {'phase': 'decode', 'shape': [32, 1024], 'backend': 'this package', 'modules': True}
    times = {'gpu_ms': 1.25, 'wall_ms': 9.5, 'peak_mib': 100.4, 'errors': {'logits': 5e-3}}
    result = {
        'benchmark': 'qwen3_next',
        'card': 'a GPU',
        'cores': 16,
        'versions': {'torch': '2.11', 'triton': '3.6.0', 'python': '3.12', 'transformers': '5.17'},
        'command': 'python benchmarks/qwen3_next.py',
        'complete': True,
        'rows': [
            {**row, **times, 'graph_gpu_ms': 1.125, 'graph_wall_ms': 1.5},
            {**row, **times, 'modules': False, 'graph_refused': 'it waits'},
            {**row, 'backend': 'flash-linear-attention', 'refused': 'not here'},
            {'backend': 'flash-linear-attention', 'refused': 'ended'},
        ],
    }
    (tmp_path / 'qwen3_next.json').write_text(json.dumps(result), encoding='utf-8')
    text = update_docs.updated(page, results=tmp_path)
    named = '| decode | 32, 1024 |'
    assert f'{named} this package, modules too | 1.25 | 9.50 | 1.12 | 1.50 | 100 | logits 5.0e-03 |' in text
    assert f'{named} this package | 1.25 | 9.50 | refused | refused | 100 | logits 5.0e-03 |' in text
    assert f'{named} flash-linear-attention, modules too | refused | refused |  |  |  |  |' in text
    assert '|  |  | flash-linear-attention | refused | refused |' in text


def test_unknown_part_is_an_error(update_docs, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('<!-- generated: weather -->\n<!-- end -->\n', encoding='utf-8')
    with pytest.raises(ValueError, match='weather'):
        update_docs.updated(page, results=tmp_path)


def anchors(path):
    """The anchors that GitHub makes of the headings of a page."""
    text = re.sub(r'^```.*?^```', '', path.read_text(encoding='utf-8'), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


@pytest.mark.parametrize('page', WITH_LINKS)
def test_links(page):
    path = markdown.ROOT / page
    for target, anchor in re.findall(r'\]\(([^)#\s]*)(?:#([^)]*))?\)', path.read_text(encoding='utf-8')):
        if '://' not in target:
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f'{page} links to {target}'
            assert not anchor or anchor in anchors(file), f'{page} links to {target}#{anchor}'


def resolves(dotted):
    """Whether a dotted name is a module or an attribute of one."""
    module, *names = dotted.split('.')
    found = importlib.import_module(module)
    for name in names:
        module = f'{module}.{name}'
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize('page', [page for page in WITH_LINKS if page != 'CHANGELOG.md'])
def test_dotted_names_exist(page):
    text = re.sub(r'^```.*?^```', '', (markdown.ROOT / page).read_text(encoding='utf-8'), flags=re.DOTALL | re.MULTILINE)
    code = ' '.join(re.findall(r'`([^`\n]+)`', text))
    names = set(re.findall(r'(?<![\w./-])fla(?:\.\w+)+(?![\w<]|\.<)', code))
    assert [name for name in sorted(names) if not resolves(name)] == []


def test_paths_in_contributing_exist():
    text = (markdown.ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    paths = set(re.findall(r'(?<![\w/.])((?:fla|tests|scripts|benchmarks|docs|\.ci)/[\w./-]*\w/?)(?![\w<])', text))
    assert len(paths) > 40
    assert [path for path in sorted(paths) if not (markdown.ROOT / path).exists()] == []


def test_names_in_contributing_are_in_their_files():
    """A name that stands before the file that holds it: `name` in `path.py`."""
    text = ' '.join((markdown.ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8').split())
    found = re.findall(r'`(\w+)` in `([\w/]+\.py)`', text)
    assert len(found) >= 3
    for name, path in found:
        assert re.search(rf'\b{name}\b', (markdown.ROOT / path).read_text(encoding='utf-8')), f'{path} has no {name}'


def test_changelog_begins_with_this_version():
    text = (markdown.ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
    assert re.search(r'^## \[(.+?)\]', text, re.MULTILINE)[1] == fla.__version__


def test_readme_links_to_every_page():
    text = (markdown.ROOT / 'README.md').read_text(encoding='utf-8')
    assert [page for page in PAGES if f']({page})' not in text] == []


RESULTS = sorted((markdown.ROOT / 'benchmarks' / 'results').glob('*.json'))


@pytest.mark.parametrize('path', RESULTS, ids=lambda path: path.name)
def test_results_name_no_folder_of_a_machine(path):
    assert not re.search(r'(?<![\w.)>])/\w+/', path.read_text(encoding='utf-8'))
