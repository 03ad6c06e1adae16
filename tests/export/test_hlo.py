"""Reading optimised HLO, on a module small enough to count by eye."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eagle3_jax.export.hlo import Module, hlo_dtype, item_bits

TEXT = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (3, {}, may-alias), {1}: (4, {}, must-alias) }, x=1

%fused_copy (p: bf16[8,2,4]) -> bf16[4,8,2] {
  %p = bf16[8,2,4]{2,1,0} parameter(0)
  %t = bf16[4,8,2]{2,1,0} transpose(%p), dimensions={2,0,1}
  ROOT %b = bf16[4,8,2]{2,1,0} bitcast(%t)
}

%fused_dot (q: f8e4m3fn[6,5]) -> f32[6] {
  %q = f8e4m3fn[6,5]{1,0} parameter(0)
  %wide = f32[6,5]{1,0} convert(%q)
  ROOT %r = f32[6]{0} reduce(%wide, %zero), dimensions={1}, to_apply=%add
}

%body (arg: (s32[], bf16[8,2,4])) -> (s32[], bf16[8,2,4]) {
  %arg = (s32[], bf16[8,2,4]{2,1,0}) parameter(0)
  %pool = bf16[8,2,4]{2,1,0} get-tuple-element(%arg), index=1
  %kept = bf16[8,2,4]{2,1,0} copy(%pool), metadata={op_name="jit(f)/while/body"}
  %n = s32[] get-tuple-element(%arg), index=0
  ROOT %out = (s32[], bf16[8,2,4]{2,1,0}) tuple(%n, %kept)
}

ENTRY %main (a: bf16[8,2,4], w: f8e4m3fn[6,5]) -> bf16[4,8,2] {
  %a = bf16[8,2,4]{2,1,0} parameter(0)
  %w = f8e4m3fn[6,5]{1,0} parameter(1)
  %turned = bf16[4,8,2]{2,1,0} fusion(%a), kind=kLoop, calls=%fused_copy
  %fine = f32[6]{0} fusion(%w), kind=kCustom, calls=%fused_dot
  %bad = f32[5,6]{1,0} convert(%w)
  %small = bf16[2,2]{1,0} copy(%turned)
  %part = bf16[4,4]{1,0} dynamic-slice(%turned, %i), dynamic_slice_sizes={4,4}
  %sum = (f32[6]{0}, f32[6]{0}) all-reduce-start(%fine), replica_groups={{0,1}}, to_apply=%add
  %sent = f32[6]{0} all-reduce-done(%sum)
  %all = f32[12]{0} all-gather(%sent), dimensions={0}
  %k = f32[6]{0} custom-call(%sent), custom_call_target="__gpu$xla.gpu.triton"
  %g = (f32[6]{0}, s8[16]{0}) custom-call(%k), custom_call_target="__cublas$lt$matmul", backend_config={"a":"[1]"}
  ROOT %o = bf16[4,8,2]{2,1,0} bitcast(%turned)
}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    return Module(TEXT)


def test_copies_are_found_in_loops_and_as_the_result_of_a_fusion(module: Module) -> None:
    assert module.copies([("bf16", (8, 2, 4))]) == {"bf16[4,8,2]": 1, "bf16[8,2,4]": 1}
    assert module.copies([("bf16", (8, 2, 5)), ("f32", (8, 2, 4))]) == {}
    assert module.copies([("bf16", (4, 4))]) == {}
    assert module.copies([("bf16", (4, 4))], slices=True) == {"bf16[4,4]": 1}


def test_a_wider_array_counts_only_where_it_lies_in_memory(module: Module) -> None:
    assert module.widened([(8, (6, 5))]) == {"f32[5,6]": 1}
    assert module.widened([(32, (6, 5))]) == {}


def test_calls_collectives_and_aliases(module: Module) -> None:
    assert module.collectives() == {"all-gather": 1, "all-reduce": 1}
    assert module.library_calls() == {"__cublas$lt$matmul": 1}
    assert module.aliases == 2


def test_the_largest_arrays_are_those_computed(module: Module) -> None:
    largest = module.largest(2)
    found = {(entry["shape"], entry["bytes"]) for entry in largest}
    assert found == {("bf16[4,8,2]", 128), ("bf16[8,2,4]", 128)}


@pytest.mark.parametrize(
    ("dtype", "name", "bits"),
    [
        (jnp.bfloat16, "bf16", 16),
        (np.float32, "f32", 32),
        (np.bool_, "pred", 8),
        (np.uint8, "u8", 8),
        (ml_dtypes.float8_e4m3fnuz, "f8e4m3fnuz", 8),
        (ml_dtypes.float8_e8m0fnu, "f8e8m0fnu", 8),
        (ml_dtypes.float4_e2m1fn, "f4e2m1fn", 4),
    ],
)
def test_names_of_dtypes(dtype: type, name: str, bits: int) -> None:
    assert hlo_dtype(np.dtype(dtype)) == name
    assert item_bits(name) == bits
