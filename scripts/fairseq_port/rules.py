"""The rules that rewrite fairseq 0.12.2's Python source, and the number of places each of them must change.

A rule is a function from a parsed module to edits. ``RULES`` lists them with their reason and the exact count per
file; any other count means that the source is not the one these rules were written for.
"""

from typing import Callable, Dict, Iterator, NamedTuple, Optional, Tuple

from fairseq_port import finders
from fairseq_port.edits import Edit, Source, apply_edits


class UnknownSourceError(Exception):
    """The source is not the one the rules know."""


class Rule(NamedTuple):
    """One rewriting: ``find`` gives its edits, ``counts`` the places it must change per file.

    ``needle`` is a cheap test that a file can be skipped. ``files`` restricts the rule; without it every module of
    ``fairseq`` and ``fairseq_cli`` is searched, so that a place in an unexpected file is noticed, too.
    """

    name: str
    why: str
    find: Callable[[Source], Iterator[Edit]]
    needle: bytes
    counts: Dict[str, int]
    files: Optional[Tuple[str, ...]] = None


RULES = (
    Rule(
        "dataclass-factory",
        "Python 3.11 refuses a dataclass instance as a default",
        finders.dataclass_factories,
        b"dataclass",
        {
            "fairseq/dataclass/configs.py": 11,
            "fairseq/models/transformer/transformer_config.py": 3,
            "fairseq/examples/data2vec/models/data2vec_text.py": 1,
            "fairseq/examples/speech_recognition/new/infer.py": 6,
            "fairseq/examples/wav2vec/unsupervised/models/wav2vec_u.py": 1,
            "fairseq/examples/wav2vec/unsupervised/tasks/unpaired_audio_text.py": 1,
            "fairseq/examples/wav2vec/unsupervised/w2vu_generate.py": 1,
        },
    ),
    Rule(
        "factory-default",
        "the defaults are behind factories now",
        finders.factory_defaults,
        b"__dataclass_fields__",
        {"fairseq/dataclass/initialize.py": 1},
    ),
    Rule(
        "hydra-import",
        "hydra.experimental is gone from the public API",
        finders.hydra_import,
        b"hydra.experimental",
        {"fairseq/dataclass/utils.py": 1},
    ),
    Rule(
        "hydra-version-base",
        "keep hydra 1.1's behaviour (job directory, schema by name), say so explicitly",
        finders.hydra_version_base,
        b"hydra",
        {
            "fairseq/dataclass/utils.py": 1,
            "fairseq_cli/hydra_train.py": 1,
            "fairseq/examples/speech_recognition/kaldi/kaldi_initializer.py": 1,
            "fairseq/examples/speech_recognition/new/infer.py": 1,
            "fairseq/examples/wav2vec/unsupervised/w2vu_generate.py": 1,
        },
    ),
    Rule(
        "hydra-strict",
        "compose() lost its strict argument",
        finders.hydra_strict,
        b"strict=",
        {"fairseq/dataclass/utils.py": 1},
    ),
    Rule(
        "hydra-user-error",
        "a user's mistake is one line under hydra, too",
        finders.hydra_user_error,
        b"hydra_main",
        {"fairseq_cli/hydra_train.py": 1},
        ("fairseq_cli/hydra_train.py",),
    ),
    Rule(
        "hydra-named-nodes",
        "model._name=x reaches an architecture that a plugin registers later",
        finders.hydra_named_nodes,
        b"def cli_main",
        {"fairseq_cli/hydra_train.py": 1},
        ("fairseq_cli/hydra_train.py",),
    ),
    Rule(
        "unknown-architecture",
        "a checkpoint of a plugin that is not loaded: one line says so, where fairseq's own message fails",
        finders.unknown_architecture,
        b"Could not infer model type from",
        {"fairseq/models/__init__.py": 1},
        ("fairseq/models/__init__.py",),
    ),
    Rule(
        "cpu-data-parallel",
        "torch takes device numbers for GPUs only, so --cpu --ddp-backend pytorch_ddp could not start",
        finders.data_parallel,
        b"DistributedDataParallel(",
        {"fairseq/models/distributed_fairseq_model.py": 1},
        ("fairseq/models/distributed_fairseq_model.py",),
    ),
    Rule(
        "whole-copies",
        "checkpoint_last.pt is a copy; killed half way through it, a run could not be resumed",
        finders.whole_copies,
        b"shutil.copyfile",
        {"fairseq/file_io.py": 2},
        ("fairseq/file_io.py",),
    ),
    Rule(
        "safe-checkpoint",
        "checkpoints load with weights_only=True and an allow-list; anything else is refused in one line",
        finders.safe_checkpoint_load,
        b"torch.load",
        {"fairseq/checkpoint_utils.py": 2},
        ("fairseq/checkpoint_utils.py",),
    ),
    Rule(
        "peer-load",
        "objects broadcast by rank 0 of the same run are not files; they hold fairseq's own placeholder class",
        finders.peer_load,
        b"torch.load",
        {"fairseq/distributed/utils.py": 1},
        ("fairseq/distributed/utils.py",),
    ),
    Rule(
        "safe-load",
        "every other torch.load of a file",
        finders.safe_load,
        b"torch.load",
        {
            "fairseq/data/codedataset.py": 3,
            "fairseq/models/speech_to_text/xm_transformer.py": 1,
            "fairseq/models/text_to_speech/vocoder.py": 2,
            "fairseq/modules/quantization/pq/em.py": 3,
            "fairseq/examples/MMPT/mmpt/models/mmfusion.py": 1,
            "fairseq/examples/MMPT/mmpt/tasks/task.py": 1,
            "fairseq/examples/hubert/update_ckpt.py": 1,
            "fairseq/examples/speech_recognition/new/decoders/flashlight_decoder.py": 1,
            "fairseq/examples/speech_recognition/w2l_decoder.py": 1,
            "fairseq/examples/speech_synthesis/preprocessing/denoiser/pretrained.py": 1,
            "fairseq/examples/speech_synthesis/preprocessing/speaker_embedder/__init__.py": 1,
            "fairseq/examples/speech_text_joint_to_text/scripts/convert_model.py": 1,
            "fairseq/examples/textless_nlp/gslm/speech2unit/pretrained/cpc_feature_reader.py": 1,
            "fairseq/examples/textless_nlp/gslm/unit2speech/utils.py": 2,
            "fairseq/examples/textless_nlp/pgslm/data_utils.py": 1,
            "fairseq/examples/textless_nlp/pgslm/naive_decoder.py": 1,
        },
    ),
    Rule(
        "literal-settings",
        "eval() of a setting that may come out of a checkpoint would run whatever stands there",
        finders.literal_settings,
        b"eval(",
        {
            "fairseq/criterions/ctc.py": 1,
            "fairseq/data/audio/raw_audio_dataset.py": 1,
            "fairseq/data/codedataset.py": 1,
            "fairseq/models/fconv.py": 3,
            "fairseq/models/fconv_lm.py": 2,
            "fairseq/models/fconv_self_att.py": 9,
            "fairseq/models/hubert/hubert.py": 1,
            "fairseq/models/lightconv_lm.py": 1,
            "fairseq/models/speech_to_text/s2t_wav_transformer.py": 2,
            "fairseq/models/transformer_lm.py": 1,
            "fairseq/models/wav2vec/wav2vec.py": 2,
            "fairseq/models/wav2vec/wav2vec2.py": 2,
            "fairseq/optim/adafactor.py": 1,
            "fairseq/optim/adam.py": 1,
            "fairseq/optim/adamax.py": 1,
            "fairseq/optim/cpu_adam.py": 1,
            "fairseq/optim/fused_lamb.py": 1,
            "fairseq/utils.py": 3,
            "fairseq_cli/eval_lm.py": 1,
            "fairseq_cli/validate.py": 1,
            "fairseq/examples/criss/save_encoder.py": 1,
            "fairseq/examples/data2vec/models/data2vec_audio.py": 2,
            "fairseq/examples/discriminative_reranking_nmt/drnmt_rerank.py": 1,
            "fairseq/examples/speech_recognition/models/vggtransformer.py": 8,
            "fairseq/examples/speech_recognition/models/w2l_conv_glu_enc.py": 1,
            "fairseq/examples/textless_nlp/pgslm/data_utils.py": 1,
            "fairseq/examples/textless_nlp/pgslm/quantize_f0.py": 1,
            "fairseq/examples/textless_nlp/pgslm/sample/sample.py": 1,
        },
    ),
    Rule(
        "numpy-alias",
        "numpy removed np.float, np.int, np.long and their like, and renamed an argument of percentile",
        finders.numpy_aliases,
        b"np.",
        {
            "fairseq/modules/dynamic_crf_layer.py": 1,
            "fairseq/data/data_utils.py": 2,
            "fairseq/data/language_pair_dataset.py": 1,
            "fairseq/data/token_block_dataset.py": 1,
            "fairseq/examples/MMPT/mmpt/utils/shardedtensor.py": 1,
        },
    ),
    Rule(
        "no-fused-encoder",
        "today's torch refuses the fused encoder path as fairseq calls it, and its version cannot always be parsed",
        finders.no_fused_encoder,
        b'"fb" in torch.__version__',
        {"fairseq/modules/transformer_layer.py": 1, "fairseq/models/transformer/transformer_encoder.py": 1},
    ),
    Rule(
        "torch-amp",
        "torch.cuda.amp is deprecated",
        finders.amp,
        b"torch.cuda.amp",
        {
            "fairseq/optim/amp_optimizer.py": 1,
            "fairseq/tasks/fairseq_task.py": 1,
            "fairseq/examples/attention_head_selection/src/speech_to_text_head_selection.py": 1,
        },
    ),
    Rule(
        "bitarray",
        "bitarray 3 has no util.rindex",
        finders.last_set_bit,
        b"util.rindex",
        {"fairseq/data/huffman/huffman_coder.py": 1},
    ),
    Rule(
        "boolean-mask",
        "masked_fill_ takes boolean masks only",
        finders.boolean_masks,
        b"_mask_for_xformers",
        {"fairseq/modules/multihead_attention.py": 1},
    ),
    Rule(
        "raw-string",
        "Python 3.12 warns of escapes it does not know",
        finders.raw_strings,
        b"\\",
        {"fairseq/models/wav2vec/wav2vec2_asr.py": 1},
    ),
    Rule(
        "prepare",
        "put the allow-list and the warnings in place",
        finders.call_compat,
        b"__all__",
        {"fairseq/__init__.py": 1},
        ("fairseq/__init__.py",),
    ),
    Rule(
        "no-torch-extensions",
        "their C++ files are not in the archive",
        finders.no_torch_extensions,
        b"torch.utils",
        {"setup.py": 1},
        ("setup.py",),
    ),
    Rule(
        "requirements",
        "current hydra and omegaconf, no torchaudio, nothing that only the build needs",
        finders.requirements,
        b"install_requires",
        {"setup.py": 3},
        ("setup.py",),
    ),
)


def rewrite_module(name: str, data: bytes) -> Tuple[bytes, Dict[str, int]]:
    """Apply every rule that concerns the module ``name`` (a path relative to the archive's root).

    Returns the new source and how many places each rule changed; raises ``UnknownSourceError`` naming the rule, the
    file and both counts when a count is not the expected one.
    """
    changed = {}
    for rule in RULES:
        expected = rule.counts.get(name, 0)
        count = 0
        if (rule.files is None or name in rule.files) and rule.needle in data:
            edits = list(rule.find(Source(data)))
            count = sum(edit.counts for edit in edits)
            data = apply_edits(data, edits)
        if count != expected:
            raise UnknownSourceError(f"rule {rule.name}: {name} has {count} places to change, expected {expected}")
        if count:
            changed[rule.name] = count
    Source(data)
    return data, changed
