"""What this machine reaches, measured in the same run: the ceilings that rows are held against."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .timing import Clock, Prepared, prepare

GEMM = 8192
"""rows, columns and depth of the matrix product"""


def gemm_flops(size: int) -> int:
    """FLOP of a square matrix product."""
    return 2 * size**3


def make_gemm(device: torch.device, size: int = GEMM, dtype: torch.dtype = torch.bfloat16):
    """A call that multiplies two random square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    out = torch.empty(size, size, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def measure(device: torch.device, dtypes: set[str], *, target_ms: float = 60.0) -> dict[str, float]:
    """Ceilings by name.

    copy_tbps, read_tbps: 1e12 bytes/s, read and written bytes counted. gemm_*_tflops: 1e12 FLOP/s
    of an 8192^3 product (CPU: 512^3). sdpa_bf16_tflops: cuDNN, dense and causal, D 128, 64 query
    and 4 KV heads, 8192 tokens. empty_graph_us: what a replay of nothing measures.
    What cannot be measured is left out.
    """
    cuda = device.type == "cuda"
    clock = Clock(device, "clean", target_ms=target_ms)
    # On the CPU the numbers mean little; they are there so that every row can be made.
    num_bytes, size = (4 << 30, GEMM) if cuda else (32 << 20, 512)

    def us(call) -> float:
        return clock.measure({"it": prepare(call, device, graph=False)})["it"].us

    ceilings = {}
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    ceilings["copy_tbps"] = 2 * num_bytes / us(copy) / 1e6
    ceilings["read_tbps"] = num_bytes / us(partial(torch.sum, source)) / 1e6
    del source, copy

    wanted = {"bf16": torch.bfloat16} | ({"f32": torch.float32} if "float32" in dtypes else {})
    for name, dtype in wanted.items():
        time = us(make_gemm(device, size, dtype))
        ceilings[f"gemm_{name}_tflops"] = gemm_flops(size) / time / 1e6
    if not cuda:
        return ceilings
    for name, make in (("gemm_fp8_tflops", _fp8_gemm), ("sdpa_bf16_tflops", _sdpa)):
        if name == "gemm_fp8_tflops" and "fp8" not in dtypes:
            continue
        try:
            call, flops = make(device)
            ceilings[name] = flops / us(call) / 1e6
        except (RuntimeError, ValueError):
            continue  # this build or device has none of it
    graph = prepare(lambda: None, device, graph=True)
    ceilings["empty_graph_us"] = clock.measure({"it": graph})["it"].us
    torch.cuda.empty_cache()
    return ceilings


def peaks(ceilings: dict[str, float], dtype: torch.dtype) -> tuple[float, float]:
    """(1e12 FLOP/s, 1e12 bytes/s) that a call computing in `dtype` is held against."""
    name = {torch.float32: "gemm_f32_tflops", torch.float8_e4m3fn: "gemm_fp8_tflops"}.get(dtype)
    return ceilings.get(name, ceilings["gemm_bf16_tflops"]), ceilings["read_tbps"]


def _fp8_gemm(device: torch.device):
    a, b = (torch.randn(GEMM, GEMM, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    one = torch.ones((), device=device)

    def call():
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return call, gemm_flops(GEMM)


def _sdpa(device: torch.device):
    tokens, heads, kv_heads, dim = 8192, 64, 4, 128
    q = torch.randn(1, heads, tokens, dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(1, kv_heads, tokens, dim, dtype=q.dtype, device=device) for _ in "kv")

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call, tokens * (tokens + 1) // 2 * heads * dim * 4


def loop_gemm(device: torch.device) -> Prepared:
    """The 8192^3 product, to be timed in the same loop as a row: what the card gives just then."""
    return prepare(make_gemm(device), device, graph=False)
