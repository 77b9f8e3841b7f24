"""The steps of data-prep/prepare-*.sh, run as ``python -m fairseq_rskip.tools.prepare.NAME``; no torch, no fairseq."""
