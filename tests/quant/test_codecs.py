"""Codes and scales against the reference files, and casts against the tables of all codes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from xla import SHIPPED

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant import fp8, int4, mxfp4
from eagle3_jax.quant.formats import NARROW_FORMATS

QUANT = Path(__file__).resolve().parents[1] / "fixtures" / "quant"
RNG = np.random.default_rng(0)
DTYPES = {"e4m3fn": fp8.E4M3FN, "e4m3fnuz": fp8.E4M3FNUZ}
each_dtype = pytest.mark.parametrize("name", DTYPES)
ALL_BYTES = np.arange(256, dtype=np.uint8)


def stored(file: str) -> dict[str, np.ndarray]:
    """A file's tensors by the safetensors library; FP8 by their bytes, which it does not know."""
    data = (QUANT / file).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    dtypes = {"F8_E4M3": fp8.E4M3FN, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8, "I32": np.int32}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] in dtypes:
            raw = np.frombuffer(data[8 + size + begin : 8 + size + end], np.uint8)
            tensors[name] = raw.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def reference(file: str) -> dict[str, np.ndarray]:
    with np.load(QUANT / file) as arrays:
        return dict(arrays)


def table(name: str) -> np.ndarray:
    """The number of each of the 256 codes."""
    return reference("fp8_codes.expected.npz")[name]


def nearest(values: np.ndarray, name: str) -> np.ndarray:
    """Numbers rounded to the nearest entry of the table, ties to the even code, by looking at all of them."""
    codes = np.flatnonzero(np.isfinite(table(name)))
    codes = codes[np.argsort(codes & 1, kind="stable")]  # of two equally near ones argmin takes the first
    numbers = table(name)[codes].astype(np.float64)
    distance = np.abs(values.clip(-1e6, 1e6).astype(np.float64)[:, None] - numbers)
    return numbers[np.argmin(distance, axis=1)]


# FP8


def cast(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """By NumPy, or by XLA as users have it: its older emitters, which tests use, make NaN of e4m3fnuz's -0."""
    if where == "jax":
        return np.asarray(jax.jit(lambda x: fp8.saturating_cast(x, DTYPES[name]), compiler_options=SHIPPED)(values))
    with np.errstate(invalid="ignore"):  # NaN of bfloat16
        return fp8.saturating_cast(values, DTYPES[name])


@each_dtype
def test_all_256_codes_decode_as_the_reference_says(name: str) -> None:
    got = fp8.elements(ALL_BYTES.view(DTYPES[name]))
    np.testing.assert_array_equal(got, table(name))
    on_device = jax.jit(fp8.elements)(jnp.asarray(ALL_BYTES.view(DTYPES[name])))
    np.testing.assert_array_equal(on_device, table(name))


@each_dtype
@pytest.mark.parametrize("where", ["numpy", "jax"])
def test_casts_take_the_nearest_code_and_clip(name: str, where: str) -> None:
    numbers = np.unique(table(name)[np.isfinite(table(name))])
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    beyond = np.float32([numbers[-1] + 1, 448, 449, 463, 464, 464.1, 465, 1e4, 3e38, np.inf])
    values = np.concatenate([numbers, middle, *beside, beyond, -beyond]).astype(np.float32)
    got = cast(values, name, where)
    assert got.dtype == DTYPES[name]
    np.testing.assert_array_equal(got.astype(np.float64), nearest(values, name))


@each_dtype
@pytest.mark.parametrize("where", ["numpy", "jax"])
def test_every_bfloat16_number_is_cast_to_the_nearest_code(name: str, where: str) -> None:
    """Denormals, infinities, and every NaN among them."""
    values = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    got = cast(values, name, where).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wide))
    numbers = ~np.isnan(wide)
    wanted = [nearest(part, name) for part in np.array_split(wide[numbers], 16)]
    np.testing.assert_array_equal(got[numbers], np.concatenate(wanted))


@each_dtype
def test_nan_stays_nan_in_a_cast(name: str) -> None:
    assert np.isnan(fp8.saturating_cast(np.float32([np.nan, 1]), DTYPES[name]).astype(np.float32)).tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("name", ["exact", "narrow", "ragged"])
def test_blocks_of_128_decode_bit_for_bit(name: str) -> None:
    tensors = stored("fp8_block128.safetensors")
    got = NARROW_FORMATS["fp8_block"].decode(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"])
    np.testing.assert_array_equal(got, reference("fp8_block128.expected.npz")[name])


def test_quarks_ptpc_export_decodes_bit_for_bit_and_is_what_we_write() -> None:
    tensors, wanted = (
        stored("quark_ptpc_fp8_draft_a/model.safetensors"),
        reference("quark_ptpc_fp8_draft_a/expected.npz"),
    )
    names = [name.removesuffix("_scale") for name in tensors if name.endswith("_scale")]
    assert len(names) == 7
    for name in names:
        codes, scale = tensors[name], tensors[f"{name}_scale"][:, None]
        np.testing.assert_array_equal(NARROW_FORMATS["fp8_channel"].decode(codes, scale), wanted[f"dequant/{name}"])


def test_ptpc_codes_are_torchs_and_the_scales_quarks() -> None:
    tensors, wanted = (
        stored("quark_ptpc_fp8_draft_a/model.safetensors"),
        reference("quark_ptpc_fp8_draft_a/expected.npz"),
    )
    with safe_open(QUANT.parent / "drafts/a_safeailab/model.safetensors", "numpy") as source:
        for name in [name for name in tensors if f"{name}_scale" in tensors]:
            wide = source.get_tensor(name).astype(ml_dtypes.bfloat16).astype(np.float32)
            codes, scale = NARROW_FORMATS["fp8_channel"].encode(wide)
            np.testing.assert_array_equal(scale[:, 0], tensors[f"{name}_scale"])
            np.testing.assert_array_equal(codes.view(np.uint8), wanted[f"torch_cast_codes/{name}"])


@pytest.mark.parametrize("format", [name for name in NARROW_FORMATS if name.startswith("f")])
def test_fp8_keeps_every_element_within_half_a_step(format: str) -> None:
    fmt = NARROW_FORMATS[format]
    matrix = RNG.standard_normal((130, 257)).astype(np.float32) * np.float32(10) ** RNG.integers(-3, 3, (130, 1))
    codes, scale = fmt.encode(matrix.astype(np.float32))
    sizes = {"tensor": (1, 1), "channel": (130, 1), "block": (2, 3)}
    assert (codes.dtype, scale.shape) == (fmt.dtype, sizes[format.partition("_")[2]])
    step = fmt.decode(np.ones(matrix.shape, fmt.dtype), scale).astype(np.float64)
    wide = matrix.astype(np.float64)
    # Three bits after the leading one, or the least number 2^-9 (2^-10) times the scale.
    least = 2.0**-9 if fmt.dtype == fp8.E4M3FN else 2.0**-10
    allowed = np.maximum(np.abs(wide) * 2**-4, step * least / 2) * (1 + 1e-6)
    assert (np.abs(fmt.decode(codes, scale) - wide) <= allowed).all()


def test_a_row_of_zeros_and_denormals_is_quantised_to_zeros() -> None:
    matrix = np.zeros((3, 64), np.float32)
    matrix[1] = 1e-40
    matrix[2, 5] = -2.0
    codes, scale = NARROW_FORMATS["fp8_channel"].encode(matrix)
    assert scale[:, 0].tolist() == [2.0**-23, 2.0**-23, np.float32(2) / np.float32(448)]
    np.testing.assert_array_equal(NARROW_FORMATS["fp8_channel"].decode(codes, scale)[:2], 0)
    assert codes[2, 5].astype(np.float32) == -448


def test_fn_becomes_fnuz_with_the_same_numbers_for_all_finite_codes() -> None:
    codes = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F].view(fp8.E4M3FN)
    scale = np.float32([[0.3]])
    there, doubled = fp8.fn_to_fnuz(codes, scale)
    assert there.dtype == fp8.E4M3FNUZ
    want = table("e4m3fn")[codes.view(np.uint8)] * scale
    np.testing.assert_array_equal(table("e4m3fnuz")[there.view(np.uint8)] * doubled, want)
    back, halved = fp8.fnuz_to_fn(there, doubled)
    np.testing.assert_array_equal(table("e4m3fn")[back.view(np.uint8)] * halved, want)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_without_a_partner_are_refused(code: int) -> None:
    bits = np.array([0, code, 1], np.uint8)
    with pytest.raises(Eagle3Error, match="NaN"):
        fp8.fn_to_fnuz(bits.view(fp8.E4M3FN), np.float32(1))
    with pytest.raises(Eagle3Error, match="240"):
        fp8.fnuz_to_fn(bits.view(fp8.E4M3FNUZ), np.float32(1))
    with pytest.raises(Eagle3Error, match="NaN"):
        fp8.fnuz_to_fn(np.array([0x80], np.uint8).view(fp8.E4M3FNUZ), np.float32(1))


# MXFP4


def same_or_flushed(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit, except that XLA takes the subnormal scale 2^-127 for zero."""
    flushed = (np.abs(want) <= 6 * 2.0**-127) & (got == 0)
    np.testing.assert_array_equal(np.where(flushed, 0, got), np.where(flushed, 0, want))


@pytest.mark.parametrize("where", ["numpy", "jax"])
@pytest.mark.parametrize("name", ["corner", "random"])
def test_mxfp4_decodes_bit_for_bit(name: str, where: str) -> None:
    tensors, want = stored("mxfp4.safetensors"), reference("mxfp4.expected.npz")[f"{name}_f32"]
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].view(mxfp4.E8M0)
    if where == "numpy":
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_array_equal(NARROW_FORMATS["mxfp4"].decode(codes, scale), want)
    else:
        same_or_flushed(np.asarray(jax.jit(NARROW_FORMATS["mxfp4"].decode)(codes, scale)), want)


def test_gpt_oss_blocks_decode_bit_for_bit() -> None:
    tensors = stored("mxfp4.safetensors")
    name = "experts.gate_up_proj"
    got = NARROW_FORMATS["mxfp4"].decode(*mxfp4.from_blocks(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]))
    want = reference("mxfp4.expected.npz")["experts_gate_up_proj_f32"]
    np.testing.assert_array_equal(got.swapaxes(-1, -2), want)


def test_all_256_scale_codes() -> None:
    codes = np.full((256, 16), 0x22, np.uint8)  # 1.0
    got = NARROW_FORMATS["mxfp4"].decode(codes, ALL_BYTES.view(mxfp4.E8M0)[:, None])
    np.testing.assert_array_equal(got, np.repeat(table("e8m0fnu")[:, None], 32, axis=1))


def test_requantised_mxfp4_is_quarks_bytes() -> None:
    tensors = stored("quark_mxfp4_draft_a/model.safetensors")
    names = [name for name in tensors if f"{name}_scale" in tensors]
    assert len(names) == 7
    with safe_open(QUANT.parent / "drafts/a_safeailab/model.safetensors", "numpy") as source:
        for name in names:
            wide = source.get_tensor(name).astype(ml_dtypes.bfloat16).astype(np.float32)
            codes, scale = NARROW_FORMATS["mxfp4"].encode(wide)
            np.testing.assert_array_equal(codes, tensors[name])
            np.testing.assert_array_equal(scale.view(np.uint8), tensors[f"{name}_scale"])


def test_the_even_rule_bumps_the_exponent_from_seven_eighths_on() -> None:
    maxima = np.float32([4, 6, np.nextafter(np.float32(7), np.float32(0)), 7, 8, 0.875, 0, 3.4e38, 1e-40])
    want = [127, 127, 127, 128, 128, 125, 1, 253, 1]
    assert mxfp4.even_scales(maxima).view(np.uint8).tolist() == want


def test_mxfp4_elements_are_rounded_to_the_nearest_even_and_clipped() -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :12] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.5, -0.25, -1.75, 6.9]
    got = NARROW_FORMATS["mxfp4"].decode(*NARROW_FORMATS["mxfp4"].encode(row))
    assert got[0, :12].tolist() == [4, 0, 1, 1, 2, 2, 4, 4, 6, 0, -2, 6]
    assert not got[0, 12:].any()


# INT4


@pytest.mark.parametrize("where", ["numpy", "jax"])
@pytest.mark.parametrize(("name", "format"), [("bf16_scale", "int4"), ("f32_scale", "int4_f32")])
def test_int4_decodes_bit_for_bit(name: str, format: str, where: str) -> None:
    tensors, want = stored("int4_group32.safetensors"), reference("int4_group32.expected.npz")
    fmt, codes, scale = NARROW_FORMATS[format], tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    assert scale.dtype == fmt.scale_dtype
    elements, decode = (int4.elements, fmt.decode) if where == "numpy" else map(jax.jit, (int4.elements, fmt.decode))
    np.testing.assert_array_equal(elements(codes), want[f"{name}_q"])
    np.testing.assert_array_equal(decode(codes, scale), want[f"{name}_f32"])


@pytest.mark.parametrize(("name", "format"), [("bf16_scale", "int4"), ("f32_scale", "int4_f32")])
def test_int4_numbers_with_a_full_range_are_packed_as_they_were(name: str, format: str) -> None:
    q = reference("int4_group32.expected.npz")[f"{name}_q"].astype(np.float32)
    packed = stored("int4_group32.safetensors")[f"{name}.weight_packed"]
    matrix = np.where(q == -8, np.float32(-7.5), q)  # rounds to even, to -8, and makes the scale 1
    full = (q.reshape(-1, 32) == -8).any(axis=1).reshape(len(q), -1)
    codes, scale = NARROW_FORMATS[format].encode(matrix)
    assert full.sum() > 30 and (scale[full] == 1).all()
    groups = codes.reshape(*full.shape, 4), packed.reshape(*full.shape, 4)
    np.testing.assert_array_equal(groups[0][full], groups[1][full])
