"""Registers every architecture with fairseq; ``import fairseq_rskip.models`` does it without ``--user-dir``."""

import importlib.util
import logging

from fairseq_rskip import compat

if importlib.util.find_spec("fairseq._today") is None:
    compat.prepare()
    logging.getLogger(__name__).warning(
        "fairseq did not come from tools/build_fairseq.py: it reads checkpoints without an allow-list, and needs the "
        "torch and numpy of its own time (docs/fairseq.md)"
    )

from fairseq_rskip.models import _help, skip_transformer  # noqa: E402

_help.show_model_options(skip_transformer.SkipTransformerModel)
