"""What a gate found as JUnit XML: a test case a check. Pure."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from chunktune.gate import Finding, Gate
from chunktune.report import plain
from chunktune.report.gate import headline

_SUITE = "chunktune check"


def to_junit(gate: Gate) -> str:
    """The XML: a failure with its sentence for every check that failed, the sentence as output for the others.

    Characters that XML cannot hold are left out with all other control characters. No check takes time worth a
    figure: `time` is 0.
    """
    counts = {"tests": str(len(gate.findings)), "failures": str(len(gate.failed)), "errors": "0", "skipped": "0"}
    root = ET.Element("testsuites", {"name": _SUITE, **counts, "time": "0"})
    suite = ET.SubElement(root, "testsuite", {"name": _SUITE, **counts, "time": "0"})
    ET.SubElement(ET.SubElement(suite, "properties"), "property", {"name": "gate", "value": headline(gate)})
    for finding in gate.findings:
        _add_case(suite, finding)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _add_case(suite: ET.Element, finding: Finding) -> None:
    name = {"name": plain(finding.check), "classname": _SUITE.replace(" ", "."), "time": "0"}
    case = ET.SubElement(suite, "testcase", name)
    words = plain(finding.words)
    if finding.passed:
        ET.SubElement(case, "system-out").text = f"{finding.outcome}: {words}"
    else:
        ET.SubElement(case, "failure", {"message": words, "type": "CheckFailed"}).text = words
