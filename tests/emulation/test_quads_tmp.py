import pytest, torch
from tests.emulation.emulator import Emulator
from tests.inputs import *
from tests.inputs import shared_selection, make_case, BLOCK, same_bits, with_duplicates, with_holes
from tests.tolerance import assert_attention
QUAD="msa_decode_quad_sm90_kernel"
L1=[(5, 6 * BLOCK + 2), (4, 300), (8, 8), (1, 500)]
L2=[(8, 19 * BLOCK + 77)]
L3=[(9, 40*BLOCK+5),(3,700)]
@pytest.mark.parametrize("sms", [132, 60, 30, 20, 14])
@pytest.mark.parametrize("seed", [0,1,2,3])
@pytest.mark.parametrize("which", [0,1,2])
def test_q(library, sms, seed, which):
    lengths=[L1,L2,L3][which]
    group=[8,16,5][which]; topk=[4,16,32][which]
    hkv=2
    case = make_case(lengths, hq=group*hkv, hkv=hkv, dtype=torch.bfloat16, topk=topk, poison="nan")
    if seed%2==0: case = case.with_(ids=shared_selection(case, 0.7))
    if seed==3: case = case.with_(ids=with_duplicates(case.ids))
    if seed==1: case = case.with_(ids=with_holes(case.ids))
    e = Emulator(library, seed, sms=sms, ctas_at_once=1 + seed % 4)
    out, lse = e.sparse_decode(*case.attend_args, **case.scales)
    print(sms, which, e.launched)
    if e.launched[0][0]!=QUAD: pytest.skip("other way")
    assert_attention(case, out, lse)
