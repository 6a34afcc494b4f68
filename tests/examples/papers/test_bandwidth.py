"""The bandwidths that examples/papers/bandwidth.py computes are those of the paper."""

import sys

import bandwidth


def test_bandwidths_are_those_of_the_paper():
    close = [
        bandwidth.is_close(bandwidth.needed(method, model, share), figures[name][i])
        for i, share in enumerate(bandwidth.TARGETS)
        for name, model in bandwidth.MODELS.items()
        for method, figures in bandwidth.PAPER.items()
    ]
    assert (sum(close), len(close)) == (65, 75)


def test_bandwidths_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bandwidth.py"])
    bandwidth.main()
    printed = capsys.readouterr().out
    assert len(printed.split("|---|\n")[1].split("\n\n")[0].splitlines()) == 15
    assert "14 of 15 figures agree within 10 %" in printed
