import pytest

from chunktune.datasheets import DATASHEETS, DEFAULT, FIGURES, LAUNCH_S, hardware, missing_figures

OWN = {"memory": 10, "flops": 4e12, "flops_float32": 1e12, "bandwidth": 1e9, "link_bandwidth": 1e8}


@pytest.mark.parametrize("name", DATASHEETS)
def test_every_row_is_whole_and_plausible(name: str) -> None:
    sheet = DATASHEETS[name]
    assert sheet.source
    assert f"-{round(sheet.memory_bytes / 2**30)}gb" in name.replace("l40s-48gb", "l40s-45gb")  # 1/16 is ECC's
    assert sheet.flops_per_s > sheet.flops_float32_per_s > 1e13
    assert 1e13 > sheet.bandwidth_bytes_per_s > sheet.link_bytes_per_s >= 32e9
    assert missing_figures({"name": name}) == ()


def test_dense_figures_of_the_default() -> None:
    found = hardware({})
    assert (found.name, found.label, found.overridden) == (DEFAULT, DEFAULT, ())
    assert found.sheet.flops_per_s == 989e12  # 1979 TFLOP/s is the sparse figure
    assert found.peak_flops_per_s("bfloat16") == 989e12
    assert found.peak_flops_per_s("float32") == 67e12


def test_keys_go_over_the_table() -> None:
    found = hardware({"name": "a100-80gb", "memory": 5, "bandwidth": None, "efficiency": 0.5, "launch_s": 0.0})
    assert (found.sheet.memory_bytes, found.sheet.bandwidth_bytes_per_s) == (5, 2039e9)
    assert found.label == "a100-80gb with the spec's memory"
    assert found.peak_flops_per_s("bfloat16") == 156e12
    assert found.launch_s == 0.0


@pytest.mark.parametrize("missing", FIGURES)
def test_a_new_name_needs_every_figure(missing: str) -> None:
    some = {key: value for key, value in OWN.items() if key != missing}
    assert missing_figures({"name": "mine", **some}) == (missing,)
    with pytest.raises(ValueError, match=missing):
        hardware({"name": "mine", **some})


def test_a_device_of_ones_own() -> None:
    assert hardware({"name": "mine", **OWN}).label == "mine"
    found = hardware(OWN)
    assert (found.label, found.sheet.source, found.sheet.memory_bytes) == ("hardware of the spec", "the spec", 10)


def test_the_roofline() -> None:
    found = hardware({**OWN, "launch_s": 0.5, "efficiency": 0.5, "link_latency": 0.25})
    assert found.operation_s(2e12, 1, "bfloat16") == pytest.approx(1 + 0.5)  # arithmetic binds: 2e12 / (4e12 / 2)
    assert found.operation_s(2e12, 1, "float32") == pytest.approx(4 + 0.5)
    assert found.operation_s(1, 1e9, "bfloat16") == pytest.approx(2 + 0.5)  # memory binds: 1e9 / (1e9 / 2)
    assert found.transfer_s(1e8) == pytest.approx(1.25)  # a link is not slowed by the share of peaks
    assert hardware(OWN).operation_s(0, 0, "float32") == LAUNCH_S
