"""Draw docs/figures/speed.svg, the figure of README.md, from benchmarks/results/*.json. Needs matplotlib (extra `tools`).

    python scripts/draw_figures.py

The SVG carries the sha256 of the numbers that it shows. A test compares it with the results and fails where a new run of a
benchmark has no new figure.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
FIGURE = ROOT / 'docs' / 'figures' / 'speed.svg'

OURS, FLA, TRANSFORMERS = 'this package', 'flash-linear-attention', 'transformers, plain PyTorch'
COLORS = {OURS: '#1f5fa8', FLA: '#e0a030', TRANSFORMERS: '#b4b4b4'}

Bars = dict[str, float]
Panel = dict[str, Bars]


def load(benchmark: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of a benchmark, by file name."""
    found = [json.loads(path.read_text(encoding='utf-8')) for path in sorted(results.glob('*.json'))]
    return [result for result in found if result.get('benchmark') == benchmark]


def delta_rules(results: Path = RESULTS) -> Panel:
    """Milliseconds of a forward with its backward, for each case that one run has measured with both packages."""
    panel: Panel = {}
    for result in load('delta_rules', results):
        cases: Panel = {}
        for row in result['rows']:
            who = {'default': OURS, FLA: FLA}.get(row['backend'])
            if who and 'both_ms' in row:
                kind = ''.join(f', {kind}' for kind in ('bounded', 'packed') if row.get(kind))
                name = {'kda': 'KDA', 'gated_delta_rule': 'Gated delta rule'}[row['op']]
                cases.setdefault(f'{name}{kind} ({", ".join(map(str, row["shape"]))})', {})[who] = round(row['both_ms'], 3)
        panel |= {name: bars for name, bars in cases.items() if len(bars) == 2}
    return dict(sorted(panel.items()))


def qwen3_next(results: Path = RESULTS) -> Panel:
    """Milliseconds of a model as transformers runs it; of several runs of a case the one with the most packages."""
    names = {'this package': OURS, 'transformers': TRANSFORMERS, FLA: FLA}
    panel: Panel = {}
    for result in load('qwen3_next', results):
        cases: Panel = {}
        for row in result['rows']:
            ms = row.get('graph_gpu_ms', row.get('gpu_ms'))
            if ms is not None and not row['modules']:
                phase = {'decode': 'Decode, CUDA graph', 'prefill': 'Prefill', 'train': 'Training step'}[row['phase']]
                cases.setdefault(f'{phase} ({", ".join(map(str, row["shape"]))})', {})[names[row['backend']]] = round(ms, 2)
        panel |= {name: bars for name, bars in cases.items() if len(bars) >= len(panel.get(name, ()))}
    return {name: {who: bars[who] for who in COLORS if who in bars} for name, bars in panel.items()}


def numbers(results: Path = RESULTS) -> dict[str, Panel]:
    """All that the figure shows: title → case → package → milliseconds."""
    return {
        'Operation, forward + backward, ms (B, T, H, K)': delta_rules(results),
        'Qwen3-Next, 4 layers, ms (B, T)': qwen3_next(results),
    }


def fingerprint(shown: dict[str, Panel]) -> str:
    """The sha256 of the numbers."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def drawn(path: Path = FIGURE) -> str | None:
    """The sha256 that a figure carries."""
    match = re.search(r'sha256:([0-9a-f]{64})', path.read_text(encoding='utf-8'))
    return match and match[1]


def draw(path: Path = FIGURE, results: Path = RESULTS) -> None:
    """Write the figure. The bars of a case are relative to its longest; the numbers beside them are milliseconds."""
    import matplotlib

    matplotlib.use('svg')
    import matplotlib.pyplot as plt

    shown = numbers(results)
    height = sum(len(bars) + 0.7 for panel in shown.values() for bars in panel.values()) / len(shown)
    with plt.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'fla', 'font.family': 'sans-serif', 'font.size': 8}):
        figure, axes = plt.subplots(1, len(shown), figsize=(9.6, 0.19 * height + 0.7), layout='constrained')
        for axis, (title, panel) in zip(axes, shown.items(), strict=True):
            place, ticks = 0.0, []
            for name, bars in panel.items():
                begin, longest = place, max(bars.values())
                for who, ms in bars.items():
                    axis.barh(place, ms / longest, height=0.86, color=COLORS[who])
                    bold = 'bold' if who == OURS else 'normal'
                    axis.text(ms / longest + 0.015, place, f'{ms:.3g}', va='center', fontsize=7, fontweight=bold)
                    place += 1
                ticks.append(((begin + place - 1) / 2, name))
                place += 0.7
            axis.set_yticks([where for where, _ in ticks], [name for _, name in ticks])
            axis.set_xticks([])
            axis.set_xlim(0, 1.12)
            axis.invert_yaxis()
            axis.tick_params(length=0)
            axis.set_title(title, fontsize=9, loc='left')
            axis.spines[['top', 'right', 'bottom']].set_visible(False)
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
        figure.legend(handles, COLORS, loc='outside lower center', ncols=len(COLORS), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {'Date': None, 'Creator': None, 'Description': f'sha256:{fingerprint(shown)}'}
        figure.savefig(path, format='svg', metadata=metadata, facecolor='white')
        plt.close(figure)


if __name__ == '__main__':
    draw()
    print(f'written: {FIGURE.relative_to(ROOT)}')
