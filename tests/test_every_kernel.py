"""The calls that compute-sanitizer is run over are calls that work."""

import msa_kernels
from msa_kernels import reference
from tests import every_kernel


def test_every_call_runs(device, capsys):
    assert every_kernel.main(["--device", device]) == 0
    ran = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    operators = {name for name in msa_kernels.__all__ if hasattr(reference, name)}
    assert "write_cache" in operators and operators <= ran, operators - ran
