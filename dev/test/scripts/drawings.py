"""
Draws with scripts/eval in FOLDER, and checks what can be checked without looking:

    drawings.py FOLDER

that ticks are round numbers; the bands of positions.py: of L(i) the standard errors of sequences, where the
file has them for the same window, and of seeds, of P(l) the seeds; the colour bars of needle.py and maps.py.
"""
import json
import sys
from pathlib import Path

import picture

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts/eval")]
import maps  # noqa: E402
import needle  # noqa: E402
import plots  # noqa: E402
import positions  # noqa: E402


def ticks():
    for low, high, base, expected in (
            (0.4, 1.5, 10, [0.5, 1]), (0.4, 3, 10, [0.5, 1, 2]), (1, 1e7, 10, [10**e for e in range(8)]),
            (1, 16384, 2, [4**e for e in range(8)]), (0.98, 1.02, 10, [0.98, 0.99, 1, 1.01, 1.02])):
        found = plots.logarithmic(low, high, base)
        assert set(expected) <= {round(t, 9) for t in found} and len(found) <= 8, found
    found = [plots.plain(v) for v in (16384.0, 0.25, -1e-9, 1e7, -0.5)]
    assert found == ["16384", "0.25", "0", "10000000", "-0.5"], found


def bands(folder):
    T = 300
    for name, loss, errors in (("a", 2, 0.3), ("b", 2.2, 0.4), ("none", 2, None)):
        result = {"loss": [loss] * T, "loss_error_window": 101, "loss_error": errors and [errors] * T}
        (folder / f"{name}.json").write_text(json.dumps(result))
    a, b, none = (positions.read_eval(folder / f"{name}.json") for name in ("a", "b", "none"))
    for results, window, error, *sources in (
            ([a], 101, 0.3, True, False), ([a], 99, None, False, False), ([none], 101, None, False, False),
            ([a, b], 101, (0.125 + 0.01)**0.5, True, True), ([a, b], 99, 0.1, False, True),
            ([a, none], 101, 0, False, True)):
        curves = [positions.smooth(r["loss"], window) for r in results]
        errors, *found = positions.standard_errors(results, curves, window)
        assert found == sources and len(errors) == (T if any(found) else 0), (found, sources)
        assert all(abs(e - error) < 1e-9 for e in errors), (errors[0], error)
    path = folder / "bands.svg"
    of = "bands: ± standard error of "
    for groups, labels, captions, count in (
            ({"x": [a, b], "y": [a]}, "xy", [of + "sequences and seeds", "bands: lowest to highest seed"], 3),
            ({"y": [a]}, "y", [of + "sequences"], 1), ({"y": [none]}, "y", [], 0)):
        positions.draw(path, groups, [])
        picture.check(path, labels)
        assert [text for text in picture.captions(path) if "bands" in text] == captions
        assert path.read_text().count("fill-opacity: 0.2") == count


def colour_bars(folder):
    import numpy
    path = folder / "cells.svg"
    needle.draw(path, [[10, 1], [4, 7]], [1024, 2048], [0, 100], 1024)
    picture.check(path, [])
    texts = picture.captions(path)
    assert "mean score, 10: found" in texts and "dashed line: training length, 1024 tokens" in texts, texts
    c = -numpy.arange(1.0, 601)
    tensors = {"half_life": numpy.array([[0.7, 1000]]), "pruned_share": numpy.array([[0.5, 0]]),
               "effective_window": numpy.array([[2, 7]]), "layers": numpy.array([0]),
               "queries": numpy.arange(600), "0.0.cum_logf": c, "0.0.largest": numpy.full(600, 0.9), "0.0.key": numpy.arange(600)}
    maps.draw_maps(path, tensors, [(0, 0)])
    picture.check(path, [])
    assert {"F", "attention"} <= set(picture.captions(path)), picture.captions(path)
    assert {"128", "512"} <= set(picture.ticks(path)), picture.ticks(path)
    forgets = maps.forget_map(-numpy.arange(4096) * 50.0, numpy.arange(7, 4096, 16))  # all but F[i][i] at once
    assert (forgets.max(axis=1) == 1).all() and forgets.shape == (200, 200), forgets.max(axis=1)
    for shares, panels in ((tensors["pruned_share"], 1), (numpy.zeros((1, 2)), 0)):
        maps.draw_heads(path, {**tensors, "pruned_share": shares})
        picture.check(path, [])
        texts = picture.captions(path)
        assert texts.count("half-life, tokens") == texts.count("effective window, tokens") == 1, texts
        assert texts.count("pruned share of blocks") == panels, texts


if __name__ == "__main__":
    ticks()
    bands(Path(sys.argv[1]))
    colour_bars(Path(sys.argv[1]))
