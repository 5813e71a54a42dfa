"""A pytest plugin that writes the outcomes of a GPU's tests, by file, for `benchmarks/results`:

pytest -n 8 -m 'gpu and not slow' -p tests.gpu_report --gpu-report benchmarks/results/gpu_tests_h200.json

The JSON holds the cards, versions, commit and command, `complete` (the run was not interrupted), and a row for each file
with counts of outcomes, names of failed tests and reasons of skips.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *('triton', 'tilelang', 'flash-qla', 'tokenspeed-flashkda', 'liger-kernel', 'flashinfer-python', 'flag-gems'),
    *('causal-conv1d', 'transformers'),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--gpu-report', type=Path, help='write outcomes by file to this JSON file')


def pytest_configure(config: pytest.Config) -> None:
    if config.option.gpu_report and not hasattr(config, 'workerinput'):
        config.pluginmanager.register(Report(config), 'gpu-report')


class Report:
    """Collects outcomes by file. A test counts once; a failure of its call, setup or teardown prevails."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == 'call' or report.outcome != 'passed':
            outcome = 'xfailed' if hasattr(report, 'wasxfail') else report.outcome
            if self.outcomes.get(report.nodeid) != 'failed':
                self.outcomes[report.nodeid] = outcome
            if report.skipped and isinstance(report.longrepr, tuple):
                file, reason = report.nodeid.split('::')[0], report.longrepr[2].removeprefix('Skipped: ')
                self.reasons.setdefault(file, Counter())[reason] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        files: dict[str, dict[str, Any]] = {}
        for test, outcome in sorted(self.outcomes.items()):
            file, _, name = test.partition('::')
            row = files.setdefault(file, {'file': file})
            row[outcome] = row.get(outcome, 0) + 1
            if outcome == 'failed':
                row.setdefault('failures', []).append(name)
        for file, reasons in self.reasons.items():
            files[file]['skips'] = dict(sorted(reasons.items()))
        result = {'benchmark': 'gpu_tests', **machine(), 'command': command(self.config)}
        result |= {'complete': exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), 'rows': [*files.values()]}
        path = self.config.option.gpu_report
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')


def machine() -> dict[str, Any]:
    """Returns the cards, CPU cores, versions of installed packages, and the commit."""
    versions = {'python': platform.python_version(), 'torch': torch.__version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_name(i) for i in range(count)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return {'cards': cards, 'cores': cores, 'versions': versions, 'commit': commit()}


def commit() -> str | None:
    """Returns `GPU_REPORT_COMMIT` or the checkout's commit; None without either."""
    if 'GPU_REPORT_COMMIT' in os.environ:
        return os.environ['GPU_REPORT_COMMIT']
    done = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def command(config: pytest.Config) -> str:
    """Returns the command as a reader can repeat it, without paths of this machine."""
    words = [re.sub(rf'^{re.escape(str(ROOT))}/', '', str(word)) for word in config.invocation_params.args]
    words = [Path(word).name if Path(word) == config.option.gpu_report else word for word in words]
    quoted = [f"'{word}'" if ' ' in word else word for word in words]
    return ' '.join(['pytest', *quoted])
