"""Registers every architecture with fairseq; ``import fairseq_rskip.models`` does it without ``--user-dir``."""

from fairseq_rskip import compat

compat.apply()

from fairseq_rskip.models import _help, skip_transformer  # noqa: E402

_help.show_model_options(skip_transformer.SkipTransformerModel)
