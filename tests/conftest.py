"""Devices, markers, and why something was skipped."""

import os

import pytest
import torch

# The tests are many small tensors: threads would mostly wait for each other, and on a busy machine
# they wait long. tests/test_threads.py runs the operators with several.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs on a CUDA GPU; skipped without one")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def no_gpu_reason() -> str | None:
    """Why no GPU test can run here, or None."""
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}"
        return f"no CUDA device ({build}, {torch.cuda.device_count()} devices)"
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every operator test runs on the CPU, and on a GPU where there is one."""
    if request.param == "cuda" and (reason := no_gpu_reason()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def require(device: str):
    """require(op, dtype, cache_dtype): skips, with the library's reason, what has no GPU kernel.

    The CPU has a kernel for everything: there, nothing is skipped. Without dtypes: those of a
    `make_case` that is not told any, bfloat16 on a GPU.
    """
    import msa_kernels

    def check(op: str, dtype: torch.dtype | None = None, cache_dtype=None) -> None:
        if device == "cpu":
            return
        supported, reason = msa_kernels.is_supported(
            op, device, dtype or torch.bfloat16, cache_dtype
        )
        if not supported:
            pytest.skip(reason)

    return check


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Gives all GPU tests that are skipped for one reason one place: one line of the summary."""
    report = (yield).get_result()
    if report.skipped and "gpu" in item.keywords and isinstance(report.longrepr, tuple):
        report.longrepr = (__file__, 1, report.longrepr[2])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With MSA_NO_SKIPS=1 (CI), a skip for another reason than a missing GPU fails the run.

    A missing tool, package or library must not make an audit or the oracle vanish unseen.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("MSA_NO_SKIPS") != "1" or reporter is None:
        return
    skipped = reporter.stats.get("skipped", [])
    strangers = [report for report in skipped if "gpu" not in report.keywords]
    for report in strangers:
        reporter.write_line(f"MSA_NO_SKIPS: {report.nodeid}: {report.longrepr[2]}")
    if strangers and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
