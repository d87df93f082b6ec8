//! The server's binary: settings, exit codes, signals.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

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
        ("RUST_LOG", "sgl_kv_indexer=loud"),
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
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(&address), "{text}");
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
    assert!(String::from_utf8_lossy(&version.stdout).contains(env!("CARGO_PKG_VERSION")));
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
