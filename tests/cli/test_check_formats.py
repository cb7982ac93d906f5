"""Test `check --format` and `--baseline`: each format against its standard, and which findings count as new."""

import json
import os
import re
import shlex
from urllib.parse import unquote, urlsplit

import pytest
from cli_tiny import assert_refused
from tests.answers.faults import FAULTS
from tests.checkpoint.tiny_checkpoints import llama, table, with_rows

from tiewise.checkpoint.formats.table import FORMATS

FOLDERS = ("b001-cut", "b002-index", "b011", "b012-rows", "b013", "b034", "b042", "b060", "b070.gguf")
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Write some broken checkpoints and a healthy one into the folder where commands run."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name in FOLDERS:
        FAULTS[name](tmp_path / name)
    llama(tmp_path / "sound", rows=64)


def test_json_is_the_same_by_both_options(tiewise):
    by_format = tiewise("check", "b012-rows", "b011", "--format", "json")
    by_option = tiewise("check", "b012-rows", "b011", "--json")
    assert by_format == by_option
    assert len(json.loads(by_format.out)["audits"]) == 2
    assert json.loads(tiewise("check", "b011", "--json", "--format", "json").out)["worst"] == "fatal"


@pytest.mark.parametrize("name", FORMATS)
def test_exit_code_is_the_same_in_every_format(tiewise, name):
    assert tiewise("check", "b012-rows", "--format", name).code == 1
    assert tiewise("check", "b013", "--format", name).code == 0
    assert tiewise("check", "b013", "--format", name, "--fail-on", "warning").code == 1
    result = tiewise("check", "nowhere", "sound", "--format", name)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("tiewise: nowhere: no such file or folder")


def test_wrong_formats_are_refused(tiewise):
    assert_refused(tiewise("check", "sound", "--format", "serif"), "--format serif; did you mean sarif?")
    assert_refused(tiewise("check", "sound", "--json", "--format", "agent"), "--json with --format agent")


# agent


def agent_lines(result):
    """Return the printed lines as dictionaries, by the grammar in the docs."""
    assert "\x1b" not in result.out
    lines = []
    for line in result.out.splitlines():
        pairs = {}
        while line:
            key, _, rest = line.partition("=")
            assert re.fullmatch(r"[a-z]+", key), line
            value, line = _value(key, rest)
            pairs[key] = value
        lines.append(pairs)
    return lines


def _value(key, rest):
    """Return the first value of a line, and the text behind it."""
    if key in ("evidence", "reason") or (key == "repair" and not rest.startswith("none ")):
        return rest, ""
    words = shlex.split(rest)
    quoted = shlex.quote(words[0])
    assert rest.startswith(quoted)
    return words[0], rest[len(quoted) + 1 :]


def test_agent_prints_one_line_per_finding_and_the_repair_last(tiewise):
    lines = agent_lines(tiewise("check", "b012-rows", "--format", "agent"))
    assert [next(iter(line)) for line in lines] == ["path", "finding", "finding", "repair"]
    assert lines[0] == {"path": "b012-rows", "verdict": "broken", "findings": "2", "infos": "1"}
    evidence = "the config says tied, and two different tables are stored"
    assert lines[1] == {"finding": "B012", "severity": "error", "where": "lm_head.weight", "evidence": evidence}
    assert lines[3] == {"repair": "tiewise repair b012-rows --to b012-rows-fixed"}


@pytest.mark.parametrize(
    ("path", "verdict", "reason"),
    [
        ("sound", "healthy", "healthy"),
        ("b042", "healthy", "healthy"),
        ("b011", "broken", "B011 needs you: if it was trained tied: tiewise tie b011 --keep input --to b011-fixed; "),
        ("b001-cut", "unreadable", "B001 needs you: download or write it again"),
        ("nowhere", "unreadable", "nowhere: no such file or folder"),
    ],
)
def test_agent_gives_the_reason_if_no_command_repairs(tiewise, path, verdict, reason):
    lines = agent_lines(tiewise("check", path, "--format", "agent"))
    assert lines[0]["path"] == path
    assert lines[0]["verdict"] == verdict
    assert lines[-1]["repair"] == "none"
    assert lines[-1]["reason"].startswith(reason)


def test_agent_quotes_values_and_keeps_a_line_for_each_path(tiewise, tmp_path):
    (tmp_path / "b013").rename(tmp_path / "my model")
    (tmp_path / "b012-rows").rename(tmp_path / "two\nlines")
    lines = agent_lines(tiewise("check", "my model", "two\nlines", "--format", "agent"))
    assert [line["path"] for line in lines if "path" in line] == ["my model", "two?lines"]
    first, second = [line for line in lines if "repair" in line]
    assert shlex.split(first["repair"]) == ["tiewise", "repair", "my model", "--to", "my model-fixed"]
    assert second["repair"] == "none"
    assert "rename it" in second["reason"]


def test_agent_counts_findings_beyond_the_fifth(tiewise, tmp_path):
    weight_map = {f"t{number}": f"model-{number:05d}-of-00009.safetensors" for number in range(9)}
    (tmp_path / "sound" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    lines = agent_lines(tiewise("check", "sound", "--format", "agent"))
    assert sum("finding" in line for line in lines) == 5
    assert [line for line in lines if "more" in line] == [{"more": str(int(lines[0]["findings"]) - 5)}]


def test_agent_names_a_folder_that_is_free_for_the_result(tiewise, tmp_path, monkeypatch):
    (tmp_path / "b013-fixed").mkdir()
    assert "repair=tiewise repair b013 --to b013-fixed-2\n" in tiewise("check", "b013", "--format", "agent").out
    monkeypatch.chdir(tmp_path / "b012-rows")
    command = tiewise_line(tiewise("check", ".", "--format", "agent"))
    assert tiewise(*command[1:]).code == 0
    assert (tmp_path / "b012-rows-fixed" / "config.json").exists()


def tiewise_line(result):
    """Return the words of the command in the last line."""
    return shlex.split(result.out.splitlines()[-1].removeprefix("repair="))


# GitHub


def decoded(text):
    """Return a text as GitHub's runner decodes it."""
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def annotations(result):
    """Return (command, properties, message) of each line, as GitHub's runner reads them."""
    found = []
    for line in result.out.splitlines():
        command, properties, message = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line).groups()
        pairs = dict(item.split("=", 1) for item in properties.split(","))
        found.append((command, {key: decoded(value) for key, value in pairs.items()}, decoded(message)))
    return found


def test_github_annotates_the_file_of_each_finding(tiewise):
    found = annotations(tiewise("check", "b012-rows", "sound", "nowhere", "--format", "github"))
    assert [command for command, _, _ in found] == ["error", "warning", "notice", "error"]
    _, properties, message = found[0]
    assert properties == {"file": "b012-rows/model.safetensors", "title": "B012 error: lm_head.weight"}
    first, *fixes = message.splitlines()
    assert first.startswith("the config says tied, and two different tables are stored")
    assert fixes[0] == "→ to keep both tables: tiewise repair b012-rows --to b012-rows-fixed"
    assert found[1][1]["file"] == "b012-rows/config.json"
    assert found[3][1] == {"file": "nowhere", "title": "unreadable"}


def test_github_escapes_what_would_end_a_command(tiewise, tmp_path):
    odd = "50%,a:b\n::stop-commands::x"
    (tmp_path / "b012-rows").rename(tmp_path / odd)
    result = tiewise("check", odd, "--format", "github")
    assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in result.out.splitlines())
    _, properties, message = annotations(result)[0]
    assert properties["file"] == f"{odd}/model.safetensors"
    assert odd in message


def test_github_prints_nothing_without_findings(tiewise):
    result = tiewise("check", "sound", "--format", "github")
    assert (result.code, result.out, result.err) == (0, "", "")


# SARIF

GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# properties that SARIF 2.1.0 requires, and those that this log may have, by object (section of the standard)
REQUIRED = {
    "sarifLog": ({"version", "runs"}, {"$schema"}),  # 3.13
    "run": ({"tool"}, {"invocations", "results"}),  # 3.14
    "tool": ({"driver"}, set()),  # 3.18
    "toolComponent": ({"name"}, {"version", "rules"}),  # 3.19
    "reportingDescriptor": ({"id"}, {"shortDescription", "fullDescription", "help", "defaultConfiguration"}),  # 3.49
    "invocation": ({"executionSuccessful"}, {"toolExecutionNotifications"}),  # 3.20
    "notification": ({"message"}, {"level", "locations"}),  # 3.58
    "result": (
        {"message"},
        {"ruleId", "ruleIndex", "level", "locations", "partialFingerprints", "occurrenceCount", "properties"}
        | {"baselineState"},
    ),  # 3.27
    "location": (set(), {"physicalLocation", "logicalLocations"}),  # 3.28
    "message": ({"text"}, set()),  # 3.11
}
LEVELS = {"none", "note", "warning", "error"}  # 3.27.10


def assert_object(kind, record):
    """Check that an object has the properties that the standard requires, and no misspelt one."""
    required, allowed = REQUIRED[kind]
    assert required <= record.keys() <= required | allowed, (kind, record.keys())


def assert_location(location, root):
    """Check that a location names a file by a URI reference (3.4.3), relative to the folder of the command."""
    assert_object("location", location)
    uri = location["physicalLocation"]["artifactLocation"]["uri"]
    assert re.fullmatch(r"[A-Za-z0-9\-._~/%:]+", uri), uri
    parts = urlsplit(uri)
    path = unquote(parts.path)
    assert parts.scheme in ("", "file")
    assert path.startswith("/") == (parts.scheme == "file")
    return root / path


def assert_sarif(log, root):
    """Check a log by the standard, and return its results."""
    assert_object("sarifLog", log)
    assert log["version"] == "2.1.0"
    assert urlsplit(log["$schema"]).path.endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    assert_object("run", run)
    assert_object("tool", run["tool"])
    driver = run["tool"]["driver"]
    assert_object("toolComponent", driver)
    rules = driver["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for rule in rules:
        assert_object("reportingDescriptor", rule)
        assert rule["defaultConfiguration"]["level"] in LEVELS
        for text in ("shortDescription", "fullDescription", "help"):
            assert_object("message", rule[text])
    (invocation,) = run["invocations"]
    assert_object("invocation", invocation)
    for notification in invocation["toolExecutionNotifications"]:
        assert_object("notification", notification)
        assert_location(notification["locations"][0], root)
    for result in run["results"]:
        assert_object("result", result)
        assert_object("message", result["message"])
        assert result["message"]["text"]
        assert result["level"] in LEVELS
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["occurrenceCount"] >= 1
        assert_location(result["locations"][0], root).stat()
    return run["results"]


def test_sarif_has_what_the_standard_requires(tiewise, tmp_path):
    (tmp_path / "b013").rename(tmp_path / "my model, 50%")
    folders = ["my model, 50%", *(name for name in FOLDERS if name != "b013"), str(tmp_path / "sound")]
    log = json.loads(tiewise("check", *folders, "--format", "sarif").out)
    results = assert_sarif(log, tmp_path)
    assert {"B001", "B002", "B011", "B012", "B013", "B034"} <= {result["ruleId"] for result in results}
    levels = {(result["level"], result["properties"]["severity"]) for result in results}
    assert levels == {("error", "fatal"), ("error", "error"), ("warning", "warning"), ("note", "info")}
    assert log["runs"][0]["invocations"][0]["executionSuccessful"] is True


def test_sarif_keeps_the_bytes_of_a_name_that_is_no_utf8(tiewise, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / "b013").rename(tmp_path / name)
    log = json.loads(tiewise("check", name, "--format", "sarif").out)
    (location, *_) = log["runs"][0]["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"].startswith("caf%E9/")


def test_sarif_notifies_of_an_unreadable_path(tiewise, tmp_path):
    log = json.loads(tiewise("check", "nowhere", "--format", "sarif").out)
    assert assert_sarif(log, tmp_path) == []
    invocation = log["runs"][0]["invocations"][0]
    assert invocation["executionSuccessful"] is False
    assert "no such file or folder" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_sarif_fingerprint_stays_while_a_fault_stays(tiewise, tmp_path):
    def fingerprints():
        log = json.loads(tiewise("check", "b012-rows", "b013", "--format", "sarif").out)
        return [result["partialFingerprints"]["tiewiseFinding/v1"] for result in log["runs"][0]["results"]]

    before = fingerprints()
    assert len(set(before)) == len(before)
    llama(tmp_path / "b012-rows", head=with_rows(3, 4, 5, 6))  # other rows differ
    assert fingerprints() == before


# baseline


@pytest.fixture
def baseline(tiewise, tmp_path):
    """Return a function that writes a baseline of some paths, and returns its name."""

    def write(*paths, name="base.json", **options):
        (tmp_path / name).write_text(tiewise("check", *paths, "--format", "json").out)
        return name

    return write


def test_known_findings_are_not_reported_and_do_not_fail(tiewise, baseline):
    options = ("--baseline", baseline("b012-rows", "b013"))
    assert tiewise("check", "b012-rows").code == 1
    for path in ("b012-rows", "./b013"):
        for name in FORMATS:
            result = tiewise("check", path, *options, "--format", name, "--fail-on", "info")
            assert (result.code, result.err) == (0, "")
    assert "No news: 2 known findings, the most severe B012 (error)." in " ".join(
        plain(tiewise("check", "b012-rows", *options).out).split()
    )
    lines = agent_lines(tiewise("check", "b012-rows", *options, "--format", "agent"))
    assert lines == [
        {"path": "b012-rows", "verdict": "no-news", "findings": "0", "infos": "0"},
        {"repair": "none", "reason": "no new finding"},
    ]


def plain(text):
    """Return a text without colour."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def new_rules(result):
    return {finding["rule"] for finding in json.loads(result.out)["findings"]}


def test_new_fault_is_reported_alone(tiewise, tmp_path, baseline):
    options = ("--baseline", baseline("b013", "sound"), "--json")
    llama(tmp_path / "b013", head=table(), shards=2, config={"vocab_size": 23})
    result = tiewise("check", "b013", *options)
    assert result.code == 1
    assert new_rules(result) == {"B033", "B080"}
    known = {finding["rule"] for finding in json.loads(result.out)["known_findings"]}
    assert known == {"B013", "B042"}
    FAULTS["b011"](tmp_path / "elsewhere")  # a path that the baseline lacks
    assert {"B011", "B080"} <= new_rules(tiewise("check", "elsewhere", *options))


def test_finding_of_a_worse_severity_is_new(tiewise, tmp_path, baseline):
    llama(tmp_path / "m", tied=False, head=with_rows(7))
    options = ("--baseline", baseline("m"), "--json")
    assert new_rules(tiewise("check", "m", *options)) == set()
    record = json.loads((tmp_path / "base.json").read_text())
    for finding in record["findings"]:
        finding["severity"] = "info"
    (tmp_path / "base.json").write_text(json.dumps(record))
    assert "B015" in new_rules(tiewise("check", "m", *options))


def test_more_findings_of_a_counted_kind_are_new(tiewise, tmp_path, baseline):
    def write(shards):
        weight_map = {f"t{number:03d}": f"model-{number:05d}-of-00099.safetensors" for number in range(shards)}
        (tmp_path / "sound" / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    write(30)
    options = ("--baseline", baseline("sound"), "--json")
    write(25)
    assert new_rules(tiewise("check", "sound", *options)) == set()
    write(31)
    (found,) = json.loads(tiewise("check", "sound", *options).out)["findings"]
    assert (found["rule"], found["count"]) == ("B002", 21)


def test_baseline_of_a_check_with_a_baseline_has_all_findings(tiewise, tmp_path, baseline):
    first = baseline("b012-rows")
    again = tiewise("check", "b012-rows", "--baseline", first, "--json").out
    (tmp_path / "again.json").write_text(again)
    assert new_rules(tiewise("check", "b012-rows", "--baseline", "again.json", "--json")) == set()


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "3", '{"findings": []}', '{"audits": {}}', '{"audits": [3]}'),
        '{"path": 1, "findings": [{}]}',
        '{"path": "m", "findings": {}}',
        '{"path": "m", "findings": [{"rule": "B012", "severity": 1, "where": ""}]}',
        '{"path": "m", "findings": [{"rule": "a", "severity": "b", "where": "c", "count": "x"}]}',
        '{"$schema": "https://example.org", "version": "2.1.0", "runs": []}',
    ],
)
def test_other_files_are_refused_as_baselines(tiewise, tmp_path, content):
    (tmp_path / "base.json").write_text(content)
    line = assert_refused(tiewise("check", "sound", "--baseline", "base.json"), "base.json: ")
    assert "Traceback" not in line


UNUSABLE = [  # options, and the start of the error
    (("--baseline", "nowhere.json"), "nowhere.json: no such file"),
    (("--baseline", "bad.json"), "bad.json: not readable as JSON"),
    (("--baseline", "."), ".: not a regular file"),
    (("--fail-on", "worst"), "--fail-on worst; choose one of fatal"),
    (("--select", "B999"), "there is no rule 'B999'"),
    (("--quantise", "bad.json"), "bad.json: not readable as JSON"),
    (("--world", "0"), "world is 0"),
    (("--deep", "--headers"), "a deep check reads every row"),
    (("--base", "sound"), "base is given"),
]


@pytest.mark.parametrize(("options", "words"), UNUSABLE)
def test_formats_report_an_unusable_option_as_they_report_an_unreadable_path(tiewise, tmp_path, options, words):
    (tmp_path / "bad.json").write_text("{")
    answers = {}
    for name in ("sarif", "github", "agent", "json"):
        answers[name] = tiewise("check", "sound", "b013", "--format", name, *options)
        assert answers[name].code == 2
        assert words in answers[name].err
    (run,) = json.loads(answers["sarif"].out)["runs"]
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    notifications = invocation["toolExecutionNotifications"]
    assert [notification["message"]["text"].startswith(words) for notification in notifications] == [True, True]
    for path, line in zip(("sound", "b013"), answers["github"].out.splitlines(), strict=True):
        assert line.startswith(f"::error file={path},title=unreadable::")
    verdicts = answers["agent"].out.splitlines()[::2]
    assert verdicts == ["path=sound verdict=unreadable", "path=b013 verdict=unreadable"]
    assert json.loads(answers["json"].out)["audits"] == []


def test_absent_baseline_is_refused(tiewise):
    assert_refused(tiewise("check", "sound", "--baseline", "nowhere.json"), "nowhere.json: no such file")
