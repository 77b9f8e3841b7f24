"""One function per rewriting: from a parsed module to the edits it needs (``rules.py`` says where each must apply)."""

import ast
import re
from typing import Iterator, Optional

from fairseq_port.edits import Edit, Source, dotted

_ALIASES = {"float": "float", "int": "int", "bool": "bool", "object": "object", "str": "str", "complex": "complex"}
_ALIASES.update({"long": "np.int64", "compat.long": "int"})


def _is_config_instance(node: Optional[ast.AST]) -> bool:
    """``SomeConfig()``: a capital letter and no arguments; omegaconf's ``II("…")`` has one."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id[0].isupper()
        and not node.args
        and not node.keywords
    )


def dataclass_factories(source: Source) -> Iterator[Edit]:
    """``x: T = C()`` and ``x: T = field(default=C())`` get ``default_factory=C``."""
    bare = False
    for cls in source.nodes(ast.ClassDef):
        if not any(dotted(decorator).endswith("dataclass") for decorator in cls.decorator_list):
            continue
        for value in (item.value for item in cls.body if isinstance(item, ast.AnnAssign)):
            if _is_config_instance(value):
                bare = True
                yield source.replace(value, f"field(default_factory={value.func.id})")
            elif isinstance(value, ast.Call) and dotted(value.func) == "field":
                for keyword in value.keywords:
                    if keyword.arg == "default" and _is_config_instance(keyword.value):
                        yield source.replace(keyword, f"default_factory={keyword.value.func.id}")
    if bare:
        yield from _import_field(source)


def _import_field(source: Source) -> Iterator[Edit]:
    imports = next(node for node in source.nodes(ast.ImportFrom) if node.module == "dataclasses")
    if all(alias.name != "field" for alias in imports.names):
        position = source.end(imports.names[-1]) if hasattr(imports.names[-1], "end_lineno") else source.end(imports)
        yield Edit(position, position, ", field", counts=False)


def factory_defaults(source: Source) -> Iterator[Edit]:
    """``FairseqConfig.__dataclass_fields__[k].default`` reads the default from an instance instead."""
    fields = "FairseqConfig.__dataclass_fields__"
    for node in source.nodes(ast.Attribute):
        if node.attr == "default" and isinstance(node.value, ast.Subscript) and dotted(node.value.value) == fields:
            yield source.replace(node, f"getattr(FairseqConfig(), {source.text(node.value.slice)})")


def _import_today(source: Source) -> Iterator[Edit]:
    """Import the copy of compat.py ahead of the module's first import."""
    imports = (node for node in source.tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    first = next((node for node in imports if getattr(node, "module", "") != "__future__"), source.tree.body[0])
    yield Edit(source.start(first), source.start(first), "from fairseq import _today\n", counts=False)


def hydra_import(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.ImportFrom):
        if node.module == "hydra.experimental":
            yield source.replace(node, source.text(node).replace("hydra.experimental", "hydra"))


def hydra_version_base(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "hydra.main" or (isinstance(node.func, ast.Name) and node.func.id == "initialize"):
            yield source.add_keyword(node, 'version_base="1.1"')


def hydra_strict(source: Source) -> Iterator[Edit]:
    """``cfg = compose(..., strict=False)`` sets the flag afterwards, as hydra's own upgrade notes say."""
    for node in source.nodes(ast.Assign):
        call = node.value
        if isinstance(call, ast.Call) and dotted(call.func) == "compose" and call.keywords[-1].arg == "strict":
            kept = ", ".join(source.text(part) for part in call.args + call.keywords[:-1])
            target = source.text(node.targets[0])
            flag = source.text(call.keywords[-1].value)
            yield source.replace(node, f"{target} = compose({kept}); OmegaConf.set_struct({target}, {flag})")


def hydra_user_error(source: Source) -> Iterator[Edit]:
    """hydra prints a traceback for every exception but SystemExit."""
    for function in source.nodes(ast.FunctionDef):
        if function.name == "hydra_main":
            call = function.body[-1].value
            if not isinstance(call, ast.Call):
                continue
            arguments = ", ".join(source.text(argument) for argument in [call.func, *call.args])
            yield source.replace(call, f"_today.exit_on_user_error({arguments})")
            position = source.start(function.decorator_list[0]) - 1
            yield Edit(position, position, "from fairseq import _today\n\n\n", counts=False)


def hydra_named_nodes(source: Source) -> Iterator[Edit]:
    """``cli_main`` lets ``model._name=x`` through to nodes that are empty until a plugin has loaded."""
    for function in source.nodes(ast.FunctionDef):
        if function.name == "cli_main":
            position = source.start(function.body[0])
            yield Edit(position, position, "sys.argv[1:] = _today.hydra_overrides(sys.argv[1:])\n    ")
    first = next(source.nodes(ast.Import))
    yield Edit(source.start(first), source.start(first), "import sys\n", counts=False)


def unknown_architecture(source: Source) -> Iterator[Edit]:
    """``assert model is not None, …``: building that message fails itself, with a KeyError."""
    for node in source.nodes(ast.Assert):
        if source.text(node.test) == "model is not None":
            yield source.replace(node, "if model is None:\n        raise _today.unknown_architecture(model_type)")
    yield from _import_today(source)


def data_parallel(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "DistributedDataParallel":
            arguments = ", ".join(source.text(part) for part in node.keywords)
            yield source.replace(node, f"_today.data_parallel(DistributedDataParallel, {arguments})")
    yield from _import_today(source)


def whole_copies(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "shutil.copyfile":
            yield source.replace(node.func, "_today.copy_whole")
    yield from _import_today(source)


def safe_load(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "torch.load" and all(keyword.arg != "weights_only" for keyword in node.keywords):
            yield source.add_keyword(node, "weights_only=True")


def safe_checkpoint_load(source: Source) -> Iterator[Edit]:
    """The loader of checkpoints goes through the one function that knows the allow-list."""
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "torch.load":
            yield source.replace(node.func, "_today.load_checkpoint")
    yield from _import_today(source)


def peer_load(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "torch.load":
            yield source.add_keyword(node, "weights_only=False")


def literal_settings(source: Source) -> Iterator[Edit]:
    """``eval`` of a setting reads a literal instead: settings stand in checkpoints."""
    calls = [node for node in source.nodes(ast.Call) if isinstance(node.func, ast.Name) and node.func.id == "eval"]
    for node in calls:
        yield source.replace(node.func, "_today.literal")
    if calls:
        yield from _import_today(source)


def numpy_aliases(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Attribute):
        prefix, _, name = dotted(node).partition(".")
        if prefix == "np" and name in _ALIASES:
            yield source.replace(node, _ALIASES[name])
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "np.percentile":
            for keyword in node.keywords:
                if keyword.arg == "interpolation":
                    yield source.replace(keyword, f"method={source.text(keyword.value)}")


def no_fused_encoder(source: Source) -> Iterator[Edit]:
    """Without the look at torch's version the flags that choose the fused path keep their value, False."""
    for node in source.nodes(ast.If):
        if isinstance(node.test, ast.Compare) and source.text(node.test) == '"fb" in torch.__version__':
            yield source.replace(node, "# torch's version no longer chooses the fused path: it stays off")


def amp(source: Source) -> Iterator[Edit]:
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "torch.cuda.amp.autocast":
            arguments = ", ".join(source.text(part) for part in node.args + node.keywords)
            yield source.replace(node, f'torch.autocast("cuda", {arguments})')
        elif dotted(node.func) == "torch.cuda.amp.GradScaler":
            arguments = ", ".join(source.text(part) for part in node.args + node.keywords)
            yield source.replace(
                node,
                f'torch.amp.GradScaler("cuda", {arguments}) if hasattr(torch.amp, "GradScaler")'
                f" else torch.cuda.amp.GradScaler({arguments})",
            )


def last_set_bit(source: Source) -> Iterator[Edit]:
    """``util.rindex(a, 1)`` in terms every version of bitarray has."""
    for node in source.nodes(ast.Call):
        if dotted(node.func) == "util.rindex":
            bits, value = (source.text(argument) for argument in node.args)
            yield source.replace(node, f"len({bits}) - 1 - {bits}[::-1].index({value})")


def boolean_masks(source: Source) -> Iterator[Edit]:
    """The one place where a mask of bytes reaches ``masked_fill_``."""
    for function in source.nodes(ast.FunctionDef):
        if function.name == "_mask_for_xformers":
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and dotted(node.func).endswith(".masked_fill_"):
                    yield source.replace(node.args[0], f"{source.text(node.args[0])}.bool()")


def raw_strings(source: Source) -> Iterator[Edit]:
    """A string with an escape Python does not know becomes a raw string, which reads the same."""
    for node in source.nodes(ast.Constant):
        text = source.text(node) if isinstance(node.value, str) else ""
        if re.match(r"[\"']", text) and re.search(r"(?<!\\)(\\\\)*\\[^\\'\"abfnrtvx0-7NuU\n]", text):
            yield source.replace(node, "r" + text)


def call_compat(source: Source) -> Iterator[Edit]:
    """``fairseq/__init__.py`` prepares torch and the warnings before it imports anything else of fairseq."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            text = "from fairseq import _today\n\n_today.prepare()\n\n"
            yield Edit(source.start(node), source.start(node), text)


def no_torch_extensions(source: Source) -> Iterator[Edit]:
    """setup.py's extensions that need torch at build time; the archive lacks their C++ files."""
    for node in source.nodes(ast.Try):
        if isinstance(node.body[0], ast.ImportFrom) and node.body[0].module == "torch.utils":
            yield source.replace(node, "# no extensions that need torch: their C++ files are not in the archive")


def requirements(source: Source) -> Iterator[Edit]:
    """setup.py's requirements: current hydra and omegaconf, no torchaudio, nothing that only the build needs."""
    drop = ("cffi", "cython", "dataclasses", "torchaudio", "numpy<")
    change = {"hydra-core": "hydra-core>=1.3,<1.4", "omegaconf": "omegaconf>=2.3"}
    change.update({"numpy;": "numpy", "torch": "torch>=2.1"})
    for node in source.nodes(ast.keyword):
        if node.arg == "setup_requires":
            yield source.replace(node.value, "[]")
        elif node.arg == "install_requires":
            kept = [item.value for item in node.value.elts if not item.value.startswith(drop)]
            names = [next((new for old, new in change.items() if name.startswith(old)), name) for name in kept]
            yield source.replace(node.value, repr(names))
        elif node.arg == "zip_safe":
            yield Edit(source.end(node), source.end(node), ', python_requires=">=3.8"')
