"""Settings: where each comes from, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.model import Terms
from duly.rules.settings import Settings, load, parse_url


def test_the_defaults_are_those_of_the_contract():
    settings = load({}, {})
    assert settings == Settings()
    assert str(settings.url) == "duly.db"
    assert (settings.schema, settings.durability, settings.max_attempts) == ("duly", "full", 5)
    assert (settings.lease_ms, settings.poll_ms, settings.busy_timeout_ms) == (30_000, 1_000, 5_000)
    terms = Terms("t")
    shared = ("max_attempts", "lease_ms", "keep_ms", "result_ttl_ms", "key_ttl_ms")
    assert [getattr(settings, name) for name in shared] == [getattr(terms, name) for name in shared]


@given(
    st.none() | st.integers(1, 99),
    st.none() | st.integers(1, 99),
    st.none() | st.integers(1, 99),
    st.sampled_from(["duly.toml", "pyproject.toml", "/app/pyproject.toml"]),
)
def test_argument_beats_environment_beats_file_beats_default(argument, variable, filed, file_name):
    head = "[tool.duly]\n" if file_name.endswith("pyproject.toml") else ""
    settings = load(
        {"lease": argument},
        {"DULY_LEASE": f"{variable}s"} if variable else {"HOME": "/", "DULY_LEASE": ""},
        None if filed is None else f'{head}lease = "{filed}s"',
        file_name,
    )
    found = [(argument, "argument"), (variable, "$DULY_LEASE"), (filed, file_name), (30, "default")]
    seconds, origin = next(pair for pair in found if pair[0] is not None)
    assert (settings.lease_ms, settings.origin("lease")) == (seconds * 1_000, origin)
    assert settings.origin("keep") == "default"


def test_every_setting_can_come_from_everywhere():
    given_values = {
        "url": "a.db",
        "listen_url": "postgresql://h/d",
        "schema": "jobs",
        "prepared": "off",
        "durability": "normal",
        "max_attempts": 3,
        "max_payload": 1_000,
        **dict.fromkeys(
            (
                "lease",
                "keep",
                "result_ttl",
                "key_ttl",
                "poll",
                "busy_timeout",
                "connect_timeout",
                "d1_timeout",
                "grace",
            ),
            "7s",
        ),
        "d1_statements": 900,
    }
    toml = "\n".join(f"{name} = {value!r}" for name, value in given_values.items())
    variables = {f"DULY_{name.upper()}": str(value) for name, value in given_values.items()}
    one, two, three = load(given_values, {}), load({}, variables), load({}, {}, toml)
    assert one == two == three
    same = [
        field.name for field in dataclasses.fields(one) if getattr(one, field.name) == getattr(Settings(), field.name)
    ]
    assert same == []
    assert {two.origin(name) for name in given_values} == {"$" + name for name in variables}


@pytest.mark.parametrize(
    ("arguments", "environ", "text", "said"),
    [
        ({"leese": 5}, {}, None, "'leese' (from argument) is not a setting: did you mean 'lease'?"),
        ({}, {"DULY_LEESE": "5"}, None, "$DULY_LEESE is not a setting: did you mean $DULY_LEASE?"),
        (
            {},
            {},
            "reslt_ttl = 5",
            "'reslt_ttl' (from duly.toml) is not a setting: did you mean 'result_ttl'?",
        ),
        ({"colour": 5}, {}, None, "the settings are url"),
        ({}, {}, "[lease]\nx = 1", "lease (from duly.toml) is of type dict"),
        ({}, {"DULY_LEASE": "5 parsecs"}, None, "lease (from $DULY_LEASE)"),
        ({"lease": 0}, {}, None, "lease (from argument) is zero"),
        ({}, {}, "max_attempts = 'many'", "max_attempts (from duly.toml)"),
        ({"max_attempts": True}, {}, None, "max_attempts (from argument)"),
        ({"max_attempts": 0}, {}, None, "1 or more"),
        ({"max_attempts": 2.5}, {}, None, "whole number"),
        ({"max_attempts": "9" * 61}, {}, None, f"is '{'9' * 59}…: give a whole number"),
        ({"schema": 'x"; drop'}, {}, None, "schema (from argument)"),
        ({"durability": "off"}, {}, None, "durability (from argument)"),
        ({"url": 5}, {}, None, "url (from argument)"),
        ({}, {"DULY_URL": "mysql://u:geheim@h/d"}, None, "url (from $DULY_URL)"),
        ({}, {}, "lease = ", "duly.toml is not valid TOML"),
        ({}, {}, f"lease = {'1' * 4301}", "duly.toml is not valid TOML: it has a number of more than 4,300 digits"),
        ({}, {}, f"lease = {'[' * 9999}", "duly.toml is not valid TOML: maximum recursion"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_origin(arguments, environ, text, said):
    with pytest.raises(ConfigError) as refused:
        load(arguments, environ, text)
    assert said in str(refused.value)
    assert "geheim" not in str(refused.value)


def test_a_pyproject_without_our_table_changes_nothing_and_a_wrong_one_is_refused():
    assert load({}, {}, "[project]\nname = 'x'", "pyproject.toml") == Settings()
    with pytest.raises(ConfigError, match="not a table"):
        load({}, {}, "[tool]\nduly = 5", "pyproject.toml")


def test_variables_of_commands_are_left_alone():
    load(
        {},
        {"DULY_SECRET_KEY": "x", "DULY_EGRESS_ALLOW": "127.0.0.0/8", "DULY_WORKER_SLOTS": "4", "PATH": "x"},
    )


def test_asking_for_the_origin_of_no_setting_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'lease'"):
        Settings().origin("leas")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("jobs.db", "jobs.db"),
        ("./a b/jobs.db", "./a b/jobs.db"),
        ("/var/jobs.db", "/var/jobs.db"),
        ("C:\\jobs.db", "C:\\jobs.db"),
        (Path("x") / "jobs.db", "x/jobs.db"),
        ("sqlite:///jobs.db", "jobs.db"),
        ("sqlite:////var/jobs.db", "/var/jobs.db"),
        ("SQLite:///jobs.db", "jobs.db"),
    ],
)
def test_three_slashes_are_relative_four_absolute_and_a_path_is_a_path(url, path):
    read = parse_url(url)
    assert (read.store, read.path, str(read)) == ("sqlite", path, path)


@pytest.mark.parametrize(
    ("url", "store", "shown"),
    [
        ("postgresql://anna:geheim@db:5432/shop", "postgresql", "postgresql://anna@db:5432/shop"),
        ("postgres://anna:geheim@db/shop?password=geheim", "postgresql", "postgresql://anna@db/shop"),
        ("postgresql:///shop", "postgresql", "postgresql:///shop"),
        ("postgresql://anna:g%40heim@[::1]:5/shop", "postgresql", "postgresql://anna@[::1]:5/shop"),
        ("postgresql://a:geheim@one:1,two:2/shop", "postgresql", "postgresql://a@one:1,two:2/shop"),
        ("d1://geheim@gate.example/jobs", "d1", "d1://gate.example/jobs"),
    ],
)
def test_a_password_is_kept_but_never_shown(url, store, shown):
    read = parse_url(url)
    assert (read.store, str(read), read.path) == (store, shown, None)
    assert "geheim" not in repr(read) + repr(load({"url": url}, {})) + f"{read}"
    assert read.dsn == url.replace("postgres://", "postgresql://")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "empty"),
        (":memory:", "nothing would survive"),
        ("sqlite://", "nothing would survive"),
        ("sqlite:///", "nothing would survive"),
        ("sqlite://:memory:", "nothing would survive"),
        ("sqlite:///:memory:", "nothing would survive"),
        ("file::memory:?cache=shared", "plain path"),
        ("sqlite://jobs.db", "sqlite:///jobs.db"),
        ("sqlite:jobs.db", "sqlite:///"),
        ("sqlite:///jobs.db?mode=ro", "no options"),
        ("jo\x00bs.db", "NUL"),
        ("postgrseql://u:geheim@h/d", "postgresql://"),
        ("postgresql+psycopg://u:geheim@h/d", "postgresql://"),
        ("postgresql:geheim", "postgresql://"),
        ("mysql://u:geheim@h/d", "sqlite:///"),
        ("redis://:geheim@h", "give a path"),
        ("host=h password=geheim", "postgresql://"),
        ("postgresql://u:ge/heim@h/d", "percent-encode"),
        ("postgresql://u:12/geheim@h/d", "percent-encode"),
        ("postgresql://u:12?geheim@h/d", "percent-encode"),
        ("postgresql://u:ge#geheim@h/d", "percent-encode"),
        ("postgresql://u:[geheim@h/d", "percent-encode"),
        ("postgresql://u:ge@geheim@h/d", "percent-encode"),
        ("postgresql://u:geheim%@h/d", "percent-encode"),
        ("postgresql://u:geheim%zz@h/d", "percent-encode"),
        ("postgresql://u:ge heim@h/d", "percent-encode"),
        ("postgresql://h/d?password=geheim%", "percent-encode"),
        ("u:geheim@h/d", "a login without a scheme"),
        ("postgresql://h:port/d", "look at its host and port"),
        (
            "postgresql://u:geheim@h:port/d",
            "percent-encode special characters in user name and password, and look at its",
        ),
        ("d1://", "no host"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_a_remedy_and_without_its_password(url, said):
    with pytest.raises(ConfigError) as refused:
        parse_url(url)
    assert said in str(refused.value)
    assert "heim" not in str(refused.value)
    assert refused.value.__cause__ is None


@given(st.text(st.characters(codec="ascii"), max_size=30))
def test_any_text_is_a_url_or_refused(text):
    for prefix in ("", "sqlite:///", "postgresql://u:geheim@", "d1://"):
        try:
            said = str(parse_url(prefix + text))
        except ConfigError as refused:
            said = str(refused)
        assert "geheim" not in said


@pytest.mark.parametrize(
    ("said", "meant"), [("false", False), ("ON", True), (False, False), ("0", False), (True, True)]
)
def test_a_switch_is_read_in_the_words_people_use(said, meant):
    assert load({"prepared": said}, {}).prepared is meant
    assert load({}, {"DULY_PREPARED": str(said)}).prepared is meant


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(ConfigError, match="give true or false"):
        load({}, {"DULY_PREPARED": "perhaps"})
