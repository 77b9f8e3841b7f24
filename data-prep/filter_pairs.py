#!/usr/bin/env python3
"""Keep the training pairs whose lengths in subwords are possible and alike, as Moses' clean-corpus-n.perl does for
fairseq: 1 to 250 on either side, neither more than 1.5 times the other."""

import argparse

import lines
from errors import UserError, run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs=2, metavar="source", help="files to read, source and target")
    parser.add_argument("targets", nargs=2, metavar="target", help="files to write")
    parser.add_argument("--max-length", type=int, default=250, help="subwords")
    parser.add_argument("--max-ratio", type=float, default=1.5, help="of one length to the other, either way")
    options = parser.parse_args()
    pairs = kept = 0
    with lines.writing(options.targets[0]) as source_file, lines.writing(options.targets[1]) as target_file:
        for source, target in lines.paired(*map(lines.read, options.sources), options.sources):
            pairs += 1
            short, long = sorted((len(source.split()), len(target.split())))
            if short >= 1 and long <= options.max_length and long <= options.max_ratio * short:
                kept += 1
                source_file.write(source + "\n")
                target_file.write(target + "\n")
        if not kept:
            raise UserError(f"none of the {pairs:,} training pairs is left: see --max-length and --max-ratio")
    print(f"filter: kept {kept:,} of {pairs:,} training pairs")


if __name__ == "__main__":
    run(main)
