"""Checks JUnit XML against the elements and attributes that its readers know, and its counts against its cases.

Usage: junit.py FILE.xml; prints the number of cases, exits 1 with what is wrong.
"""

import sys
import xml.etree.ElementTree as ET

# element: (allowed attributes, required ones, allowed children), as in the schema that Jenkins publishes
ELEMENTS = {
    "testsuites": ({"name", "time", "tests", "failures", "disabled", "errors"}, set(), {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "time", "disabled", "skipped", "timestamp", "hostname", "id", "package"},
        {"name", "tests"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": ({"name", "assertions", "time", "classname", "status"}, {"name"}, {"skipped", "error", "failure", "system-out", "system-err"}),
    "failure": ({"type", "message"}, set(), set()),
    "skipped": ({"type", "message"}, set(), set()),
    "system-out": (set(), set(), set()),
}


def check(element):
    allowed, required, children = ELEMENTS[element.tag]
    wrong = [f"{element.tag}: attribute {key}" for key in element.keys() if key not in allowed]
    wrong += [f"{element.tag}: no {key}" for key in required - set(element.keys())]
    wrong += [f"{element.tag}: child {child.tag}" for child in element if child.tag not in children]
    return wrong + [w for child in element if child.tag in children for w in check(child)]


root = ET.parse(sys.argv[1]).getroot()
wrong = check(root) if root.tag == "testsuites" else [f"root {root.tag}"]
cases = 0
for suite in root:
    counts = {"tests": len(suite.findall("testcase")), "failures": len(suite.findall("testcase/failure"))}
    counts["skipped"] = len(suite.findall("testcase/skipped"))
    cases += counts["tests"]
    wrong += [f"{key} {suite.get(key)}, counted {count}" for key, count in counts.items() if suite.get(key) != str(count)]
print(f"{cases} cases")
print("\n".join(wrong))
sys.exit(bool(wrong))
