"""What travels with a job: M01."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.model import Envelope
from duly.rules.envelope import check_traceparent, child_of, pack, unpack

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TEXTS = st.none() | st.text(st.characters(codec=None), max_size=10)
ENVELOPES = st.builds(
    Envelope,
    schema_version=st.integers(1, 10**6),
    correlation_id=TEXTS,
    causation_id=TEXTS,
    subject=TEXTS,
    traceparent=st.none() | st.just(TRACE),
    payload_ref=TEXTS,
)


def test_m01_a_child_of_a_root_is_correlated_by_its_parents_id():
    child = child_of(Envelope(subject="order/1", traceparent=TRACE), "p")
    assert child == Envelope(correlation_id="p", causation_id="p", subject="order/1", traceparent=TRACE)


def test_m01_a_grandchild_keeps_the_correlation_and_names_its_own_cause():
    child = child_of(child_of(Envelope(), "root"), "middle")
    assert (child.correlation_id, child.causation_id) == ("root", "middle")


def test_m01_schema_version_and_payload_ref_belong_to_one_job():
    child = child_of(Envelope(schema_version=3, payload_ref="blob/1"), "p")
    assert (child.schema_version, child.payload_ref) == (1, None)


def test_m01_given_fields_win():
    child = child_of(
        Envelope(subject="a", traceparent=TRACE), "p", subject=None, correlation_id="mine", schema_version=2
    )
    assert child == Envelope(schema_version=2, correlation_id="mine", causation_id="p", traceparent=TRACE)
    with pytest.raises(TypeError):
        child_of(Envelope(), "p", subjekt="a")


@given(ENVELOPES)
def test_m01_a_packed_envelope_reads_back_the_same(envelope):
    text = pack(envelope)
    assert unpack(text) == envelope
    assert (text is None) == (envelope == Envelope())


@given(ENVELOPES)
def test_m01_a_packed_envelope_holds_only_what_is_not_default_and_what_a_database_stores(envelope):
    text = pack(envelope)
    if text is not None:
        usual = Envelope()
        assert set(json.loads(text)) == {
            name for name in Envelope.__struct_fields__ if getattr(envelope, name) != getattr(usual, name)
        }
        assert "\\u0000" not in text
        text.encode()


def test_m01_fields_of_a_newer_version_are_ignored():
    assert unpack('{"subject":"a","tenant":{"id":1}}') == Envelope(subject="a")
    assert unpack(None) == Envelope()


@pytest.mark.parametrize("text", [TRACE, "cc-" + TRACE[3:] + "-what-comes-later", None])
def test_m01_a_traceparent_is_taken(text):
    check_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        TRACE.upper(),
        "ff" + TRACE[2:],
        TRACE + "-more",
        TRACE + "\n",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        TRACE[1:],
    ],
)
def test_m01_an_invalid_traceparent_is_refused(text):
    with pytest.raises(ConfigError, match="traceparent"):
        check_traceparent(text)
    with pytest.raises(ConfigError, match="traceparent"):
        pack(Envelope(traceparent=text))
    with pytest.raises(ConfigError, match="traceparent"):
        child_of(Envelope(), "p", traceparent=text)
