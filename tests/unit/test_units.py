import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunktune.units import (
    MAX_BYTES,
    UnitError,
    format_bytes,
    format_seconds,
    format_share,
    parse_bytes,
    parse_duration,
    parse_share,
    shorten,
    shown,
)

HUGE = 10**5000  # cannot even be printed


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (5, 5),
        (MAX_BYTES, MAX_BYTES),
        ("0B", 0),
        ("1 B", 1),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("0.1MB", 100_000),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("3MiB", 3 * 2**20),
        ("3MB", 3 * 10**6),
    ],
)
def test_sizes(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("1.5.2GB", "1.5GB"),
        ("80 G iB", "80GiB"),
        ("80  GiB", "80GiB"),
        ("", "1GiB"),
        ("-1GiB", "1GiB"),
        ("nan", "1GiB"),
        ("inf", "1GiB"),
        ("5gib", "5GiB"),
        ("5G", "5GiB"),
        ("1024", "1024B"),
        (" 1GiB", "1GiB"),
        ("1GiB\n", "1GiB"),
        ("GiB", "1GiB"),
        ("\u0663GiB", "1GiB"),
        (1.6, "2"),
        (math.nan, "1GiB"),
        (math.inf, "1GiB"),
        (True, "1GiB"),
        (None, "1GiB"),
        ([1], "1GiB"),
        (-3, "0"),
        (2**63, str(MAX_BYTES)),
        pytest.param(HUGE, str(MAX_BYTES), id="huge"),
        ("99999999TiB", str(MAX_BYTES)),
    ],
)
def test_no_sizes(text: object, nearest: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    assert caught.value.nearest == nearest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(90, 90.0), (0.5, 0.5), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("500ms", 0.5), ("2 m", 120.0)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("2h30m", "2h"),
        ("5 min", "5m"),
        ("10", "10s"),
        ("", "1s"),
        ("0s", "10m"),
        (0, "10m"),
        (-1, "10m"),
        (math.nan, "10m"),
        (math.inf, "10m"),
        pytest.param(HUGE, "10m", id="huge"),
        (True, "10m"),
        (None, "10m"),
    ],
)
def test_no_durations(text: object, nearest: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_duration(text)
    assert caught.value.nearest == nearest


@pytest.mark.parametrize(
    ("text", "share"),
    [(0, 0.0), (0.05, 0.05), ("5%", 0.05), ("5 %", 0.05), ("0%", 0.0), ("12.5%", 0.125), ("99.9%", 0.999)],
)
def test_shares(text: object, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        (1, "1%"),
        (5, "5%"),
        (-0.1, "0"),
        ("100%", "0.05"),
        ("-5%", "5%"),
        ("0.05", "0.05"),
        ("", "0.05"),
        ("abc", "0.05"),
        (True, "0.05"),
        (math.nan, "0.05"),
        pytest.param(HUGE, "0.05", id="huge"),
    ],
)
def test_no_shares(text: object, nearest: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_share(text)
    assert caught.value.nearest == nearest


def test_a_unit_error_reads_fact_rule_nearest() -> None:
    with pytest.raises(ValueError, match=r'^is "1.5.2GB"; a size is .* \(did you mean 1.5GB\?\)$'):
        parse_bytes("1.5.2GB")


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_on_one_line(text: str) -> None:
    for parse in (parse_bytes, parse_duration, parse_share):
        try:
            value = parse(text)
        except UnitError as error:
            assert str(error).isprintable()
        else:
            assert math.isfinite(value)


@given(st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,3})?[ .]{0,2}[a-zA-Z ]{0,4}", fullmatch=True))
def test_the_nearest_size_is_a_size(text: str) -> None:
    try:
        parse_bytes(text)
    except UnitError as error:
        assert parse_bytes(error.nearest) >= 0


@given(st.integers(0, MAX_BYTES))
def test_sizes_survive_being_written_in_bytes(count: int) -> None:
    assert parse_bytes(f"{count}B") == parse_bytes(count) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "0.98 MiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00085, "850 us"),
        (0.0009999, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (1.234, "1.23 s"),
        (59.99, "60.0 s"),
        (119.4, "119 s"),
        (119.6, "2 min 00 s"),
        (3599, "59 min 59 s"),
        (7325, "2 h 02 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (0.05, "5%"), (0.0125, "1.25%"), (0.12345, "12.3%"), (-0.02, "-2%"), (20, "2000%")],
)
def test_format_share(share: float, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize("form", [format_bytes, format_seconds, format_share])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_formatters_refuse_what_is_not_finite(form: object, value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        form(value)  # type: ignore[operator]


def test_formatters_refuse_negative_sizes_and_durations() -> None:
    for form in (format_bytes, format_seconds):
        with pytest.raises(ValueError, match="0 or more"):
            form(-1)


def test_values_are_shown_as_in_a_toml_file() -> None:
    assert [shown(value) for value in (True, 3, "a", [1, "b", [2]], {"a": 1})] == [
        "true",
        "3",
        '"a"',
        '[1, "b", [...]]',
        "a table",
    ]


def test_long_and_unprintable_texts_are_tamed() -> None:
    assert shorten("x" * 100) == "x" * 57 + "..."
    assert shorten("a\x1b[31m\u202eb\n\udc80") == "a\\x1b[31m\\u202eb\\n\\udc80"
    assert shown(HUGE) == "a number of more than 4300 digits"
