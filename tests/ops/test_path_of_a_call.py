"""A call passes at most six files on its way to a kernel, and the docstring of its operation names them."""

import inspect
import sys

import pytest
import torch

pytest.importorskip('triton')
from tests.markdown import ROOT
from tests.ops.delta_rules import CHUNKED, FUNCTIONS, case, name_of
from tests.ops.kernels import call


def path_to_the_first_kernel(run) -> list[str]:
    """Files of fla, and generated functions, that are on the stack when Triton is first entered; the dispatcher left out."""
    path: list[str] = []

    def watch(frame, event, argument):
        if event != 'call' or path or '/triton/runtime/' not in frame.f_code.co_filename:
            return
        files, here = [], frame
        while here := here.f_back:
            files.append(here.f_code.co_filename)
        of_fla = [file.removeprefix(f'{ROOT}/fla/') for file in reversed(files) if file.startswith(f'{ROOT}/fla/')]
        generated = [file for file in files if file.startswith('<opaque')]
        path.extend(dict.fromkeys([*generated, *(file for file in of_fla if not file.startswith('backends/'))]))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return path


@pytest.mark.interpreted
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_at_most_six_files_to_a_kernel(function):
    given = case(function, T=3, K=16, V=16)
    with torch.no_grad():
        call(function, given)  # imports the kernels
        path = path_to_the_first_kernel(lambda: call(function, given))
    files = [file for file in path if not file.startswith('<')]
    assert len(path) == (6 if function in CHUNKED else 2), path
    said = inspect.getdoc(sys.modules[function.__module__.rpartition('.')[0]])
    for file in files:
        name = file.removeprefix('ops/').removeprefix(f'{function.__module__.split(".")[2]}/')
        assert f'`{name}`' in said, (name, said)
