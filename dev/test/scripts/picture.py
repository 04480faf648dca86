"""
Checks a picture of scripts/eval/plots.py without looking at it:

    picture.py FILE.svg [LABEL...]

Its ticks are plain numbers, without exponents and offsets; its legend is one column of the labels given, of a
line each; it is small. Used by test_compare.sh and drawings.py.
"""
import re
import sys
import xml.etree.ElementTree as ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def groups(path, begin):
    """Groups whose id begins so."""
    return [g for g in ElementTree.parse(path).iter(SVG + "g") if g.get("id", "").startswith(begin)]


def texts(group):
    """[(text, x)] in a group."""
    return [("".join(t.itertext()), t.get("x")) for t in group.iter(SVG + "text")]


def ticks(path):
    """Labels of ticks; an offset of an axis stands beside the ticks, in the axis's own group."""
    return [text for begin in ("xtick_", "ytick_") for g in groups(path, begin) for text, _ in texts(g)]


def legend(path):
    """[(label, x)]"""
    return [text for g in groups(path, "legend_") for text in texts(g)]


def captions(path):
    return [text for g in groups(path, "axes_") for text, _ in texts(g)]


def check(path, labels):
    found = ticks(path)
    assert len(found) > 3, found
    assert all(re.fullmatch(r"[-−]?\d+(\.\d+)?%?", text) for text in found), found
    assert not any(re.search(r"\de[-+]?\d|^×|^1e", text) for text in captions(path)), captions(path)
    assert [label for label, _ in legend(path)] == list(labels), legend(path)
    assert len({x for _, x in legend(path)}) <= 1, legend(path)
    with open(path) as f:
        assert len(f.read()) < 200_000


if __name__ == "__main__":
    check(sys.argv[1], sys.argv[2:])
