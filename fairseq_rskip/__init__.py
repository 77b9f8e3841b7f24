"""Skip connections for Transformers and ResNets; the folder is a fairseq plugin (``--user-dir``)."""

__version__ = "0.1.0"


def __getattr__(name):  # importing the package stays cheap: it takes neither torch nor fairseq
    if name == "from_pretrained":
        from fairseq_rskip.pretrained import from_pretrained

        return from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
