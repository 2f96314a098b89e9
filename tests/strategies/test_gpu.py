"""Every algorithm on a CUDA GPU: ``pytest tests/strategies/test_gpu.py --gpu``."""

from pathlib import Path

import pytest
import torch
from algorithm_runs import N, assert_near, run_tiny

from flwr_frl.strategies.algorithms import ALGORITHMS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs --gpu and a CUDA GPU"
)


@pytest.mark.parametrize("cohort", ["off", str(N)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gpu_and_cpu_agree(algorithm: str, cohort: str) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    on_gpu = run_tiny(algorithm, device="cuda", cohort=cohort)
    assert torch.cuda.max_memory_allocated() > before
    assert_near(on_gpu, run_tiny(algorithm, device="cpu"), 1e-3)


def test_run_begun_on_a_gpu_is_resumed_on_the_cpu(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run_tiny("fedrep", begun, device="cuda", num_server_rounds=1)
    resumed = run_tiny("fedrep", tmp_path / "more", device="cpu", resume=str(begun))
    assert_near(resumed, run_tiny("fedrep", device="cpu"), 1e-3)
