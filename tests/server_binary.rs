//! The server's binary: settings, exit codes, signals.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::pb::{ApplyExternalKvBatchRequest, MatchExternalKvPrefixRequest};

fn server(variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-indexer-server"));
    command.env_clear().envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

#[test]
fn a_bad_setting_stops_the_start_in_one_line() {
    for (name, value) in [
        ("KV_INDEXER_LISTEN_ADDR", "localhost"),
        ("KV_INDEXER_PREFIX_QUERY_MAX_INFLIGHT", "0"),
        ("KV_INDEXER_WORKER_TTL_MS", "7"),
        ("KV_INDEXER_SETTLE_MS", "soon"),
        ("RUST_LOG", "sgl_kv_indexer=loud"),
        ("KV_INDEXER_HTTP_ADDR", "9464"),
        ("KV_INDEXER_LOG_FORMAT", "xml"),
        ("KV_INDEXER_TRACE_CONTEXT", "yes"),
        ("KV_INDEXER_CONNECTIONS_MAX", "0"),
        ("KV_INDEXER_MESSAGE_MEMORY_MIB", "7"),
        ("KV_INDEXER_APPLY_TOKEN_FILE", "no-such-file"),
        ("KV_INDEXER_APPLY_NAMES", "bridge"),
    ] {
        let output = server(&[(name, value)]).output().expect("a binary");
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(name) && text.contains(value) && text.contains("takes"), "{text}");
    }
}

#[test]
fn an_address_in_use_stops_the_start_in_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let output = server(&[("KV_INDEXER_LISTEN_ADDR", &address)]).output().expect("a binary");
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    // The first line tells what was tried.
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(
        text.lines().last().unwrap_or_default().contains(&format!("cannot listen on {address}")),
        "{text}"
    );
}

#[test]
fn help_and_version_are_printed() {
    let help = server(&[]).arg("--help").output().expect("a binary");
    let text = String::from_utf8(help.stdout).expect("UTF-8");
    assert_eq!(help.status.code(), Some(0));
    for name in ["KV_INDEXER_LISTEN_ADDR", "KV_INDEXER_PREFIX_QUERY_MAX_INFLIGHT", "RUST_LOG", "[::1]:50051"]
    {
        assert!(text.contains(name), "{text}");
    }
    let version = server(&[]).arg("--version").output().expect("a binary");
    let build = format!("{} ({})\n", env!("CARGO_PKG_VERSION"), sgl_kv_indexer::version::COMMIT);
    assert_eq!(String::from_utf8_lossy(&version.stdout), format!("kv-indexer-server {build}"));
    assert_eq!(server(&[]).arg("--no-such-flag").output().expect("a binary").status.code(), Some(2));
}

#[test]
fn both_signals_end_it_well() {
    for signal in ["TERM", "INT"] {
        let mut child = server(&[("KV_INDEXER_LISTEN_ADDR", "127.0.0.1:0")]).spawn().expect("a binary");
        wait_until_it_listens(&mut child);
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(sent.expect("a shell's kill").success());
        assert_eq!(child.wait().expect("an end").code(), Some(0), "SIG{signal}");
    }
}

/// The log of a server that is stopped as soon as it listens.
fn log(variables: &[(&str, &str)]) -> Vec<String> {
    let mut child = server(variables).spawn().expect("a binary");
    let mut log = BufReader::new(child.stderr.take().expect("piped"));
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        assert!(
            log.read_line(&mut line).expect("UTF-8") > 0,
            "the server ended before it listened: {lines:?}"
        );
        lines.push(line.trim_end().to_owned());
        if line.contains("listening") {
            break;
        }
    }
    let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status();
    assert!(sent.expect("a shell's kill").success());
    lines.extend(log.lines().map(|line| line.expect("UTF-8")));
    assert_eq!(child.wait().expect("an end").code(), Some(0), "{lines:?}");
    lines
}

const ANY_PORT: (&str, &str) = ("KV_INDEXER_LISTEN_ADDR", "127.0.0.1:0");

#[test]
fn the_first_line_tells_build_settings_and_limits() {
    for format in ["human", "json"] {
        let lines = log(&[ANY_PORT, ("KV_INDEXER_HTTP_ADDR", "off"), ("KV_INDEXER_LOG_FORMAT", format)]);
        let first = &lines[0];
        for word in
            ["version", "commit", "127.0.0.1:0", "KV_INDEXER_PREFIX_QUERY_MAX_INFLIGHT", "8388608", "16384"]
        {
            assert!(first.contains(word), "{word} is not in {first}");
        }
    }
}

#[test]
fn a_json_log_is_an_object_per_line() {
    let lines = log(&[ANY_PORT, ("KV_INDEXER_HTTP_ADDR", "127.0.0.1:0"), ("KV_INDEXER_LOG_FORMAT", "json")]);
    assert!(lines.len() >= 3, "{lines:?}");
    for line in &lines {
        let object: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(object["level"].is_string() && object["message"].is_string(), "{line}");
    }
}

// On a thread of its own the client hears of the drain while the log is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_callers_trace_is_on_the_lines_of_its_call_if_asked_for() {
    const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (asked_for, expected) in [("on", true), ("off", false)] {
        let variables = [
            ANY_PORT,
            ("KV_INDEXER_HTTP_ADDR", "off"),
            ("KV_INDEXER_TRACE_CONTEXT", asked_for),
            ("RUST_LOG", "sgl_kv_indexer=debug"),
        ];
        let mut child = server(&variables).spawn().expect("a binary");
        let mut log =
            BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("UTF-8"));
        let line = log.find(|line| line.contains("listening")).expect("a server that listens");
        let address = line.rsplit_once("address=").expect("an address").1.to_owned();
        let mut client = KvIndexerClient::connect(format!("http://{address}")).await.expect("a server");
        let mut request =
            tonic::Request::new(MatchExternalKvPrefixRequest { hashes: vec![1], max_blocks: 0 });
        request.metadata_mut().insert("traceparent", TRACEPARENT.parse().expect("a value"));
        client.match_external_kv_prefix(request).await.expect("an answer");
        drop(client);
        let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status();
        assert!(sent.expect("a shell's kill").success());
        let rest: Vec<String> = log.collect();
        let told = rest.iter().any(|line| {
            let has = |text: &str| line.contains(text);
            has("answered") && has("0af7651916cd43dd8448eb211c80319c") && has("MatchExternalKvPrefix")
        });
        assert_eq!(told, expected, "{asked_for}: {rest:#?}");
        assert!(expected || !rest.iter().any(|line| line.contains("answered")), "a line per call: {rest:#?}");
        child.wait().expect("an end");
    }
}

/// A file that is removed when its test ends.
struct TokenFile(std::path::PathBuf);

impl TokenFile {
    fn new(name: &str, token: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-indexer-{name}-{}", std::process::id()));
        std::fs::write(&path, token).expect("written");
        TokenFile(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn an_address_beyond_loopback_that_asks_nothing_is_warned_of() {
    let token = TokenFile::new("warned", "a-token-of-the-bridges");
    let warned = |variables: &[(&str, &str)]| {
        let off = [("KV_INDEXER_HTTP_ADDR", "off")];
        log(&[&off[..], variables].concat())
            .iter()
            .filter(|line| line.contains("anybody who reaches"))
            .count()
    };
    let everywhere = ("KV_INDEXER_LISTEN_ADDR", "0.0.0.0:0");
    assert_eq!(warned(&[everywhere]), 1);
    assert_eq!(warned(&[ANY_PORT]), 0);
    assert_eq!(warned(&[everywhere, ("KV_INDEXER_APPLY_TOKEN_FILE", token.path())]), 0);
}

// On a thread of its own the client hears of the drain while the log is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_log_at_any_level_shows_a_token() {
    const TOKEN: &str = "a-token-that-nobody-may-see";
    let file = TokenFile::new("unseen", TOKEN);
    let variables = [
        ANY_PORT,
        ("KV_INDEXER_HTTP_ADDR", "off"),
        ("KV_INDEXER_APPLY_TOKEN_FILE", file.path()),
        ("KV_INDEXER_TRACE_CONTEXT", "on"),
        ("RUST_LOG", "trace"),
    ];
    let mut child = server(&variables).spawn().expect("a binary");
    let mut log =
        BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("UTF-8"));
    let mut lines = Vec::new();
    let address = loop {
        let line = log.next().expect("a server that listens");
        lines.push(line.clone());
        if let Some((_, address)) = line.rsplit_once("listening address=") {
            break address.to_owned();
        }
    };
    let reading = std::thread::spawn(move || log.collect::<Vec<_>>());
    let mut client = KvIndexerClient::connect(format!("http://{address}")).await.expect("a server");
    for token in [TOKEN, "another-token-that-nobody-may-see"] {
        let batch = ApplyExternalKvBatchRequest { worker_id: "w".to_owned(), ..Default::default() };
        let mut request = tonic::Request::new(batch);
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().expect("a value"));
        assert_eq!(client.apply_external_kv_batch(request).await.is_ok(), token == TOKEN);
    }
    drop(client);
    let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status();
    assert!(sent.expect("a shell's kill").success());
    lines.extend(reading.join().expect("a log"));
    child.wait().expect("an end");
    assert!(lines.iter().any(|line| line.contains("unauthenticated")), "nothing was refused: {lines:#?}");
    for line in &lines {
        assert!(!line.contains("nobody-may-see"), "{line}");
    }
}

#[test]
fn an_http_port_that_was_asked_for_must_be_free() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let output = server(&[ANY_PORT, ("KV_INDEXER_HTTP_ADDR", &address)]).output().expect("a binary");
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.contains(&address) && last.contains("KV_INDEXER_HTTP_ADDR"), "{text}");
}

#[test]
fn a_default_http_port_that_is_taken_is_told_of_and_done_without() {
    // Taken by this test, by another server, or impossible on this machine: all the same.
    let taken = TcpListener::bind("[::1]:9464");
    let lines = log(&[ANY_PORT]);
    let told =
        lines.iter().any(|line| line.contains("KV_INDEXER_HTTP_ADDR") && line.contains("no HTTP port"));
    assert!(told, "{taken:?} {lines:?}");
}

/// Returns once the log says so; fails if it ends before.
fn wait_until_it_listens(child: &mut Child) {
    let log = BufReader::new(child.stderr.as_mut().expect("piped"));
    for line in log.lines() {
        if line.expect("UTF-8").contains("listening") {
            return;
        }
    }
    panic!("the server ended before it listened");
}
