//! The command line as its user has it: the real binary, against a real server.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;

use common::capture::{Capture, state_of};
use common::publisher::{Event, Publisher, batch};
use serde_json::Value;
use sgl_kv_indexer::arena::{Action, Batch, Index, PackedHashes, Tier};
use sgl_kv_indexer::server::{Config, serve};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

/// A server of this process, and its index.
async fn server() -> (String, Arc<Index>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let index = Arc::new(Index::new());
    tokio::spawn(serve(listener, Config::default(), Arc::clone(&index), std::future::pending()));
    (endpoint, index)
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-indexer"));
    command.args(arguments).env_clear().kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn run(arguments: &[&str]) -> Output {
    command(arguments).output().await.expect("the binary")
}

async fn run_with_input(arguments: &[&str], input: &str) -> Output {
    let mut child = command(arguments).stdin(Stdio::piped()).spawn().expect("the binary");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(input.as_bytes()).await.expect("read by the binary");
    drop(stdin);
    child.wait_with_output().await.expect("it ends")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("it was not killed")
}

#[track_caller]
fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Runs a command that must succeed and write JSON.
async fn ask(arguments: &[&str]) -> Value {
    let output = run(arguments).await;
    assert_eq!(code(&output), 0, "{arguments:?}: {output:?}");
    json(&output)
}

fn capture(name: &str) -> String {
    format!("{}/tests/data/{name}.jsonl.gz", env!("CARGO_MANIFEST_DIR"))
}

/// A path of one test alone; the file goes with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Scratch(std::env::temp_dir().join(format!("kv-indexer-cli-{name}-{}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn a_recording_that_is_reported_answers_as_recorded_and_verifies() {
    for name in ["sglang-plain-small", "sglang-hicache-write-through", "vllm-plain-int"] {
        let ((server, index), file) = (server().await, capture(name));
        // What an earlier life left at the server is gone with the first report.
        let stale = PackedHashes::pack(&[-5]);
        let hashes = PackedHashes::new(&stale).expect("whole hashes");
        let actions = &[Action::Report { tier: Tier::Ssd, hashes, masks: &[], tokens: &[] }];
        let batch = Batch { worker_id: "w0", worker_address: "", cache_spec: None, seq: 1, actions };
        index.apply(&batch).expect("applied");
        assert_eq!(code(&run(&["match", "-5", "--server", &server]).await), 0, "{name}");
        let output = run(&["replay", &file, "--address", "http://w0", "--server", &server]).await;
        assert_eq!(code(&output), 0, "{name}: {output:?}");
        assert_eq!(code(&run(&["match", "-5", "--server", &server]).await), 1, "{name}");
        let output = run(&["verify", &file, "--address", "http://w0", "--server", &server]).await;
        assert_eq!(code(&output), 0, "{name}: {output:?}");

        let recorded = Capture::read(name);
        let mut asked = 0;
        for query in recorded.expected["queries"].as_array().expect("queries").iter().take(8) {
            let promised = query["events_prefix"].as_object().expect("promises");
            let (_, promised) = promised.iter().max_by_key(|(tiers, _)| tiers.len()).expect("a promise");
            let hashes = query["hashes"].to_string();
            if hashes == "[]" {
                continue;
            }
            let arguments = ["query", "--json", "--server", &server, "--file", "-"];
            let by_hash = run_with_input(&arguments, &hashes).await;
            let answer = json(&by_hash);
            let blocks = answer["matches"][0]["blocks"].as_u64().unwrap_or(0);
            assert_eq!(blocks, promised.as_u64().expect("a number"), "{name}: {query}");
            assert_eq!(code(&by_hash), i32::from(blocks == 0));
            if name.starts_with("sglang") {
                let page = recorded.header["page_size"].to_string();
                let by_token = [&arguments[..], &["--engine", "sglang", "--page-size", &page]].concat();
                let by_token = run_with_input(&by_token, &query["tokens"].to_string()).await;
                assert_eq!(json(&by_token), answer, "{name}: {query}");
            }
            asked += 1;
        }
        assert!(asked > 3, "{name}: {asked} queries");
        differ(name, &server, &index).await;
    }
}

/// Changes a placement of a verified server each way; each has to be told, and nothing else.
async fn differ(name: &str, server: &str, index: &Index) {
    let file = capture(name);
    let arguments = ["verify", &file, "--json", "--server", server];
    let whole = ask(&arguments).await;
    assert_eq!(whole["differences"], Value::Array(Vec::new()));
    let shown = run(&["show", &file, "--json"]).await;
    let shown = String::from_utf8(shown.stdout).expect("UTF-8");
    let events: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut stored = events.iter().rev().flat_map(|line| line["events"].as_array().into_iter().flatten());
    let stored = stored.find(|event| event["event"] == "stored" && event["tier"] == "HBM");
    let last = stored.expect("a store")["blocks"][0].as_str().expect("a hash").to_owned();
    let packed = PackedHashes::pack(&[last.parse().expect("64 bits")]);
    let hashes = PackedHashes::new(&packed).expect("whole hashes");
    let change = |action| {
        let actions = &[action];
        let batch = Batch { worker_id: "w0", worker_address: "", cache_spec: None, seq: 9, actions };
        index.apply(&batch).expect("applied");
    };
    let held = |file: &Value| file["placements"].as_u64().expect("a number");
    let mut told = Vec::new();
    for action in [
        Action::Report { tier: Tier::Ssd, hashes, masks: &[], tokens: &[] },
        Action::Revoke { tier: Tier::Ssd, hashes },
        Action::Revoke { tier: Tier::Hbm, hashes },
        Action::Report { tier: Tier::Hbm, hashes, masks: &[1], tokens: &[] },
    ] {
        change(action);
        let output = run(&arguments).await;
        let found = json(&output);
        assert_eq!(held(&found), held(&whole), "what is expected stays");
        let differences = found["differences"].as_array().expect("a list").clone();
        assert_eq!(code(&output), i32::from(!differences.is_empty()), "{found}");
        assert!(differences.iter().all(|row| row["block"] == *last && row["worker"] == "w0"), "{found}");
        told.push(differences);
    }
    let what = |differences: &[Value]| -> Vec<String> {
        differences.iter().map(|row| row["difference"].as_str().expect("text").to_owned()).collect()
    };
    let told: Vec<_> = told.iter().map(|differences| what(differences)).collect();
    let components = "components 1 on the server, 0 in the recording";
    let expected = [vec!["only on the server"], vec![], vec!["missing on the server"], vec![components]];
    assert_eq!(told, expected, "{name}");
}

#[tokio::test]
async fn a_stream_is_recorded_shown_and_published_as_it_came() {
    let (first, second) = (Scratch::new("first"), Scratch::new("second"));
    let mut publisher = Publisher::bind("kv-events").await;
    let record = |endpoint: &str, file: &Scratch| {
        command(&["record", endpoint, file.path(), "--count", "3", "--stream", "w1"])
            .spawn()
            .expect("the binary")
    };
    let recorder = record(&publisher.endpoint, &first);
    publisher.joined().await;
    for events in [
        vec![Event::Cleared, Event::Stored(vec![1, -2, 3])],
        vec![Event::Removed(vec![3])],
        vec![Event::Stored(vec![i64::MIN])],
    ] {
        publisher.send(batch(&events)).await;
    }
    let output = recorder.wait_with_output().await.expect("it ends after three");
    assert_eq!(code(&output), 0, "{output:?}");

    let shown = run(&["show", first.path(), "--json"]).await;
    let lines = String::from_utf8(shown.stdout).expect("UTF-8");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!((&lines[0]["what"], &lines[0]["stream"]), (&"connected".into(), &"w1".into()));
    assert_eq!((&lines[1]["topic"], &lines[1]["sequence"]), (&"kv-events".into(), &0.into()));
    assert_eq!(lines[1]["events"][1]["blocks"], serde_json::json!(["1", "-2", "3"]));
    assert_eq!(lines[2]["events"][0]["event"], "removed");
    assert_eq!(lines[3]["events"][0]["blocks"][0], i64::MIN.to_string());

    // The recording, published, makes a recording of the same events.
    let arguments =
        ["replay", first.path(), "--publish", "tcp://127.0.0.1:0", "--leave", "--pace", "recorded"];
    let mut replay = command(&arguments).spawn().expect("the binary");
    let endpoint = bound(&mut replay).await;
    let output = record(&endpoint, &second).wait_with_output().await.expect("it ends after three");
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(replay.wait().await.expect("it leaves").success());
    let events = |path: &Path| {
        let path = path.to_str().expect("UTF-8").to_owned();
        async move {
            let shown = String::from_utf8(run(&["show", &path, "--json"]).await.stdout).expect("UTF-8");
            let lines = shown.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
            lines.map(|line| (line["sequence"].clone(), line["events"].clone())).collect::<Vec<_>>()
        }
    };
    assert_eq!(events(&second.0).await, events(&first.0).await);
}

/// What was received is in the file however a recorder is told to stop; another command ends by the signal.
#[tokio::test]
async fn signals_end_commands_well() {
    for signal in ["TERM", "INT"] {
        let scratch = Scratch::new(signal);
        let mut publisher = Publisher::bind("").await;
        let recorder = command(&["record", &publisher.endpoint, scratch.path()]).spawn().expect("the binary");
        publisher.joined().await;
        let id = recorder.id().expect("running").to_string();
        let sent = Command::new("kill").args(["-s", signal, &id]).status().await;
        assert!(sent.expect("a shell's kill").success());
        let output = recorder.wait_with_output().await.expect("it ends");
        assert_eq!(code(&output), 0, "SIG{signal}: {output:?}");
        let shown = run(&["show", scratch.path()]).await;
        assert!(String::from_utf8_lossy(&shown.stdout).contains("connected"), "SIG{signal}: {shown:?}");
    }
    // Nobody closes its input, so it reads on.
    let mut child = command(&["query", "--file", "-"]).stdin(Stdio::piped()).spawn().expect("the binary");
    let id = child.id().expect("running").to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &id]).status().await.expect("kill").success());
    assert_eq!(child.wait().await.expect("it ends").code(), None, "ended by the signal");
}

/// Where a publisher says that it waits.
async fn bound(replay: &mut Child) -> String {
    let mut lines = BufReader::new(replay.stdout.as_mut().expect("piped")).lines();
    let line = lines.next_line().await.expect("UTF-8").expect("a line");
    line.strip_suffix(": waiting for a subscriber").expect(&line).to_owned()
}

#[tokio::test]
async fn every_stream_of_a_capture_is_a_worker_unless_one_is_picked() {
    let ((server, index), file) = (server().await, capture("sglang-attn-dp4"));
    let refused = run(&["replay", &file, "--server", &server, "--worker", "w"]).await;
    assert_eq!(code(&refused), 2, "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--stream"), "{refused:?}");

    let picked = ["replay", &file, "--server", &server, "--worker", "one", "--stream", "w0/dp1"];
    assert_eq!(code(&run(&picked).await), 0);
    assert!(index.read().find_worker("one").is_some());
    assert_eq!(code(&run(&["replay", &file, "--server", &server]).await), 0);
    for rank in 0..4 {
        assert!(index.read().find_worker(&format!("w0/dp{rank}")).is_some(), "rank {rank}");
    }
    assert_eq!(code(&run(&["verify", &file, "--server", &server]).await), 0);
    let nobody = run(&["replay", &file, "--server", &server, "--stream", "w9"]).await;
    assert_eq!(code(&nobody), 1, "{nobody:?}");
}

#[tokio::test]
async fn questions_are_answered_in_json_and_in_tables() {
    let (server, _) = server().await;
    let replayed =
        run(&["replay", &capture("sglang-plain-small"), "--address", "http://w0", "-s", &server]).await;
    assert_eq!(code(&replayed), 0);
    // The first two blocks of a recorded prompt, and one that nobody has.
    let recorded = Capture::read("sglang-plain-small");
    let queries = recorded.expected["queries"].as_array().expect("queries");
    let held =
        queries.iter().find(|query| query["events_prefix"]["GPU"].as_u64() > Some(2)).expect("a match");
    let hash = |place: usize| held["hashes"][place].as_str().expect("text").to_owned();
    let (one, two) = (hash(0), hash(1));
    let blocks = [&one[..], &two, "7"];

    let matched = ask(&[&["match", "--json", "-s", &server, "--count-as-hit"], &blocks[..]].concat()).await;
    let tier = &matched["matches"][0]["tiers"][0];
    assert_eq!(
        (&tier["tier"], tier["blocks"].as_array().map(Vec::len)),
        (&"HBM".into(), Some(2)),
        "{matched}"
    );
    let hits = ask(&[&["hits", "--json", "-s", &server], &blocks[..]].concat()).await;
    let counts: Vec<_> = hits["hits"].as_array().expect("a list").iter().map(|row| &row["hits"]).collect();
    assert_eq!(counts, [1, 1], "{hits}");
    let listed = ask(&["workers", "--json", "-s", &server]).await;
    let row = &listed["workers"][0];
    let state = Capture::read("sglang-plain-small");
    let held = state_of(&state.streams()[0].1)["GPU"].len();
    assert_eq!((&row["worker"], &row["address"]), (&"w0".into(), &"http://w0".into()), "{listed}");
    assert_eq!(row["blocks"], serde_json::json!({"HBM": held, "DRAM": 0, "SSD": 0}));

    // Hash by hash, tables say the same; styles are for terminals.
    for (command, rows) in [("query", 1), ("match", 2), ("hits", 2), ("workers", 1)] {
        let blocks = if command == "workers" { &[][..] } else { &blocks[..] };
        let output = run(&[&[command, "-s", &server], blocks].concat()).await;
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert_eq!(text.lines().count(), rows + 1, "{command}: {text}");
        assert!(!text.contains('\u{1b}'), "{command}: {text:?}");
    }
    for (expected, left) in [(0, 1), (1, 1)] {
        let output = run(&["drop-worker", "w0", "-s", &server]).await;
        assert_eq!(code(&output), expected, "{output:?}");
        assert_eq!(code(&run(&["workers", "-s", &server]).await), left);
    }
    let replayed =
        run(&["replay", &capture("sglang-plain-small"), "--address", "http://w0", "-s", &server]).await;
    assert_eq!(code(&replayed), 0, "it may come back under the same name");
    // The variable names the server where no flag does.
    let output = command(&["query", &one]).env("KV_INDEXER_ENDPOINT", &server).output().await;
    assert_eq!(code(&output.expect("the binary")), 0);
}

#[tokio::test]
async fn every_exit_code_means_what_it_says() {
    let (server, _) = server().await;
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        format!("http://{}", listener.local_addr().expect("bound"))
    };
    let plain = capture("sglang-plain-small");
    let cut = Scratch::new("cut-off");
    std::fs::write(&cut.0, &std::fs::read(&plain).expect("a capture")[..5_000]).expect("written");
    let missing = capture("no-such-capture");
    let rows: &[(i32, &[&str])] = &[
        (0, &["--help"]),
        (0, &["--version"]),
        (0, &["show", &plain]),
        // Nothing found, or differences.
        (1, &["query", "1", "-s", &server]),
        (1, &["match", "-1", "-s", &server]),
        (1, &["hits", "1", "2", "-s", &server]),
        (1, &["workers", "-s", &server]),
        (1, &["drop-worker", "w9", "-s", &server]),
        (1, &["show", &plain, "--stream", "w9"]),
        (1, &["verify", &plain, "-s", &server]),
        // Bad arguments or input.
        (2, &[]),
        (2, &["no-such-command"]),
        (2, &["query", "-s", &server]),
        (2, &["query", "one", "-s", &server]),
        (2, &["query", "1", "-s", "indexer:50051"]),
        (2, &["query", "1", "-s", "https://indexer"]),
        (2, &["query", "1", "--engine", "sglang", "-s", &server]),
        (2, &["query", "1", "--engine", "sglang", "--page-size", "0", "-s", &server]),
        (2, &["query", "1", "2", "--engine", "sglang", "--page-size", "16", "-s", &server]),
        (2, &["match", "1", "-s", &server, "-s", &nobody]),
        (2, &["query", "--file", &missing, "-s", &server]),
        (2, &["show", &missing]),
        (2, &["show", cut.path()]),
        (2, &["verify", cut.path(), "-s", &server]),
        (2, &["replay", &plain, "--setting", "KV_INDEXER_COPIES=maybe", "-s", &server]),
        (2, &["replay", &plain, "--setting", "KV_INDEXER_NO_SUCH=1", "-s", &server]),
        (2, &["replay", &plain, "--publish", "tcp://127.0.0.1:0", "--worker", "w"]),
        (2, &["bench", "query", "-s", "http://192.0.2.1:50051"]),
        (2, &["bench", "query", "--blocks", "0", "-s", &server]),
        (2, &["record", "udp://127.0.0.1:1", "unwritten"]),
        (2, &["record", "tcp://127.0.0.1:1", &plain]),
        // Nobody there.
        (3, &["query", "1", "-s", &nobody]),
        (3, &["match", "1", "-s", &nobody]),
        (3, &["bench", "query", "-s", &nobody]),
        (3, &["replay", &plain, "-s", &nobody]),
        (3, &["verify", &plain, "-s", &nobody]),
    ];
    for (expected, arguments) in rows {
        let output = run(arguments).await;
        assert_eq!(code(&output), *expected, "{arguments:?}: {output:?}");
        if *expected > 1 {
            assert!(!output.stderr.is_empty(), "{arguments:?} says nothing");
            assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{output:?}");
        }
    }
    // One server of several answers: the first is asked in vain.
    let output = run(&["query", "1", "-s", &nobody, "-s", &server]).await;
    assert_eq!(code(&output), 1, "{output:?}");
}

#[tokio::test]
async fn a_server_of_another_contract_is_refused_by_code_four() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    // A gRPC server without any service: every call is unimplemented.
    let router = tonic::service::Routes::default();
    tokio::spawn(tonic::transport::Server::builder().add_routes(router).serve_with_incoming(incoming));
    for command in [&["query", "1"][..], &["match", "1"], &["hits", "1"], &["workers"], &["drop-worker", "w"]]
    {
        let output = run(&[command, &["-s", &endpoint]].concat()).await;
        assert_eq!(code(&output), 4, "{command:?}: {output:?}");
    }
}

/// Ten calls at fixed times, whose answers are waited for: no outcome hangs on speed.
#[tokio::test]
async fn a_bench_counts_right_answers_and_tells_wrong_ones() {
    let (server, index) = server().await;
    let bench = async |mode: &str, server: &str, more: &[&str]| {
        let sizes = ["--prompts", "3", "--holders", "5", "--long-blocks", "100"];
        let times = ["--rate", "100", "--seconds", "0.1", "--warm-up", "0"];
        let output = run(&[&["bench", mode, "-s", server], &sizes[..], &times, more].concat()).await;
        let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
        let rows = text.lines().skip(1).map(|line| line.split('\t').map(str::to_owned).collect());
        (code(&output), rows.collect::<Vec<Vec<String>>>())
    };
    for (mode, kinds) in [
        ("query", &["query"][..]),
        ("fill", &["apply"]),
        ("mixed", &["query", "apply"]),
        ("long-scan", &["query", "apply"]),
    ] {
        let (code, rows) = bench(mode, &server, &["--blocks", "20"]).await;
        let found: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!((code, &found[..]), (0, kinds), "{mode}: {rows:?}");
        assert!(rows.iter().all(|row| row[7] == "-"), "{mode}: {rows:?}");
    }
    assert_eq!(index.read().workers().count(), 5);
    // Prompts that nobody has reported.
    let (code, rows) = bench("query", &server, &["--blocks", "21", "--prepared"]).await;
    assert_eq!((code, &rows[0][7][..]), (1, "10 WRONG ANSWER"), "{rows:?}");

    let mut noop = command(&["bench", "noop", "--listen", "127.0.0.1:0", "--blocks", "20", "--holders", "5"]);
    let mut noop = noop.spawn().expect("the binary");
    let mut lines = BufReader::new(noop.stdout.as_mut().expect("piped")).lines();
    let line = lines.next_line().await.expect("UTF-8").expect("a line");
    let address = line.strip_prefix("listening on ").expect(&line);
    let (code, rows) = bench("query", &format!("http://{address}"), &["--blocks", "20"]).await;
    assert_eq!((code, &rows[0][7][..]), (0, "-"), "{rows:?}");
}

/// A flood lasts until its subscriber leaves, which it does after five messages.
#[tokio::test]
async fn a_flood_is_an_engines_stream() {
    let mut flood = command(&["bench", "flood", "--listen", "127.0.0.1:0", "--seconds", "3600"]);
    let mut flood = flood.spawn().expect("the binary");
    let mut lines = BufReader::new(flood.stdout.as_mut().expect("piped")).lines();
    let line = lines.next_line().await.expect("UTF-8").expect("a line");
    let endpoint = format!("tcp://{}", line.strip_prefix("listening on ").expect(&line));
    let scratch = Scratch::new("flood");
    let output = run(&["record", &endpoint, scratch.path(), "--count", "5"]).await;
    assert_eq!(code(&output), 0, "{output:?}");
    let told = lines.next_line().await.expect("UTF-8").expect("a line");
    assert!(told.contains("batches"), "{told}");
    assert!(flood.wait().await.expect("it ends").success());

    let shown = String::from_utf8(run(&["show", scratch.path(), "--json"]).await.stdout).expect("UTF-8");
    let shown: Vec<Value> =
        shown.lines().skip(1).map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(shown.len(), 5);
    for (number, message) in shown.iter().enumerate() {
        assert_eq!(message["sequence"], number);
        let events: Vec<_> = message["events"].as_array().expect("events").iter().collect();
        let kinds: Vec<_> = events.iter().map(|event| &event["event"]).collect();
        assert_eq!(kinds, ["removed", "stored"]);
        assert_eq!(events[1]["blocks"].as_array().map(Vec::len), Some(32));
    }
}

#[tokio::test]
async fn every_shell_has_its_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]).await;
        let script = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(
            output.status.success() && script.contains("verify") && script.contains("page-size"),
            "{shell}"
        );
    }
}
