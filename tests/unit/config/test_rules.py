"""Rules over several keys: each one broken alone, each one just kept.

Rules on the number of processes: test_check.py. Settings without effect: test_without_effect.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import load_config, to_yaml
from tests.support.sample_configs import TAUGHT, complaints, load_tree, read_table

# Overrides, and how the only complaint begins.
OF_RUNS = """
student={architecture: null}
    -> student: neither student.hf nor student.architecture nor student.checkpoint is given
parallel.sequence=true
parallel.tensor=2
data.sequence_length=65
    -> data.sequence_length = 65: with parallel.sequence it must be a multiple of
       parallel.tensor * parallel.context = 2
parallel.context=2
data.sequence_length=66
    -> data.sequence_length = 66: with parallel.context = 2 it must be a multiple of 2 *
       parallel.context = 4
parallel={pipeline: 2, layers_per_stage: {student: [4]}}
    -> parallel.layers_per_stage.student = [4]: 1 number, but parallel.pipeline = 2 needs one for
       each of 2 stages; list 2
parallel={pipeline: 2, layers_per_stage: {student: [4, 0]}}
    -> parallel.layers_per_stage.student = [4, 0]: each stage needs a layer; write 1 or more
parallel={pipeline: 2, virtual_pipeline: 2, layers_per_stage: {student: [2, 2]}}
    -> parallel.layers_per_stage.student = [2, 2]: 2 numbers, but parallel.pipeline = 2 times
       parallel.virtual_pipeline = 2 needs one for each of 4 stages; list 4
student.fp8=hybrid
    -> student.fp8 = 'hybrid': of a teacher only; set train.fp8=hybrid and remove it
train.fp8=hybrid
    -> train.fp8 = 'hybrid': needs train.precision = 'bf16', not 'fp32'; set train.precision=bf16
       or train.fp8=null
train={fp8: e4m3, precision: bf16}
runtime.transformer_engine=off
    -> train.fp8 = 'e4m3': needs Transformer Engine, and runtime.transformer_engine = 'off'
teacher.fp8=e4m3
train.precision=bf16
runtime.device=cpu
    -> teacher.fp8 = 'e4m3': needs a GPU, and runtime.device = 'cpu'; set teacher.fp8=null
teacher={fp8: e4m3, shard_weights: true}
train.precision=bf16
    -> teacher.shard_weights = true: with teacher.fp8 = 'e4m3' Transformer Engine stores FP8 copies
       of all weights on each rank; set one of the two only
train={fp8: e4m3, precision: bf16}
data.sequence_length=40
    -> train.fp8 = 'e4m3': 40 tokens of a micro-batch on a rank (data.sequence_length *
       train.micro_batch_size / 1); FP8 needs a multiple of 16
objective.terms=[{alignment: likelihood}]
teacher={fp8: e4m3, sequence_length: 40}
train.precision=bf16
    -> teacher.fp8 = 'e4m3': 40 tokens of a micro-batch on a rank (teacher.sequence_length *
       train.micro_batch_size / 1); FP8 needs a multiple of 16
data.sources.0.format=jsonl
    -> data.sources.0.paths = []: format jsonl needs at least one path
data.validation_sources=[{format: text}]
    -> data.validation_sources.0.paths = []: format text needs at least one path
data.sources=[{format: jsonl, paths: a/text.jsonl}, {format: text, paths: b/text.txt}]
    -> data.sources.1.name = 'text': data.sources.0 has the same name in the log; set another
       name for one of the two
data.validation_sources=[{format: python_stdlib, name: a}, {format: text, paths: a}]
    -> data.validation_sources.1.name = 'a': data.validation_sources.0 has the same name in the
       log; set another name for one of the two
data.sources=[{format: text, paths: a, conversation: {}}]
    -> data.sources.0.conversation: format text has no conversations, only jsonl, parquet,
       arrow; remove the section or change data.sources.0.format
data.sources=[{format: jsonl, paths: a, conversation: {}}]
data.isolate_documents=false
    -> data.isolate_documents = false: no attention may cross from one conversation to another
       in a sequence; set it to true
data.tokenizer={train_vocab_size: null}
    -> data.tokenizer: set one of data.tokenizer.path, data.tokenizer.encoding,
       data.tokenizer.train_vocab_size, student.hf, teacher.hf or teacher.store
data.tokenizer.path=tok
    -> data.tokenizer.path = 'tok' and data.tokenizer.train_vocab_size = 512: set only one of
       them
data.tokenizer.encoding=gpt2
    -> data.tokenizer.encoding = 'gpt2' and data.tokenizer.train_vocab_size = 512: set only one
       of them
data.sources=[{format: megatron, paths: corpus}]
    -> data.tokenizer.train_vocab_size = 512: data.sources.0 is already tokenised; set
       data.tokenizer.path to the folder of its tokenizer
objective={ce_weight: 0, terms: []}
    -> objective.ce_weight = 0.0 and objective.terms = []: there is no loss; raise
       objective.ce_weight or add a term
objective.terms=[{weight: 0.5}, {divergence: reverse_kl}, {weight: 2.0}]
    -> objective.terms.2 differs from objective.terms.0 in its weight at most; keep one of them,
       with the sum of the weights
schedule.decay=wsd
    -> schedule.wsd_decay_steps is required with schedule.decay = 'wsd'; set it to the number of
       updates of the final decay
schedule={decay: wsd, warmup_steps: 2, wsd_decay_steps: 2, decay_steps: 3}
    -> schedule.warmup_steps = 2 and schedule.wsd_decay_steps = 2 take more than
       schedule.decay_steps = 3
schedule.min_learning_rate=1e-3
    -> schedule.min_learning_rate = 0.001 is above optimizer.learning_rate = 0.0003
schedule.warmup_steps=2
schedule.initial_learning_rate=0.001
    -> schedule.initial_learning_rate = 0.001 is above optimizer.learning_rate = 0.0003
train.micro_batch_size=3
    -> train.global_batch_size = 4: not a multiple of train.micro_batch_size = 3
validation.samples=5
data.validation_fraction=0
    -> validation.samples = 5 but nothing is held out
runtime={device: cpu, backend: nccl}
    -> runtime.backend = 'nccl' needs runtime.device = 'cuda', not 'cpu'; set runtime.backend to
       'gloo' or 'auto'
"""
OF_SOURCES = """
student={hf: folder}
    -> student.hf = 'folder' and student.architecture are both given
student={architecture: null, hf: folder, checkpoint: folder}
    -> student.hf = 'folder' and student.checkpoint are both given
teacher={hf: folder}
    -> teacher.hf = 'folder' and teacher.architecture are both given
student.num_layers=2
    -> student.num_layers = 2: takes layers from student.hf or student.checkpoint; set one of
       these and remove
student.keep_layers=[0, 1]
    -> student.keep_layers = [0, 1]: takes layers from student.hf or student.checkpoint; set one
       of these and remove
student={checkpoint: folder, num_layers: 2}
    -> student.num_layers = 2: takes layers from student.hf or student.checkpoint; set one of
       these and remove
teacher={architecture: null, hf: folder, num_layers: 2}
    -> teacher.num_layers = 2: only a student can be pruned
teacher={architecture: null, hf: folder, keep_layers: [0]}
    -> teacher.keep_layers = [0]: only a student can be pruned
student={architecture: null, hf: folder, num_layers: 2, keep_layers: [0, 1]}
    -> student.keep_layers and student.num_layers are both given; set only one of the two
student={architecture: null, hf: folder, keep_layers: [2, 1]}
    -> student.keep_layers = [2, 1]: list
student={architecture: null, hf: folder, keep_layers: [1, 1]}
    -> student.keep_layers = [1, 1]: list
student={architecture: null, hf: folder, keep_layers: [-1, 1]}
    -> student.keep_layers = [-1, 1]: list
student={architecture: null, hf: folder, num_layers: 0}
    -> student.num_layers
student={architecture: null, hf: folder, keep_layers: []}
    -> student.keep_layers
"""
OF_MODELS = """
student.architecture.num_kv_heads=3
    -> student.architecture.num_kv_heads = 3: must divide
       student.architecture.num_attention_heads = 4
teacher.architecture.hidden_size=66
    -> teacher.architecture.hidden_size = 66: not a multiple of
student.architecture.head_size=15
    -> student.architecture.head_size = 15: rotary positions need an even head size
teacher.architecture.max_position_embeddings=63
    -> data.sequence_length = 64: more than teacher.architecture.max_position_embeddings = 63
parallel.tensor=4
student.architecture.num_kv_heads=4
teacher.architecture.num_kv_heads=4
student.architecture.num_attention_heads=4
teacher.architecture={num_attention_heads: 2, num_kv_heads: null}
    -> parallel.tensor = 4: does not divide teacher.architecture.num_attention_heads = 2; use 1
       or 2
parallel.tensor=4
teacher.architecture.num_kv_heads=null
student.architecture={num_attention_heads: 12, num_kv_heads: 6, hidden_size: 96}
    -> parallel.tensor = 4: neither divides student.architecture.num_kv_heads = 6 nor is a
       multiple of it; use 1, 2, 3, 6 or 12
parallel.tensor=12
teacher.architecture={num_attention_heads: 12, num_kv_heads: null, hidden_size: 96,
  ffn_hidden_size: 96}
student.architecture={num_attention_heads: 12, num_kv_heads: 1, hidden_size: 96,
  ffn_hidden_size: 96}
    -> parallel.tensor = 12: does not divide the 12 + 2 * 1 heads of
       student.architecture.head_size = 8
parallel={pipeline: 2, layers_per_stage: {student: [3, 2]}}
    -> parallel.layers_per_stage.student = [3, 2]: 5 layers in all, but
       student.architecture.num_layers = 4; change the numbers so that their sum is 4
parallel={layers_per_stage: {teacher: [1]}}
    -> parallel.layers_per_stage.teacher = [1]: 1 layer in all, but
       teacher.architecture.num_layers = 4
parallel.tensor=2
student.architecture.ffn_hidden_size=129
    -> parallel.tensor = 2: does not divide student.architecture.ffn_hidden_size = 129
parallel={tensor: 2, sequence: true}
student.architecture.moe={num_experts: 4, ffn_hidden_size: 33}
    -> parallel.tensor = 2: does not divide student.architecture.moe.ffn_hidden_size = 33
parallel={tensor: 2, sequence: true, expert: 2}
student.architecture.moe={num_experts: 4, ffn_hidden_size: 33, shared_ffn_hidden_size: 35}
    -> parallel.tensor = 2: does not divide student.architecture.moe.shared_ffn_hidden_size = 35
parallel={pipeline: 2, virtual_pipeline: 2}
student.architecture.num_layers=3
    -> parallel.pipeline = 2 times parallel.virtual_pipeline = 2: more stages than
       student.architecture.num_layers = 3; each stage needs a layer
parallel.pipeline=2
parallel.virtual_pipeline=2
teacher.architecture.num_layers=1
    -> parallel.pipeline = 2: more stages than teacher.architecture.num_layers = 1
student.architecture={head_size: 16, rotary_fraction: 0.2}
    -> student.architecture.rotary_fraction = 0.2: rotates 3 of the 16 dimensions of a head;
       this must be an even number above 0
student.architecture={head_size: 16, rotary_fraction: 0.01}
    -> student.architecture.rotary_fraction = 0.01: rotates 0 of the 16 dimensions of a head;
       this must be an even number above 0
student.architecture.rope_scaling={kind: llama3, factor: 2, low_frequency_factor: 4,
  high_frequency_factor: 4}
    -> student.architecture.rope_scaling.high_frequency_factor = 4.0: must be more than
       low_frequency_factor = 4.0
student.architecture={sliding_window: 8, sliding_layers: [0, 4]}
    -> student.architecture.sliding_layers = [0, 4]: there is no layer 4; with
       student.architecture.num_layers = 4 the layers are 0 to 3, counted from 0
student.architecture={positions: learned, embedding_scale: 8}
    -> student.architecture.embedding_scale = 8.0: would also scale the position embeddings of
       student.architecture.positions = learned; set positions=rope or embedding_scale=1
student.architecture={attention_softcap: 50, attention_dropout: 0.1}
    -> student.architecture.attention_dropout = 0.1: not supported with
       student.architecture.attention_softcap; set attention_dropout=0
student.architecture.moe={num_experts: 4, top_k: 2}
student.architecture.post_norms=true
    -> student.architecture.post_norms = true: not supported with experts
       (student.architecture.moe); set post_norms=false or moe=null
student.architecture.moe={num_experts: 4, top_k: 1}
    -> student.architecture.moe.top_k = 1: with renormalize = true
student.architecture.moe={num_experts: 4, dense_layers: [1, 0]}
    -> student.architecture.moe.dense_layers = [1, 0]: list layers in ascending order
student.architecture.moe={num_experts: 4, dense_layers: [0, 1, 2, 3]}
    -> student.architecture.moe.dense_layers = [0, 1, 2, 3]: all layers, so that none has
       experts; set student.architecture.moe=null
student.architecture.moe={num_experts: 4, shared_ffn_hidden_size: 9}
student.architecture.linear_bias=true
    -> student.architecture.moe.shared_ffn_hidden_size = 9: a shared expert has no biases
student.architecture.moe={num_experts: 4, correction_bias: true}
    -> student.architecture.moe.correction_bias = true: needs scores between 0 and 1
student.architecture.moe={num_experts: 4, score: sigmoid, renormalize: false}
    -> student.architecture.moe.renormalize = false: sigmoid scores are always normalised
student.architecture.moe={num_experts: 4, groups: 2}
    -> student.architecture.moe.groups = 2 and student.architecture.moe.groups_per_token = null:
       set both or neither
student.architecture.moe={num_experts: 4, groups: 3, groups_per_token: 1}
    -> student.architecture.moe.groups = 3: does not divide
       student.architecture.moe.num_experts = 4; use 1, 2 or 4
student.architecture.moe={num_experts: 4, top_k: 4, groups: 2, groups_per_token: 1}
    -> student.architecture.moe.groups_per_token = 1: must be at most
student.architecture.moe={num_experts: 2, top_k: 3}
    -> student.architecture.moe.top_k = 3: more than student.architecture.moe.num_experts = 2
student.architecture.moe={num_experts: 4, top_k: 2}
parallel.expert=3
    -> parallel.expert = 3: does not divide student.architecture.moe.num_experts = 4; use 1, 2
       or 4
student.architecture.moe={num_experts: 4, top_k: 2}
parallel.tensor=2
    -> parallel.sequence = false: student.architecture.moe with parallel.tensor = 2 needs
       sequence parallelism; set parallel.sequence=true
"""
OF_FEATURES = """
teacher={architecture: null, store: stores/t}
objective.features=[{student: 1, teacher: 2}]
    -> objective.features: 1 feature loss, but teacher.store has no hidden states; set
       teacher.hf or teacher.checkpoint in its place, or objective.features=[]
objective.features=[{student: 1}]
    -> objective.features.0: set objective.features.0.student and objective.features.0.teacher,
       or objective.features.0.match for all layers
objective.features=[{match: last, teacher: 2}]
    -> objective.features.0.match = 'last' pairs all layers, but objective.features.0.teacher
objective.features=[{student: 5, teacher: 2}]
    -> objective.features.0.student = 5: the student has layers 1 to 4, counted from 1; lower it
objective.features=[{student: 4, teacher: 3}]
teacher.architecture.num_layers=2
    -> objective.features.0.teacher = 3: the teacher has layers 1 to 2, counted from 1; lower it
objective.features=[{match: last}]
teacher.architecture.num_layers=1
    -> objective.features.0.match = 'last': the teacher has 1 layer, fewer than the student's 4
objective.features=[{student: 2, teacher: 2}, {match: uniform}]
    -> objective.features.1 and objective.features.0 both have the mse loss of student layer 2
       and teacher layer 2. Keep one of them, with the sum of the weights
objective.features=[{match: last}, {match: uniform}]
    -> objective.features.1 and objective.features.0 both have the mse loss of student layer 1
       and teacher layer 1. Keep one of them, with the sum of the weights
"""
OF_BALANCES = """
objective.balance.mode=schedule
objective.ce_weight_schedule={to: 0.5}
    -> objective.ce_weight_schedule.steps is required with objective.ce_weight_schedule.kind =
       'linear'; set the number of optimizer steps of the change
objective.balance.mode=schedule
objective.terms=[{temperature_schedule: {to: 0, steps: 3}}]
    -> objective.terms.0.temperature_schedule.to = 0.0: a temperature must be above 0; raise it
objective.balance.mode=schedule
objective.terms=[{temperature_schedule: {to: 2, steps: 3}}, {temperature_schedule: {to: 2, steps:
  4, kind: cosine}, weight: 2}]
    -> objective.terms.1 differs from objective.terms.0 in its weight at most; keep one of them,
       with the sum of the weights
objective.balance.mode=magnitude
objective.ce_weight=0
    -> objective.ce_weight = 0.0: objective.balance.mode = 'magnitude' scales distillation to
       the cross-entropy; raise it, or set objective.balance.mode=schedule
objective.balance.mode=gradient_norm
objective.ce_weight_schedule={to: 0, steps: 3}
    -> objective.ce_weight_schedule.to = 0.0: objective.balance.mode = 'gradient_norm' scales
objective.balance.mode=magnitude
objective.terms=[{top_k: 4, support: raw}]
    -> objective.terms.0.support = 'raw': this loss can be negative, and objective.balance.mode
       = 'magnitude' needs positive ones; use 'tail' or 'renormalized', or
       objective.balance.mode=gradient_norm
objective.balance.mode=magnitude
objective.terms=[{alignment: projection, published: true}]
    -> objective.terms.0.published = true: the published loss can be zero or negative, and
       objective.balance.mode = 'magnitude' divides by it; set objective.terms.0.published=false,
       or objective.balance.mode=gradient_norm
objective.balance.mode=magnitude
objective.balance={per_microbatch: true, raw_losses: previous}
    -> objective.balance.raw_losses = 'previous': with objective.balance.per_microbatch = true a
       micro-batch has no losses of an earlier step; use 'exact'
objective.balance.mode=magnitude
objective.balance={per_microbatch: true, ema: 0.9}
    -> objective.balance.ema = 0.9 averages over steps, but objective.balance.per_microbatch =
       true takes the ratios of each micro-batch alone; set only one of the two
objective.balance.clamp=0.5
    -> objective.balance.clamp = 0.5: must be
objective.balance.ema=1
    -> objective.balance.ema = 1
objective.balance.mode=schedule
objective.balance.alpha_schedule={steps: 3}
    -> objective.balance.alpha_schedule.to: this key is required
"""
OF_ALIGNMENTS = """
objective.terms=[{alignment: gold, divergence: adaptive_kl}]
    -> objective.terms.0.divergence = 'adaptive_kl' divides one vocabulary into head and tail; it
objective.terms=[{alignment: likelihood}, {}]
    -> objective.terms.1.alignment = null next to terms with an alignment: a teacher has one
       tokenizer; give this term an alignment, or remove it from the others
objective.terms=[{alignment: likelihood}]
objective.features=[{student: 1, teacher: 2}, {student: 1, teacher: 2, loss: attention}]
    -> objective.features.1.loss = 'attention' compares the weights of the same keys, and terms
       with an alignment have a teacher with other tokens; use 'mse' or 'cosine', which compare
       states at the ends of chunks
objective.terms=[{alignment: likelihood}]
data={isolate_documents: false}
    -> data.isolate_documents = false: a chunk's tokens must not be predicted from another
       document; set it to true for terms with an alignment
objective.terms=[{alignment: likelihood}]
data.sources=[{format: megatron, paths: a}]
data.tokenizer={path: a, train_vocab_size: null}
    -> data.sources.0.format = 'megatron': its tokens are of one tokenizer, and terms with an
       alignment need texts; use a source of text
objective.terms=[{alignment: gold}]
teacher={architecture: null, store: a}
    -> objective.terms.0.alignment = 'gold': needs whole distributions, and teacher.store has a
       part. Use 'likelihood' or 'common' with top_k, or set teacher.hf or teacher.checkpoint in
       place of the store
objective.terms=[{alignment: common}]
teacher={architecture: null, store: a}
    -> objective.terms.0.top_k = null: compares all common tokens, and teacher.store has a part. Set
       top_k to at most store.k, or set teacher.hf or teacher.checkpoint in place of the store
objective.terms=[{alignment: likelihood}]
parallel.context=2
teacher.sequence_length=62
    -> teacher.sequence_length = 62: with parallel.context = 2 and parallel.tensor = 1 it must be a
       multiple of 4
teacher.tokenizer.path=a
    -> teacher.tokenizer is set, but no term of the objective has an alignment; set
       objective.terms.0.alignment (docs/cross_tokenizer.md), or remove teacher.tokenizer
student.sequence_length=64
    -> student.sequence_length: the student's is data.sequence_length; set that instead
"""
# With a layout of its own: the problems name its keys, not the student's.
OF_TEACHER_LAYOUTS = """
teacher.parallel.virtual_pipeline=2
    -> teacher.parallel.virtual_pipeline = 2: a teacher runs forward only
teacher.parallel={tensor: 3}
parallel.tensor=2
teacher.architecture={hidden_size: 96, ffn_hidden_size: 192, num_attention_heads: 6,
  num_kv_heads: 3}
objective.features=[{student: 1, teacher: 1, loss: attention}]
    -> objective.features.0.loss = 'attention': sends heads between tensor ranks, and of 2 and 3
       ranks neither number divides the other
teacher.parallel.tensor=8
    -> teacher.parallel.tensor = 8: does not divide teacher.architecture.num_attention_heads = 4
teacher.parallel={context: 2}
data.sequence_length=30
    -> data.sequence_length = 30: with teacher.parallel.context = 2 it must be a multiple of 2 *
       teacher.parallel.context = 4
teacher.parallel.pipeline=2
parallel.layers_per_stage.teacher=[2]
    -> parallel.layers_per_stage.teacher = [2]: 1 number, but teacher.parallel.pipeline = 2 needs
       one
teacher.parallel={tensor: 1}
teacher.offload=true
    -> teacher.offload = true: a teacher with a layout of its own keeps its weights
student.parallel.tensor=2
    -> student.parallel: the student's layout is parallel
"""
TABLES = (OF_RUNS, OF_SOURCES, OF_MODELS, OF_FEATURES, OF_BALANCES, OF_ALIGNMENTS)
BROKEN = [case for text in (*TABLES, OF_TEACHER_LAYOUTS) for case in read_table(text)]
KEPT = [
    ["parallel={tensor: 2, sequence: true, context: 2}"],
    ["teacher={architecture: null, checkpoint: runs/t}", "parallel.expert=2"],
    ["teacher.architecture.vocab_size=501"],
    ["student.architecture.vocab_size=500", "teacher.architecture.vocab_size=501"],
    ["objective.ce_weight=0"],
    ["objective.terms=[]"],
    ["schedule={decay: wsd, warmup_steps: 1, wsd_decay_steps: 2}"],
    ["schedule.min_learning_rate=3e-4"],
    ["optimizer.overlap_param_gather=true"],
    ["validation={interval: 1, samples: 1}"],
    [
        "validation.samples=1",
        "data.validation_fraction=0",
        "data.validation_sources=[{format: text, paths: a}]",
    ],
    ["checkpoint.save=false"],
    ["student={architecture: null, hf: folder}"],
    ["student={architecture: null, checkpoint: folder, keep_layers: [3]}"],
    ["student={architecture: null, hf: folder, keep_layers: [0, 5, 7]}"],
    ["student={architecture: null, hf: folder, num_layers: 1}"],
    ["student.checkpoint=folder"],
    ["runtime={device: auto, backend: nccl}"],
    ["student.architecture.num_kv_heads=1"],
    ["parallel.tensor=4", "student.architecture.num_kv_heads=2"],
    ["parallel.tensor=4", "student.architecture.num_kv_heads=1"],
    ["teacher.architecture={hidden_size: 66, head_size: 8}"],
    ["student.architecture={head_size: 15, positions: learned}"],
    ["teacher.architecture.max_position_embeddings=64"],
    ["parallel={pipeline: 2, virtual_pipeline: 2}", "teacher.architecture.num_layers=2"],
    [
        "student.architecture.moe={num_experts: 4, top_k: 2}",
        "parallel={expert: 2, tensor: 2, sequence: true}",
    ],
    ["parallel={pipeline: 2, virtual_pipeline: 2}", "student.architecture.num_layers=5"],
    [
        "parallel={pipeline: 2, virtual_pipeline: 2, layers_per_stage: {student: [1, 2, 1, 1], "
        "teacher: [3, 1]}}",
        "student.architecture.num_layers=5",
    ],
    ["student.architecture={head_size: 15, rotary_fraction: 0.4}"],
    ["student.architecture={sliding_window: 8, sliding_layers: [3], sliding_rope_base: 500}"],
    ["student.architecture={attention_softcap: 50, post_norms: true, embedding_scale: 8}"],
    ["student.architecture.moe={num_experts: 4, top_k: 1, renormalize: false}"],
    [
        "objective.features=[{student: 1, teacher: 2}]",
        "objective.projector={kind: mlp, hidden_size: 8}",
    ],
    ["objective.features=[{student: 4, teacher: 4}, {student: 4, teacher: 4, loss: cosine}]"],
    ["objective={ce_weight: 0, terms: [], features: [{student: 1, teacher: 2}]}"],
    ["objective.features=[{match: last}]", "teacher={architecture: null, checkpoint: runs/t}"],
    ["objective.terms=[{alignment: likelihood}, {alignment: uld}]", "teacher.sequence_length=48"],
    [
        "objective.terms=[{alignment: likelihood, temperature_schedule: {to: 2, steps: 3}}, "
        "{alignment: common, top_k: 4}]",
        "teacher={architecture: null, store: a}",
    ],
    ["objective.balance.mode=schedule"],
    ["objective.balance.alpha=0.5", "teacher={offload: true, offload_hidden: true}"],
    ["objective.balance.mode=schedule", "objective.ce_weight=0"],
    [
        "objective.balance.mode=schedule",
        "objective.terms=[{weight: 0, weight_schedule: {to: 1, steps: 3}}]",
    ],
    ["objective.balance.mode=gradient_norm", "objective.terms=[{top_k: 4, support: raw}]"],
    [
        "objective.balance.mode=gradient_norm",
        "objective.terms=[{alignment: projection, published: true}]",
    ],
    [
        "teacher.offload_hidden=true",
        "objective.balance={mode: magnitude, ema: 0.9, clamp: 1, epsilon: 1, raw_losses: previous}",
    ],
    ["objective.balance.mode=magnitude", "objective.balance={per_microbatch: true, clamp: 100}"],
    [
        "objective.balance.mode=magnitude",
        "objective.terms=[{temperature_schedule: {to: 2, steps: 3}}, "
        "{temperature_schedule: {to: 3, steps: 3}}]",
        "objective.balance.alpha_schedule={to: 0, kind: cosine, steps: 5, start_step: 2}",
    ],
]


@pytest.mark.parametrize(("overrides", "text"), BROKEN)
def test_a_broken_rule_is_the_only_complaint(
    tmp_path: Path, overrides: list[str], text: list[str]
) -> None:
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    (words,) = text
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize("overrides", KEPT)
def test_a_value_at_a_rule_s_limit_has_no_problem(tmp_path: Path, overrides: list[str]) -> None:
    config = load_tree(tmp_path, TAUGHT, *overrides)
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config
