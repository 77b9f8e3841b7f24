"""``rskip prepare``, and the steps on text of data-prep/common.sh; no torch, no fairseq."""
