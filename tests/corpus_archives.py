"""Small stand-ins for the published archives, laid out as those are, with a list that has their checksums."""

import gzip
import hashlib
import io
import random
import tarfile

SIZES = {"train": 300, "valid": 30, "test": 20}
WORDS = {
    "en": 'the a dog cat house man runs sees big red small well-known says that "quoted" it\'s & 3.5'.split(),
    "de": 'der ein Hund Katze Haus Mann läuft sieht groß rot klein bekannte sagt dass "Zitat" geht\'s & 3,5'.split(),
}


def sentence_pairs(count, seed):
    """Pairs of sentences of 1 to 12 words that translate each other word by word; some targets are far too long."""
    rng = random.Random(seed)
    for _ in range(count):
        words = [rng.randrange(len(WORDS["en"])) for _ in range(rng.randint(1, 12))]
        repeats = 3 if rng.random() < 0.05 else 1
        yield " ".join(WORDS["en"][word] for word in words), " ".join(WORDS["de"][word] for word in words * repeats)


def write_split(prefix, src, tgt, count, seed):
    """Write PREFIX.src and PREFIX.tgt, ``count`` lines each."""
    for lang, side in zip((src, tgt), zip(*sentence_pairs(count, seed))):
        prefix.with_name(f"{prefix.name}.{lang}").write_text("".join(line + "\n" for line in side), encoding="utf-8")


def texts(count, seed):
    """The two sides as bytes."""
    return ["".join(line + "\n" for line in side).encode() for side in zip(*sentence_pairs(count, seed))]


def sgml(text):
    body = "".join(f'<seg id="{n}">{line}</seg>\n' for n, line in enumerate(text.decode().splitlines(), 1))
    return f'<refset setid="x">\n<doc docid="y">\n<p>\n{body}</p>\n</doc>\n</refset>\n'.encode()


def tarball(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_list(folder):
    """``folder``.tsv: every file of the folder, with size, sha256 and a URL that nobody answers."""
    rows = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        rows.append(
            f"{path.name}\t{len(data)}\tsha256:{hashlib.sha256(data).hexdigest()}\thttp://127.0.0.1:9/{path.name}\n"
        )
    path = folder.with_suffix(".tsv")
    path.write_text("".join(rows), encoding="utf-8")
    return path


def multi30k(folder, tgt="de"):
    for seed, (name, size) in enumerate({"train": 300, "val": 30, "test_2016_flickr": 20}.items()):
        for lang, text in zip(("en", tgt), texts(size, seed)):
            (folder / f"{name}.{lang}.gz").write_bytes(gzip.compress(text))


def iwslt15(folder):
    """The training archive alone; tst2012 and tst2013 are published files."""
    for archive, name, size in (
        ("train-en-vi", "train", 300),
        ("dev-2012-en-vi", "tst2012", 30),
        ("test-2013-en-vi", "tst2013", 20),
    ):
        members = {f"{name}.{lang}": text for lang, text in zip(("en", "vi"), texts(size, size))}
        tarball(folder / f"{archive}.tgz", members)


def wmt14(folder, tgt):
    """Both corpora: 40 pairs for each training part, with members that must not be taken beside those that must."""
    pair = f"{tgt}-en"

    def both(prefix, seed, size=40):
        return dict(zip((f"{prefix}.en", f"{prefix}.{tgt}"), texts(size, seed)))

    other = {"training/europarl-v7.cs-en.cs": b"nic\n", "training/europarl-v7.cs-en.en": b"nothing\n"}
    tarball(folder / "training-parallel-europarl-v7.tgz", {**both(f"training/europarl-v7.{pair}", 1), **other})
    tarball(folder / "training-parallel-commoncrawl.tgz", both(f"commoncrawl.{pair}", 2))
    tarball(folder / "training-parallel-nc-v9.tgz", both(f"training/news-commentary-v9.{pair}", 3))
    tarball(folder / "dev.tgz", {**both("dev/newstest2013", 4, 30), **both("dev/newstest2012", 5, 10)})
    source, target = texts(20, 6)
    name = f"test-full/newstest2014-{tgt}en"
    tarball(folder / "test-full.tgz", {f"{name}-src.en.sgm": sgml(source), f"{name}-ref.{tgt}.sgm": sgml(target)})
    if tgt == "fr":
        tarball(folder / "training-parallel-un.tgz", both(f"un/undoc.2000.{pair}", 7))
        giga = {f"{name}.gz": gzip.compress(text) for name, text in both("giga-fren.release2.fixed", 8).items()}
        tarball(folder / "training-giga-fren.tar", giga, "w")
