"""The programs of a target and a draft, described by their configs alone: no weights are read or made."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.checkpoint.draft_config import Overrides, TargetFacts, parse_draft
from eagle3_jax.checkpoint.drafts import open_draft_folder
from eagle3_jax.checkpoint.families import FAMILIES
from eagle3_jax.checkpoint.folders import read_config
from eagle3_jax.checkpoint.names import abstract_params, check_dtype, weight_formats
from eagle3_jax.checkpoint.registry import locate
from eagle3_jax.checkpoint.target_files import read_target_config
from eagle3_jax.config import Fields
from eagle3_jax.decoding.drafters import Eagle3Drafter, NoDrafter
from eagle3_jax.decoding.loop import Setup, decode_round, prefill, result, run_rounds
from eagle3_jax.decoding.request import GenerationConfig, check_pair, parse_speculation
from eagle3_jax.decoding.sampling import Sampling
from eagle3_jax.decoding.state import state_shardings
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.quant.formats import NARROW_FORMATS, check_format
from eagle3_jax.quant.products import chosen_mode
from eagle3_jax.quant.quantize import KEPT, read_patterns, stays
from eagle3_jax.quant.weight import named_weights
from eagle3_jax.sharding import abstract_mesh, row_axis, weight_shardings
from eagle3_jax.training.initial import draft_config

NEW = "new"
"""In the place of a draft's name: one as `train` makes it for the target."""
WHAT = ("prefill", "round", "generate")
_EOS_IDS = 4


@dataclasses.dataclass(frozen=True)
class Program:
    """One program, as flags and reports say it.

    Attributes:
        what: "prefill" (the prompts and the first token), "round" (draft, verify, accept, commit; what it carries is
            donated) or "generate" (both and the loop around them).
        target: as `eagle3_jax.load_target` takes it; of a known name the config is enough.
        draft: a draft's name or folder, "new", or None for plain decoding.
        draft_settings: of a draft that exists, overrides of `load_draft`; of a new one, arguments of
            `eagle3_jax.training.initial.draft_config`.
        batch: rows. prompt: padded prompt length. max_new_tokens: capacity of the result.
        speculation: as the command line spells it. transforms: of `GenerationConfig`.
        block_size, prefill_chunk: of `GenerationConfig`.
        dtype: of activations and of weights that are in no narrow format.
        target_format, draft_format: narrow format of the matrices, a key of `NARROW_FORMATS`; None is `dtype`.
        target_kept, draft_kept: regular expressions of modules that stay in `dtype`.
        layout: of matrices in no narrow format: "nk", as the loaders keep them but on CPU, or "kn".
        layers: only so many of the target's layers; None is all.
        mesh: sizes of the axes "data" and "model".
    """

    what: str
    target: str
    draft: str | None = None
    draft_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch: int = 1
    prompt: int = 128
    max_new_tokens: int = 128
    speculation: str = "chain:4"
    transforms: tuple[str, ...] = ()
    block_size: int = 32
    prefill_chunk: int = 256
    dtype: str = "bfloat16"
    target_format: str | None = None
    draft_format: str | None = None
    target_kept: tuple[str, ...] = KEPT
    draft_kept: tuple[str, ...] = KEPT
    layout: str = "nk"
    layers: int | None = None
    mesh: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Refuse what is no program."""
        if self.what not in WHAT:
            raise Eagle3Error(f"{self.what!r:.40} cannot be exported; what is one of {', '.join(WHAT)}")
        check_dtype(self.dtype)
        if self.layout not in ("kn", "nk"):
            raise Eagle3Error(f"layout {self.layout!r:.40} is not known; use kn or nk")
        if min(self.batch, self.prompt, *self.mesh) < 1:
            raise Eagle3Error(f"batch {self.batch}, prompt {self.prompt}, mesh {self.mesh}: sizes from 1 are needed")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Program":
        """The program that a report's JSON names.

        Raises:
            Eagle3Error: other fields than a program's.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if odd := sorted(set(fields) - known):
            raise Eagle3Error(f"a program has no field {odd[0]!r:.40}; its fields are {', '.join(sorted(known))}")
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


@dataclasses.dataclass(frozen=True)
class Parts:
    """A program's function and abstract arguments.

    Attributes:
        setup: the modules and what is compiled. function, arguments: to be jitted and lowered.
        donated: the index of an argument that the result replaces in its memory, or None.
        target_params, draft_params: abstract weights. pools: abstract caches of target and draft.
    """

    setup: Setup
    function: Any
    arguments: tuple[Any, ...]
    donated: int | None
    target_params: Any
    draft_params: Any
    pools: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered program: `stage` is JAX's, `seconds` what tracing and lowering took."""

    stage: jax.stages.Lowered
    parts: Parts
    seconds: Mapping[str, float]

    def sha256(self) -> str:
        """Hash of the StableHLO, which says whether a program is still the one a report was made of."""
        return hashlib.sha256(self.stage.as_text().encode()).hexdigest()


def lower(program: Program, mesh: Mesh | AbstractMesh | None = None, platform: str = "rocm") -> Lowered:
    """Trace and lower a program.

    Args:
        program: the program.
        mesh: of the devices to compile for; None is an abstract one, which cannot be compiled but gives the same
            StableHLO.
        platform: JAX's name of the platform.

    Raises:
        Eagle3Error: a target or draft that is not there, or does not fit.
    """
    if mesh is None:
        mesh = abstract_mesh(*program.mesh)
    start = time.perf_counter()
    parts = build(program, mesh)
    options: dict[str, Any] = {}
    if parts.donated is not None:
        # What is carried on comes back as it lay: else its memory could not be taken.
        places = jax.tree.map(lambda x: x.sharding, parts.arguments[parts.donated])
        options = {"donate_argnums": parts.donated, "out_shardings": places}
    traced = jax.jit(parts.function, **options).trace(*parts.arguments)
    middle = time.perf_counter()
    stage = traced.lower(lowering_platforms=(platform,))
    seconds = {"trace": middle - start, "lower": time.perf_counter() - middle}
    return Lowered(stage, parts, seconds)


def build(program: Program, mesh: Mesh | AbstractMesh) -> Parts:
    """The function and the arguments of a program, on a mesh.

    Raises:
        Eagle3Error: a target or draft that is not there, or does not fit.
    """
    target, draft = abstract_target(program), None
    if program.draft is not None:
        draft = abstract_draft(program, target)
        check_pair(draft.config, target.config)
    context = program.prompt + program.max_new_tokens
    if context > target.config.max_position:
        raise Eagle3Error(f"{context} tokens pass the target's context of {target.config.max_position}")
    config = GenerationConfig(
        max_new_tokens=program.max_new_tokens,
        speculation=parse_speculation(program.speculation),
        transforms=program.transforms,
        block_size=program.block_size,
        prefill_chunk=program.prefill_chunk,
    )
    setup = Setup(target, NoDrafter() if draft is None else Eagle3Drafter(draft), config)
    target_params = abstract_weights(target, mesh)
    draft_params = () if draft is None else abstract_weights(draft, mesh)
    params, request = (target_params, draft_params), _request(program, mesh)

    def fill(params: Any, *request: Any) -> Any:
        return prefill(setup, params, *request)

    def play(params: Any, sampling: Any, state: Any) -> Any:
        return decode_round(setup, params, sampling, state)

    def generate(params: Any, *request: Any) -> Any:
        return result(run_rounds(setup, params, request[-1], fill(params, *request), program.max_new_tokens))

    state = jax.eval_shape(fill, params, *request)
    state = _at(state, state_shardings(state, mesh))
    pools = (state.pools, state.draft_cache)
    function, arguments, donated = {
        "prefill": (fill, (params, *request), None),
        "round": (play, (params, request[-1], state), 2),
        "generate": (generate, (params, *request), None),
    }[program.what]
    return Parts(setup, function, arguments, donated, target_params, draft_params, pools)


def _request(program: Program, mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """Abstract token ids, lengths, keys and sampling wishes."""
    batch = program.batch
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, program.prompt), (batch,)))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    sampling = Sampling.make(batch, eos_ids=tuple(range(_EOS_IDS)))
    request = (ids, lengths, keys, sampling)
    place = NamedSharding(mesh, PartitionSpec(row_axis(batch, mesh)))
    return _at(request, jax.tree.map(lambda _: place, request))


def _at(tree: Any, places: Any) -> Any:
    """Abstract arrays with their shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def abstract_weights(model: Decoder | Eagle3, mesh: Mesh | AbstractMesh) -> Any:
    """A model's abstract weights, with their shardings."""
    params = abstract_params(model)
    return _at(params, weight_shardings(params, mesh))


def abstract_target(program: Program) -> Decoder:
    """The module of a program's target.

    Raises:
        Eagle3Error: no such target, or settings that do not fit it.
    """
    config = read_target_config(program.target)
    if program.layers is not None:
        if not 1 <= program.layers <= config.num_layers:
            raise Eagle3Error(f"{program.layers} layers: {program.target} has {config.num_layers}")
        changes: dict[str, Any] = {"num_layers": program.layers}
        if windows := getattr(config, "windows", ()):
            changes["windows"] = windows[: program.layers]
        config = dataclasses.replace(config, **changes)
    formats = weight_formats(program.dtype, config.tied)
    module: Any = FAMILIES[config.family].model
    return _narrowed(module, dataclasses.replace(config, dtype=program.dtype, weights=formats), program, "target")


def abstract_draft(program: Program, target: Decoder) -> Eagle3:
    """The module of a program's draft.

    Raises:
        Eagle3Error: no such draft, or settings that do not fit it.
    """
    settings = dict(program.draft_settings)
    if program.draft == NEW:
        known = ("draft_vocab_size", "taps", "intermediate_size", "rope_theta", "fc_norm", "norm_output")
        if odd := sorted(set(settings) - set(known)):
            raise Eagle3Error(f"a new draft has no setting {odd[0]!r:.40}; it has {', '.join(known)}")
        _check_settings(settings, target.config.vocab_size)
        config = draft_config(target.config, **{"draft_vocab_size": 0, **settings})
        config = dataclasses.replace(config, dtype=program.dtype, weights=weight_formats(program.dtype))
    else:
        assert program.draft is not None
        _, folder = locate(program.draft, "draft")
        where = str(folder / "config.json")
        overrides = Overrides.read({**settings, "dtype": program.dtype})
        facts = TargetFacts.of(target.config)
        config = parse_draft(read_config(folder), open_draft_folder(folder), facts, where, overrides).config
    return _narrowed(Eagle3, config, program, "draft")


def _check_settings(settings: dict[str, Any], vocab_size: int) -> None:
    """Refuse settings of a new draft that are not of the kind `draft_config` takes; make a tuple of its taps.

    Raises:
        Eagle3Error: another kind of value, or more draft tokens than the target has.
    """
    fields = Fields(settings, "a new draft")
    for name in {"fc_norm", "norm_output"}.intersection(settings):
        fields.flag(name)
    if "rope_theta" in settings:
        fields.number("rope_theta", above=1.0)
    for name in {"draft_vocab_size", "intermediate_size"}.intersection(settings):
        if settings[name] != 0:  # the target's
            fields.size(name)
    if (size := settings.get("draft_vocab_size", 0)) > vocab_size:
        raise Eagle3Error(f"a new draft cannot have {size} of the target's {vocab_size} tokens; leave some out")
    if "taps" in settings:
        taps = settings["taps"]
        if not isinstance(taps, list | tuple) or not all(type(k) is int for k in taps):
            raise Eagle3Error(f"a new draft's taps are {taps!r:.80}; a list such as [2, 15, 27] is needed")
        settings["taps"] = tuple(taps)


def _narrowed(module: Any, config: Any, program: Program, side: str) -> Any:
    """A module whose matrices, but those to be kept, are in the program's narrow format for that side."""
    config = dataclasses.replace(config, weights=dataclasses.replace(config.weights, layout=program.layout))
    name, kept = getattr(program, f"{side}_format"), getattr(program, f"{side}_kept")
    if name is None:
        return module(config)
    check_format(name)
    if name not in NARROW_FORMATS:
        raise Eagle3Error(f"{side} format {name} is wide; set dtype, or use {', '.join(NARROW_FORMATS)}")
    mode = chosen_mode(name, None, narrow=True)
    patterns = read_patterns(kept, f"{side}_kept")
    exceptions, activations = dict[str, tuple[str, str]](), []
    for path, fmt, layout in config.weights.exceptions:
        exceptions[path] = (fmt, layout)
    for path, weight in named_weights(abstract_params(module(config))).items():
        if stays(path, weight, patterns):
            continue
        if not NARROW_FORMATS[name].fits((*weight.shape[:-2], weight.shape[-1], weight.shape[-2])):
            raise Eagle3Error(f"{path} takes {weight.shape[-2]} inputs, which {name} cannot group; keep it")
        exceptions[path] = (name, "nk")
        if mode != "wide":
            activations.append((path, mode))
    listed = tuple((path, *how) for path, how in exceptions.items())
    weights = dataclasses.replace(config.weights, exceptions=listed, activations=tuple(activations))
    return module(dataclasses.replace(config, weights=weights))
