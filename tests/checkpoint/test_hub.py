"""Test `check`, `plan` and `diff` on repositories of a local server that speaks the Hub's API."""

import json
import shutil
import time

import numpy as np
import pytest
from tests.answers.faults import FAULTS
from tests.checkpoint.tiny_checkpoints import V, bpe_tokenizer, llama, llama_config, table, write_checkpoint
from tests.hub_child import HubChild
from tests.hub_server import ENDLESS, TOKEN, HubServer, commit_of
from tests.hub_server import FAULTS as SERVER_FAULTS

MODEL = "hf://me/model"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with HubServer() as hub:
        yield hub


@pytest.fixture(scope="module")
def child(server, tmp_path_factory):
    """Return a child process without a token that gives up after three seconds without an answer."""
    with HubChild(server, tmp_path_factory.mktemp("home"), HF_HUB_DOWNLOAD_TIMEOUT="3") as process:
        yield process


@pytest.fixture(scope="module")
def hasty(server, tmp_path_factory):
    """Return a child process without a token that gives up after one second without an answer."""
    with HubChild(server, tmp_path_factory.mktemp("home"), HF_HUB_DOWNLOAD_TIMEOUT="1") as process:
        yield process


@pytest.fixture
def hub(server):
    """Return the server without repositories and faults."""
    for state in (server.repos, server.revisions, server.gated, server.private, server.faults, server.fail):
        state.clear()
    server.error_codes.clear()
    server.sent.clear()
    server.requests.clear()
    server.body_bytes = 0
    return server


def files_of(folder):
    """Return {path: bytes} of the files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def audit_of(child, *words):
    """Return the audit as JSON."""
    done = child("check", *words, "--json")
    assert done.code in (0, 1), done.err
    return done.record


def one_line(done):
    """Return the line of an error; check that nothing else is printed."""
    assert done.code == 2, done.out + done.err
    assert done.out == ""
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    return done.err.removeprefix("tiewise: ").rstrip("\n")


def wide_model(folder, shards, tied=False, head=None, rows=4_000, width=64):
    """Write a Llama with many layers, spread over shards, and its tokenizer."""
    tensors = {"model.embed_tokens.weight": table(rows, width)}
    for layer in range(shards * 8):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = np.ones((width, 2 * width), np.float32)
    tensors["model.norm.weight"] = np.ones(width, np.float32)
    if not tied or head is not None:
        tensors["lm_head.weight"] = table(rows, width, 1) if head is None else head
    config = llama_config(tied, rows, width, num_hidden_layers=shards * 8)
    return write_checkpoint(folder, config, tensors, shards=shards, tokenizer=bpe_tokenizer(rows))


def findings_of(record, path):
    """Return the findings of an audit; commands name `model` as the folder, as those for the Hub do."""
    findings = []
    for finding in record["findings"]:
        repair = finding["repair"].replace("hf download me/model --local-dir model && ", "")
        repair = repair.replace(str(path), "model").replace("'", "")
        findings.append((finding["rule"], finding["severity"], finding["where"], finding["evidence"], repair))
    return findings


def large_requests(hub):
    """Return the number of ranges of large files that were sent."""
    return len(hub.sent)


def check_same_as_folder(hub, child, folder, *options):
    """Check that the Hub's audit has the findings, the loaders and the numbers of the folder's."""
    hub.repos["me/model"] = files_of(folder)
    remote, local = audit_of(child, MODEL, "--all-headers", *options), audit_of(child, folder, *options)
    assert findings_of(remote, MODEL) == findings_of(local, folder)
    for key in ("kind", "loaders", "parts", "ends", "claims", "names", "tensors", "bytes", "rules"):
        assert remote[key] == local[key], key
    return remote


@pytest.mark.parametrize("name", ["b002-index", "b004", "b011", "b012-rows", "b031", "b061", "b083"])
def test_findings_are_those_of_the_folder(hub, child, tmp_path, name):
    FAULTS[name](tmp_path / "model")
    remote = check_same_as_folder(hub, child, tmp_path / "model")
    assert remote["hub"]["commit"] == commit_of(hub.repos["me/model"])
    assert remote["hub"]["unread"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if "." not in name and name != "b001-link"])
@pytest.mark.parametrize("options", [(), ("--deep",), ("--headers",)], ids=["plain", "deep", "headers"])
def test_findings_of_every_broken_folder_are_those_of_the_folder(hub, child, tmp_path, name, options):
    FAULTS[name](tmp_path / "model")
    check_same_as_folder(hub, child, tmp_path / "model", *options)


@pytest.mark.parametrize("name", ["b003", "b011", "b013", "b019", "b030"])
def test_headers_of_ends_alone_find_faults_of_the_ends(hub, child, tmp_path, name):
    FAULTS[name](tmp_path / "model")
    hub.repos["me/model"] = files_of(tmp_path / "model")
    remote, local = audit_of(child, MODEL), audit_of(child, tmp_path / "model")
    expected = [finding for finding in findings_of(local, tmp_path / "model") if finding[0] != "B003"]
    if not remote["hub"]["unread"]:
        expected = findings_of(local, tmp_path / "model")
    assert findings_of(remote, MODEL) == expected


def test_160_shards_cost_one_listing_and_the_headers_of_the_ends(hub, child, tmp_path):
    folder = wide_model(tmp_path / "model", shards=160)
    hub.repos["me/model"] = files = files_of(folder)
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    needed = {weight_map["model.embed_tokens.weight"], weight_map["lm_head.weight"]}
    remote = audit_of(child, MODEL)
    assert hub.body_bytes <= len(files["model.safetensors.index.json"]) + len(files["tokenizer.json"]) + 300_000
    assert remote["hub"]["bytes_read"] == hub.body_bytes
    assert remote["hub"]["requests"] == len(hub.requests)
    assert [path for _, path in hub.requests if path.startswith("/api")] == ["/api/models/me/model"]
    requested = {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path}
    assert {name for name in requested if name.endswith(".safetensors")} == needed
    assert set(remote["hub"]["unread"]) == set(weight_map.values()) - needed
    assert findings_of(remote, MODEL) == findings_of(audit_of(child, folder), folder)
    shown = child("check", MODEL).out
    assert "158 shards without a table" in shown


def test_equal_tables_are_equal_in_random_rows_and_full_compares_all(hub, child, tmp_path):
    head = table(4_000, 64)
    head[17] += 1  # a row that is not among the random ones
    hub.repos["me/model"] = files_of(wide_model(tmp_path / "model", shards=2, head=head))
    ends = audit_of(child, MODEL)["ends"]
    assert (ends["kind"], ends["rows"], ends["of"], ends["differing"]) == ("identical", 16, 4_000, 0)
    assert "identical in 16 random rows, of 4,000, byte by byte (--full compares all)" in child("check", MODEL).out
    whole = audit_of(child, MODEL, "--full")["ends"]
    assert (whole["kind"], whole["rows"], whole["differing"], whole["first"]) == ("some rows", 4_000, 1, [17])
    assert "of" not in whole


def test_difference_in_random_rows_is_certain(hub, child, tmp_path):
    hub.repos["me/model"] = files_of(wide_model(tmp_path / "model", shards=2, tied=True, head=table(4_000, 64, 1)))
    remote = audit_of(child, MODEL)
    assert remote["findings"][0]["rule"] == "B012"
    ends = remote["ends"]
    assert (ends["kind"], ends["rows"], ends["differing"], ends["of"]) == ("unrelated", 16, 16, 4_000)
    assert len(set(ends["first"])) == 8


def test_unusual_names_need_every_header(hub, child, tmp_path):
    tensors = {"a.words": table(4_000), "a.norm": np.ones(8, np.float32), "b.out": table(4_000, seed=1)}
    config = {"model_type": "unheard", "vocab_size": 4_000, "hidden_size": 8}
    named = {f"{name}.weight": values for name, values in tensors.items()}
    hub.repos["me/model"] = files_of(write_checkpoint(tmp_path / "model", config, named, shards=3))
    remote = audit_of(child, MODEL)
    assert remote["hub"]["unread"] == []
    assert findings_of(remote, MODEL) == findings_of(audit_of(child, tmp_path / "model"), tmp_path / "model")


def test_index_that_contradicts_a_header_makes_all_headers_read(hub, child, tmp_path):
    FAULTS["b002-moved"](tmp_path / "model")
    hub.repos["me/model"] = files_of(tmp_path / "model")
    remote = audit_of(child, MODEL)
    assert remote["hub"]["unread"] == []
    assert findings_of(remote, MODEL) == findings_of(audit_of(child, tmp_path / "model"), tmp_path / "model")


def test_revision_and_subfolder(hub, child, tmp_path):
    files = files_of(llama(tmp_path / "tied"))
    untied = files_of(llama(tmp_path / "untied", tied=False))
    hub.repos["me/model"] = files | {f"text/encoder/{name}": data for name, data in untied.items()}
    hub.revisions["me/model", "refs/pr/3"] = untied
    hub.revisions["me/model", "a/b"] = untied
    assert audit_of(child, MODEL)["claims"]["tied"] is True
    for address in (f"{MODEL}/text/encoder", f"{MODEL}@refs/pr/3", f"{MODEL}@a%2Fb", f"{MODEL}@{commit_of(untied)}"):
        remote = audit_of(child, address)
        assert remote["path"] == address
        assert remote["claims"]["tied"] is False, address
        commits = {path.split("/")[4] for _, path in hub.requests if "/resolve/" in path}
        assert remote["hub"]["commit"] in commits


def test_token_is_sent_to_the_hub_alone(hub, tmp_path):
    hub.repos["me/model"] = files_of(llama(tmp_path / "model"))
    hub.private.add("me/model")
    with HubChild(hub, tmp_path, TOKEN) as child:
        assert audit_of(child, MODEL)["kind"] == "folder"
    assert hub.sent
    assert {authorization for _, _, authorization in hub.sent} == {None}


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (MODEL, "no such model, or a private one; check the name; for a private model, log in with `hf auth login`"),
        ("hf://me/other@none", "the repository has no such revision; check the name after @"),
        ("hf://me/other/none", "the repository has no folder or file none; check the address"),
        ("hf://", "no model of the Hub has this address; write hf://org/model"),
        ("hf://me", "no model of the Hub has this address; write hf://org/model"),
        ("hf://datasets/me/other", "no such model"),
        ("hf://me/other/../x", "no model of the Hub has this address"),
    ],
)
def test_address_that_leads_nowhere_is_one_line(hub, child, tmp_path, address, problem):
    hub.repos["me/other"] = files_of(llama(tmp_path / "model"))
    line = one_line(child("check", address))
    assert line.startswith(address)
    assert problem in line


def test_gated_model_is_one_line(hub, child, tmp_path):
    hub.repos["me/model"] = files_of(llama(tmp_path / "model"))
    hub.gated.add("me/model")
    problem = f"the model is gated; accept its conditions at {hub.url}/me/model, then log in"
    assert one_line(child("check", MODEL)).startswith(f"{MODEL}/config.json: {problem}")


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("no commit", "the server names no commit"),
        ("no json", "not readable as JSON"),
        ("long listing", "files are no checkpoint"),
        ("no ranges", "the server sends more than"),
        ("other range", "the server answers with another range"),
        ("other size", "bytes, and"),
        ("other etag", "it changed while it was read (another ETag)"),
        ("other commit", "commit 0000000000000000000000000000000000000000, and"),
        ("compressed", "the server compressed its answer (gzip)"),
        ("too long", "the server sends more than"),
        ("loop", "more than 5 redirects"),
        ("odd redirect", "a redirect from http to file"),
        ("no location", "a redirect without an address"),
        ("long headers", "bytes of headers"),
        pytest.param("silent", "does not answer in 3 seconds", marks=SLOW),
        pytest.param("slow", "the server sends too slowly", marks=SLOW),
        pytest.param("cut short", "the answer broke off", marks=SLOW),
    ],
)
def test_server_that_lies_or_stalls_is_one_line(hub, child, tmp_path, fault, problem):
    hub.repos["me/model"] = files_of(wide_model(tmp_path / "model", shards=2))
    hub.faults.add(fault)
    done = child("check", MODEL)
    assert problem in one_line(done)
    assert hub.body_bytes < 10_000_000


QUICK = "informational"  # the others take the same seconds each


@pytest.mark.parametrize("fault", [QUICK, *(pytest.param(name, marks=SLOW) for name in ENDLESS if name != QUICK)])
def test_answer_without_end_is_one_line_and_its_connection_ends(hub, hasty, tmp_path, fault):
    hub.repos["me/model"] = files_of(llama(tmp_path / "model"))
    hub.faults.add(fault)
    done = hasty("check", MODEL)
    assert one_line(done).endswith("the server sends too slowly; try again later, or download the files first")
    assert 2.5 < done.seconds < 20  # the limit is three seconds
    latest = time.monotonic() + 20
    while hub.endless and time.monotonic() < latest:
        time.sleep(0.1)
    assert hub.endless == 0  # although the process lives


def test_every_fault_of_the_server_has_a_test():
    marks = test_server_that_lies_or_stalls_is_one_line.pytestmark
    values = [getattr(row, "values", row)[0] for mark in marks for row in mark.args[1]]
    assert {*values, *ENDLESS} == set(SERVER_FAULTS)


@pytest.mark.parametrize(
    ("route", "status", "problem"),
    [
        ("resolve", 401, "no such model, or a private one"),
        ("resolve", 403, "the Hub denies access"),
        ("resolve", 404, "not on the Hub"),
        ("get_large", 416, "the file is shorter than the Hub listed it"),
        pytest.param("listing", 429, "the Hub accepts no more requests for now", marks=SLOW),
        pytest.param("get_large", 503, "the server answered with status 503", marks=SLOW),
    ],
)
def test_refusal_is_one_line_and_no_finding(hub, child, tmp_path, route, status, problem):
    hub.repos["me/model"] = files_of(llama(tmp_path / "model"))
    hub.fail[route] = status
    assert problem in one_line(child("check", MODEL))


def test_passing_failure_is_tried_again(hub, child, tmp_path):
    hub.repos["me/model"] = files_of(llama(tmp_path / "model"))
    hub.fail_once["listing"] = 503
    assert audit_of(child, MODEL)["kind"] == "folder"


def test_server_cannot_make_it_read_more_than_a_folder_could(hub, child, tmp_path):
    files = files_of(llama(tmp_path / "model"))
    hub.repos["me/model"] = files | {"config.json": b" " * (8 * 2**20 + 1)}
    remote = audit_of(child, MODEL)
    assert "B001" in {finding["rule"] for finding in remote["findings"]}
    assert hub.body_bytes < 100_000


def test_offline_is_one_line(hub, tmp_path):
    hub.repos["me/model"] = files_of(llama(tmp_path / "model"))
    with HubChild(hub, tmp_path, HF_HUB_OFFLINE="1") as child:
        assert one_line(child("check", MODEL)).startswith("HF_HUB_OFFLINE keeps this process off the Hub; unset")
    assert not hub.requests


def test_unreachable_server_is_one_line_without_the_password(hub, tmp_path):
    with HubChild(hub, tmp_path, HF_ENDPOINT="http://user:password@127.0.0.1:1") as child:
        line = one_line(child("check", MODEL))
    assert "cannot reach http://127.0.0.1:1; check the network, or HF_ENDPOINT" in line
    assert "password" not in line


def test_plain_name_is_read_from_the_cache_alone(hub, child, tmp_path):
    line = one_line(child("check", "me/model"))
    assert line.endswith("the local cache lacks it: hf://me/model reads the model from the Hub")
    cache = tmp_path / "hf/hub/models--me--model/snapshots"
    llama(cache / "1a2b")
    with HubChild(hub, tmp_path) as cached:
        record = audit_of(cached, "me/model")
    assert record["path"] == str(cache / "1a2b")
    assert not hub.requests


def test_plan_and_diff_read_the_hub(hub, child, tmp_path):
    before = llama(tmp_path / "model")
    after = llama(tmp_path / "new", tensors={"model.embed_tokens.weight": table() + 1})
    hub.repos["me/model"], hub.repos["me/new"] = files_of(before), files_of(after)
    remote, local = (child("plan", "--like", MODEL, "--json"), child("plan", before / "config.json", "--json"))
    assert remote.record["model"]["parameters"] == local.record["model"]["parameters"]
    assert child("diff", MODEL, "hf://me/new").out == child("diff", before, after).out
    assert f"all {V} rows" not in child("diff", MODEL, "hf://me/new").err


def test_sections_on_tables_read_the_hub(hub, child, tmp_path):
    folder = llama(tmp_path / "tiny", tied=False, tokenizer=bpe_tokenizer())
    hub.repos["me/tiny"] = files_of(folder)
    words = ("--only", "alignment,tokens,direct_path", "--json")
    remote, local = child("inspect", "hf://me/tiny", *words), child("inspect", folder, *words)
    assert remote.code == local.code == 0, remote.err
    assert remote.record["sections"] == local.record["sections"]


@pytest.mark.parametrize("words", [("tie", MODEL, "--to", "x"), ("inspect", MODEL, "--text", "synthetic:words=100")])
def test_other_commands_name_the_download(hub, child, tmp_path, words):
    shutil.copytree(llama(tmp_path / "model"), tmp_path / "copy")
    hub.repos["me/model"] = files_of(tmp_path / "copy")
    done = child(*words)
    assert "hf download me/model --local-dir model" in done.err + done.out


SINGLE_FILES = [name for name in FAULTS if name.endswith((".gguf", ".onnx"))]


@pytest.mark.parametrize("name", SINGLE_FILES)
@pytest.mark.parametrize("folder", ["", "onnx/"])
def test_file_of_another_format_has_the_findings_of_the_file(hub, child, tmp_path, name, folder):
    FAULTS[name](tmp_path / name)
    hub.repos["me/model"] = {f"{folder}{path}": data for path, data in files_of(tmp_path).items() if "hf/" not in path}
    remote, local = audit_of(child, f"{MODEL}/{folder}{name}"), audit_of(child, tmp_path / name)
    assert remote["path"] == f"{MODEL}/{folder}{name}"
    assert findings_of(remote, MODEL) == findings_of(local, tmp_path / name)
    for key in ("kind", "parts", "tensors", "bytes"):
        assert remote[key] == local[key], key
    assert remote["hub"]["commit"] == commit_of(hub.repos["me/model"])


def test_single_safetensors_has_the_findings_of_the_file(hub, child, tmp_path):
    wide_model(tmp_path / "model", shards=2)
    name = "model-00001-of-00002.safetensors"
    hub.repos["me/model"] = files_of(tmp_path / "model")
    remote, local = audit_of(child, f"{MODEL}/{name}"), audit_of(child, tmp_path / "model" / name)
    for key in ("kind", "claims", "tensors", "bytes", "parts"):
        assert remote[key] == local[key], key
    assert remote["kind"] == "file"
    assert {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path} == {name}
    line = one_line(child("check", f"{MODEL}/tokenizer.json"))
    assert "no file of tensors that this command reads" in line


def test_repository_of_gguf_files_names_one(hub, child, tmp_path):
    FAULTS["b071.gguf"](tmp_path / "b071.gguf")
    hub.repos["me/model"] = {"a.gguf": (tmp_path / "b071.gguf").read_bytes(), "README.md": b"#"}
    assert f"give one of them, such as {MODEL}/a.gguf" in one_line(child("check", MODEL))


def gguf_of_two_tables(path, vocabulary, head):
    """Write a GGUF file with a vocabulary, a table and a head, with gguf's writer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token number {number}" for number in range(vocabulary)])
    writer.add_tensor("token_embd.weight", table(vocabulary, 64))
    writer.add_tensor("output.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_equal_tables_of_gguf_are_equal_in_random_rows(hub, child, tmp_path):
    vocabulary = 30_000
    gguf_of_two_tables(tmp_path / "a.gguf", vocabulary, table(vocabulary, 64))
    hub.repos["me/model"] = {"a.gguf": (tmp_path / "a.gguf").read_bytes()}
    (finding,) = audit_of(child, f"{MODEL}/a.gguf")["findings"]
    assert finding["rule"] == "B071"
    assert "equals token_embd.weight in 16 random rows, of 30,000, byte for byte (--full compares all)" in str(finding)
    assert hub.body_bytes < 2_000_000 < len(hub.repos["me/model"]["a.gguf"])
    assert len(hub.sent) <= 8 + 2 * 16  # windows of the vocabulary double; then a range for each row
    (finding,) = audit_of(child, f"{MODEL}/a.gguf", "--full")["findings"]
    assert "equals token_embd.weight byte for byte" in str(finding)


def test_headers_of_many_shards_are_read_several_at_a_time(hub, child, tmp_path):
    hub.repos["me/model"] = files_of(wide_model(tmp_path / "model", shards=24))
    hub.delay = 0.1  # seconds before each answer
    try:
        done = child("check", MODEL, "--all-headers", "--json")
    finally:
        hub.delay = 0
    large = [path for _, path in hub.requests if path.startswith("/large/")]
    assert len(done.record["hub"]["unread"]) == 0
    assert len(large) >= 24
    assert hub.most_at_once >= 4
    assert done.seconds < 0.1 * len(hub.requests)


def test_plain_name_is_read_at_the_main_branch_or_the_given_revision(hub, tmp_path):
    model = tmp_path / "hf/hub/models--me--model"
    main, other = "a" * 40, "b" * 40
    llama(model / "snapshots" / main)
    llama(model / "snapshots" / other, tied=False)  # the newest
    for name, commit in (("main", main), ("refs/pr/3", other)):
        (model / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (model / "refs" / name).write_text(commit)
    with HubChild(hub, tmp_path) as cached:
        for address, commit in (("me/model", main), (f"me/model@{other}", other), ("me/model@refs/pr/3", other)):
            assert audit_of(cached, address)["path"] == str(model / "snapshots" / commit), address
        for address in ("me/model@none", "me/model@../../../../.."):
            assert one_line(cached("check", address)).startswith(address)
    assert not hub.requests
