"""Rules on the shape of one model: within itself, and against the layout."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem, divisors, listed, without_effect
from megatron_distill.config.rules.mixture import expert_problems
from megatron_distill.config.schema import ArchitectureConfig, ModelConfig, ParallelConfig
from megatron_distill.errors import counted

__all__ = ["architecture_problems", "source_problems"]


def architecture_problems(
    architecture: ArchitectureConfig,
    role: str,
    parallel: ParallelConfig,
    sequence_length: int,
    *,
    length_key: str = "data.sequence_length",
) -> Iterator[Problem]:
    """Find problems of the model `role` ('student' or 'teacher') on this layout."""
    name = f"{role}.architecture"
    yield from _heads(architecture, name)
    yield from _positions(architecture, name, sequence_length, length_key)
    yield from _rotations(architecture, name)
    yield from _windows(architecture, name)
    yield from _extras(architecture, name)
    yield from _tensor(architecture, name, parallel)
    chunks = 1 if role != "student" else parallel.virtual_pipeline or 1
    yield from _layers(architecture, name, parallel.pipeline, chunks)
    yield from _layers_per_stage(architecture, role, parallel, chunks)
    yield from expert_problems(architecture, name, parallel)


def _heads(shape: ArchitectureConfig, name: str) -> Iterator[Problem]:
    heads = f"{name}.num_attention_heads"
    if shape.num_kv_heads is not None and shape.num_attention_heads % shape.num_kv_heads:
        yield Problem(
            (heads, f"{name}.num_kv_heads"),
            f"{name}.num_kv_heads = {shape.num_kv_heads}: must divide {heads} = "
            f"{shape.num_attention_heads}",
        )
    if shape.head_size is None and shape.hidden_size % shape.num_attention_heads:
        yield Problem(
            (heads, f"{name}.hidden_size", f"{name}.head_size"),
            f"{name}.hidden_size = {shape.hidden_size}: not a multiple of {heads} = "
            f"{shape.num_attention_heads}; change one of the two or give {name}.head_size",
        )
    elif shape.positions == "rope" and shape.rotary_fraction == 1 and shape.head_width % 2:
        yield Problem(
            (f"{name}.head_size", f"{name}.hidden_size", heads, f"{name}.positions"),
            f"{name}.head_size = {shape.head_width}: rotary positions need an even head size",
        )


def _positions(
    shape: ArchitectureConfig, name: str, length: int, length_key: str
) -> Iterator[Problem]:
    limit = shape.max_position_embeddings
    if limit is not None and length > limit:
        yield Problem(
            (length_key, f"{name}.max_position_embeddings"),
            f"{length_key} = {length}: more than {name}.max_position_embeddings = "
            f"{limit}; shorten the sequences or use a model with more positions",
        )


def _rotations(shape: ArchitectureConfig, name: str) -> Iterator[Problem]:
    if shape.positions == "learned":
        for key, value, default in (
            ("rope_scaling", shape.rope_scaling and shape.rope_scaling.kind, None),
            ("rotary_fraction", shape.rotary_fraction, 1.0),
            ("sliding_rope_base", shape.sliding_rope_base, None),
        ):
            if value != default:
                reason = f"with {name}.positions = 'learned'"
                yield without_effect(f"{name}.{key}", value, reason, instead=default)
        return
    turned = int(shape.head_width * shape.rotary_fraction)
    if shape.rotary_fraction < 1 and (turned % 2 or turned == 0):
        yield Problem(
            (f"{name}.rotary_fraction", f"{name}.head_size"),
            f"{name}.rotary_fraction = {shape.rotary_fraction}: rotates {turned} of the "
            f"{shape.head_width} dimensions of a head; this must be an even number above 0",
        )
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        return
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        yield Problem(
            (
                f"{name}.rope_scaling.high_frequency_factor",
                f"{name}.rope_scaling.low_frequency_factor",
            ),
            f"{name}.rope_scaling.high_frequency_factor = {scaling.high_frequency_factor}: must "
            f"be more than low_frequency_factor = {scaling.low_frequency_factor}",
        )


def _windows(shape: ArchitectureConfig, name: str) -> Iterator[Problem]:
    if shape.sliding_window is None:
        for key, value in (
            ("sliding_layers", shape.sliding_layers),
            ("sliding_rope_base", shape.sliding_rope_base),
        ):
            if value is not None and not (key == "sliding_rope_base" and _is_learned(shape)):
                reason = f"with {name}.sliding_window = null"
                yield without_effect(f"{name}.{key}", value, reason, instead=None)
        return
    outside = [layer for layer in shape.sliding_layers or () if not 0 <= layer < shape.num_layers]
    if outside:
        yield Problem(
            (f"{name}.sliding_layers", f"{name}.num_layers"),
            f"{name}.sliding_layers = {list(shape.sliding_layers or ())}: there is no layer "
            f"{outside[0]}; with {name}.num_layers = {shape.num_layers} the layers are 0 to "
            f"{shape.num_layers - 1}, counted from 0",
        )


def _is_learned(shape: ArchitectureConfig) -> bool:
    return shape.positions == "learned"


def _extras(shape: ArchitectureConfig, name: str) -> Iterator[Problem]:
    if _is_learned(shape) and shape.embedding_scale != 1:
        yield Problem(
            (f"{name}.embedding_scale", f"{name}.positions"),
            f"{name}.embedding_scale = {shape.embedding_scale}: would also scale the position "
            f"embeddings of {name}.positions = learned; set positions=rope or embedding_scale=1",
        )
    if shape.attention_softcap is not None and shape.attention_dropout:
        yield Problem(
            (f"{name}.attention_dropout", f"{name}.attention_softcap"),
            f"{name}.attention_dropout = {shape.attention_dropout}: not supported with "
            f"{name}.attention_softcap; set attention_dropout=0",
        )
    if shape.post_norms and shape.moe is not None:
        yield Problem(
            (f"{name}.post_norms", f"{name}.moe"),
            f"{name}.post_norms = true: not supported with experts ({name}.moe); set "
            "post_norms=false or moe=null",
        )


def _tensor(shape: ArchitectureConfig, name: str, parallel: ParallelConfig) -> Iterator[Problem]:
    tensor = parallel.tensor
    sizes = {
        "num_attention_heads": shape.num_attention_heads,
        "ffn_hidden_size": shape.ffn_hidden_size,
    }
    # Spread over expert ranks, each expert is whole on its rank.
    cuts_experts = parallel.expert == 1
    if shape.moe is not None and shape.moe.ffn_hidden_size is not None and cuts_experts:
        sizes["moe.ffn_hidden_size"] = shape.moe.ffn_hidden_size
    if shape.moe is not None and shape.moe.shared_ffn_hidden_size is not None:
        sizes["moe.shared_ffn_hidden_size"] = shape.moe.shared_ffn_hidden_size
    for key, size in sizes.items():
        if size % tensor:
            yield Problem(
                ("parallel.tensor", f"{name}.{key}"),
                f"parallel.tensor = {tensor}: does not divide {name}.{key} = {size}; "
                f"use {divisors(size)}",
            )
    yield from _key_heads(shape, name, tensor)


def _key_heads(shape: ArchitectureConfig, name: str, tensor: int) -> Iterator[Problem]:
    """More ranks than key heads share each of them: their number must be a multiple of the heads.

    The ranks also share the rows of the joint projection, queries, keys and values, evenly.
    """
    heads, count = shape.num_attention_heads, shape.kv_heads
    if shape.num_kv_heads is None or heads % tensor or heads % count:
        return  # another rule's problem
    keys = ("parallel.tensor", f"{name}.num_kv_heads")
    if count % tensor and tensor % count:
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        fitting = [size for size in sizes if count % size == 0 or size % count == 0]
        yield Problem(
            keys,
            f"parallel.tensor = {tensor}: neither divides {name}.num_kv_heads = {count} nor is a "
            f"multiple of it; use {listed(fitting)}",
        )
    elif tensor > count and (heads + 2 * count) * shape.head_width % tensor:
        yield Problem(
            (*keys, f"{name}.head_size"),
            f"parallel.tensor = {tensor}: does not divide the {heads} + 2 * {count} heads of "
            f"{name}.head_size = {shape.head_width} that the ranks share where {name}.num_kv_heads "
            f"= {count} is smaller; use {divisors(count)}",
        )


def _layers(shape: ArchitectureConfig, name: str, pipeline: int, chunks: int) -> Iterator[Problem]:
    if shape.num_layers >= pipeline * chunks:
        return
    keys = ["parallel.pipeline", f"{name}.num_layers"]
    words = f"parallel.pipeline = {pipeline}"
    if chunks > 1:
        keys.append("parallel.virtual_pipeline")
        words += f" times parallel.virtual_pipeline = {chunks}"
    yield Problem(
        tuple(keys),
        f"{words}: more stages than {name}.num_layers = {shape.num_layers}; each stage needs a "
        "layer: lower parallel.pipeline or raise the depth",
    )


def _layers_per_stage(
    shape: ArchitectureConfig, role: str, parallel: ParallelConfig, chunks: int
) -> Iterator[Problem]:
    layers: tuple[int, ...] | None = getattr(parallel.layers_per_stage, role, None)
    if layers is None or len(layers) != parallel.pipeline * chunks:
        return  # the number of stages is a rule of its own
    if sum(layers) != shape.num_layers:
        key, depth = f"parallel.layers_per_stage.{role}", f"{role}.architecture.num_layers"
        yield Problem(
            (key, depth),
            f"{key} = {list(layers)}: {counted(sum(layers), 'layer')} in all, but {depth} = "
            f"{shape.num_layers}; change the numbers so that their sum is {shape.num_layers}",
        )


def source_problems(model: ModelConfig, role: str) -> Iterator[Problem]:
    """Find contradictions in the source of the model `role` ('student' or 'teacher')."""
    hf, shape, checkpoint = f"{role}.hf", f"{role}.architecture", f"{role}.checkpoint"
    store = f"{role}.store"
    if role == "student" and model.store is not None:
        yield Problem(
            (store,),
            f"{store}: a store has no weights to train; set {hf}, {shape} or {checkpoint}",
        )
    sources = (model.hf, model.architecture, model.checkpoint, model.store)
    if all(source is None for source in sources):
        yield Problem(
            (hf, shape, checkpoint),
            f"{role}: neither {hf} nor {shape} nor {checkpoint} is given. Set {hf} to a Hugging "
            f"Face folder, {shape} to a shape (random weights), or {checkpoint} to a checkpoint",
        )
    for key, value in ((shape, model.architecture), (checkpoint, model.checkpoint)):
        if model.hf is not None and value is not None:
            yield Problem(
                (hf, key), f"{hf} = {model.hf!r} and {key} are both given; set only one of the two"
            )
    for name, instead in (
        ("tokenizer", "data.tokenizer"),
        ("sequence_length", "data.sequence_length"),
    ):
        if role == "student" and getattr(model, name) is not None:
            yield Problem(
                (f"{role}.{name}",), f"{role}.{name}: the student's is {instead}; set that instead"
            )
    yield from _kept_layers(model, role)


def _kept_layers(model: ModelConfig, role: str) -> Iterator[Problem]:
    layers_key, count = f"{role}.keep_layers", f"{role}.num_layers"
    for key, value in ((layers_key, model.keep_layers), (count, model.num_layers)):
        if value is None:
            continue
        setting = f"{key} = {list(value) if isinstance(value, tuple) else value}"
        if role != "student":
            yield Problem((key,), f"{setting}: only a student can be pruned; remove it")
        elif model.architecture is not None or not model.has_weights:
            yield Problem(
                (key, f"{role}.architecture", f"{role}.hf", f"{role}.checkpoint"),
                f"{setting}: takes layers from {role}.hf or {role}.checkpoint; set one of these "
                f"and remove {role}.architecture",
            )
    layers = model.keep_layers
    if layers is not None and model.num_layers is not None:
        yield Problem(
            (layers_key, count), f"{layers_key} and {count} are both given; set only one of the two"
        )
    if layers is not None and (layers[0] < 0 or list(layers) != sorted(set(layers))):
        yield Problem(
            (layers_key,),
            f"{layers_key} = {list(layers)}: list layers in ascending order, counted from 0",
        )
