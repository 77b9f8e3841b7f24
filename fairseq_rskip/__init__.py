"""Skip connections with recursive layer normalization for Transformers, as a fairseq plugin (``--user-dir``)."""

__version__ = "0.1.0"
