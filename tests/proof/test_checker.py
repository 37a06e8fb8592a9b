"""The judge is judged: histories made by hand, each with one thing wrong."""

from __future__ import annotations

import pytest

from tests.proof.checker import Findings, judge, read


def history(*lines: str) -> Findings:
    """Write a history in short: `ack a`, `run a 1@10 0-2 ok` (token 1 in process 10 from 0 to 2), `told a 1`, …."""
    records = []
    for line in lines:
        what, *words = line.split()
        match what:
            case "offer" | "ack":
                records.append({"what": {"offer": "offered", "ack": "acknowledged"}[what], "id": words[0]})
            case "run":
                job, who, when, *how = words
                token, pid = map(int, who.split("@"))
                begun, _, ended = when.partition("-")
                records.append({"what": "begun", "id": job, "token": token, "pid": pid, "at": float(begun)})
                if ended:
                    records.append(
                        {"what": "ended", "id": job, "token": token, "pid": pid, "at": float(ended), "how": how[0]}
                    )
            case "told":
                records.append({"what": "told", "id": words[0], "token": int(words[1]), "how": "succeeded"})
            case "killed":
                records.append({"what": "killed", "pid": int(words[0]), "at": float(words[1])})
            case "stopped":
                at, until = map(float, words[1].split("-"))
                records.append({"what": "stopped", "pid": int(words[0]), "at": at, "until": until})
            case "trouble":
                at, until = map(float, words[0].split("-"))
                records.append({"what": "trouble", "at": at, "until": until})
    return judge(read(records))


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["ack a", "run a 1@10 0-1 ok", "told a 1"], {}),
        (["ack a"], {"lost": ("a",)}),
        (["offer a"], {}),  # it was never acknowledged, so that nothing was promised
        (["offer a", "run a 1@10 0-1 ok"], {}),
        (["ack a", "run a 1@10 0"], {"stuck": ("a",)}),
        (["ack a", "run a 1@10 0-1 failed"], {"stuck": ("a",)}),
        (["ack a", "run a 1@10 0-1 failed", "run a 2@10 2-3 ok", "told a 2"], {}),
        (["ack a", "run a 1@10 0-1 failed", "told a 1"], {}),  # dead: its end was told
        (["run b 1@10 0-1 ok"], {"unexpected": ("b",)}),
        (["ack a", "run a 1@10 0-1 ok", "told a 1", "told a 1"], {}),  # one end, told again after a lost answer
        (
            ["ack a", "run a 1@10 0-1 ok", "told a 1", "run a 2@11 5-6 ok", "told a 2"],
            {"doubled": ("a",), "unjustified": ("a",)},
        ),
        (["ack a", "run a 1@10 0-1 ok", "run a 2@11 5-6 ok", "told a 2"], {"unjustified": ("a",)}),
        (["ack a", "run a 1@10 0", "killed 10 1", "run a 2@11 5-6 ok", "told a 2"], {}),
        (["ack a", "run a 1@10 0", "killed 10 5.5", "run a 2@11 5-6 ok", "told a 2"], {"unjustified": ("a",)}),
        (["ack a", "run a 1@10 0", "killed 12 1", "run a 2@11 5-6 ok", "told a 2"], {"unjustified": ("a",)}),
        (["ack a", "run a 1@10 0-9 ok", "stopped 10 1-8", "run a 2@11 5-6 ok", "told a 2"], {}),
        (["ack a", "run a 1@10 0-2 ok", "stopped 10 3-8", "run a 2@11 5-6 ok", "told a 2"], {"unjustified": ("a",)}),
        (["ack a", "run a 1@10 0-9 ok", "trouble 2-3", "run a 2@11 5-6 ok", "told a 2"], {}),
        (["ack a", "run a 1@10 0-9 failed", "run a 2@11 5-6 ok", "told a 2"], {"unjustified": ("a",)}),
    ],
)  # fmt: skip
def test_the_judge_finds_exactly_the_faults(lines, wrong):
    found = history(*lines)
    parts = ("lost", "unexpected", "doubled", "unjustified", "stuck")
    assert {part: getattr(found, part) for part in parts if getattr(found, part)} == wrong
    assert found.valid == (not wrong)


def test_justified_duplicates_are_counted():
    found = history("ack a", "run a 1@10 0", "killed 10 1", "run a 2@11 5-6 ok", "told a 2")
    assert found.duplicates == 1
    assert str(found) == "1 acknowledged: clean, 1 justified duplicates"
