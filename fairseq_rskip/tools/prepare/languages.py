"""Language codes on the command line."""

import argparse
import re

from fairseq_rskip.errors import did_you_mean

UNDETERMINED = "und"  # ISO 639's code for text whose language nobody has named
# ISO 639-1
TWO_LETTERS = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy
    da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy
    hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li
    ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa
    pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th
    ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
    """.split()
)


def language(text: str) -> str:
    """A type for argparse: a code of ISO 639, two letters or three, such as en, ces.

    A region or a script may follow, as in pt_BR.
    """
    match = re.fullmatch(r"([a-z]{2,3})(_[A-Za-z]+)?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a language code such as en, ces or pt_BR"
        )
    base = match[1]
    if len(base) == 2 and base not in TWO_LETTERS:
        hint = did_you_mean(base, TWO_LETTERS, "expected a code such as en or cs")
        raise argparse.ArgumentTypeError(f"{text!r} is no language of ISO 639; {hint}")
    return text
