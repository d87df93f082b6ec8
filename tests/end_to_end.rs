//! The whole path: both real binaries between a publisher and a router.
//!
//! Every recorded stream that is a plain history of a worker goes through a
//! `kv-indexer-bridge` per rank into a `kv-indexer-server`, and the index must
//! end as the recording says: what each worker holds where, and every recorded
//! query's answer. Not among them are recordings that are not such histories:
//! bad messages, several lives of one publisher, replays, physical copies of
//! blocks, and media that are no tier. Those are checked at the bridge's parts.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::capture::{Capture, state_of};
use common::publisher::{Event, Publisher, batch};
use serde_json::Value;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::pb::{MatchExternalKvPrefixRequest, MatchExternalKvRequest};
use tonic::transport::Channel;

/// Tries at an answer that must come, and the pause after each: far more than any machine needs.
const TRIES: u32 = 600;
const PAUSE: Duration = Duration::from_millis(100);

/// A process that is killed when its test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn start(binary: &str, variables: &[(&str, &str)]) -> Running {
        let mut command = Command::new(binary);
        command.env_clear().envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Running(command.spawn().expect("a binary"))
    }

    /// Starts a server and reads from its log where it listens.
    fn server(address: &str) -> (Running, String) {
        let variables = [("KV_INDEXER_LISTEN_ADDR", address)];
        let mut server = Running::start(env!("CARGO_BIN_EXE_kv-indexer-server"), &variables);
        let mut log = BufReader::new(server.0.stderr.take().expect("piped"));
        let mut line = String::new();
        while !line.contains("listening") {
            line.clear();
            assert!(log.read_line(&mut line).expect("UTF-8") > 0, "the server ended before it listened");
        }
        drain(log);
        let port = line.rsplit(':').next().and_then(|rest| {
            rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u16>().ok()
        });
        let port = port.unwrap_or_else(|| panic!("no address in {line:?}"));
        (server, format!("127.0.0.1:{port}"))
    }

    fn bridge(worker: &str, server: &str, events: &str, more: &[(&str, &str)]) -> Running {
        let endpoint = format!("http://{server}");
        let address = address_of(worker);
        let mut variables = vec![
            ("KV_INDEXER_WORKER_ID", worker),
            ("KV_INDEXER_WORKER_ADDRESS", &address),
            ("KV_INDEXER_ENDPOINT", &endpoint),
            ("SGLANG_KV_EVENT_ENDPOINT", events),
        ];
        variables.extend_from_slice(more);
        let mut bridge = Running::start(env!("CARGO_BIN_EXE_kv-indexer-bridge"), &variables);
        drain(BufReader::new(bridge.0.stderr.take().expect("piped")));
        bridge
    }

    /// Asks it to stop as an operator does, and returns its exit code.
    fn terminate(mut self) -> Option<i32> {
        let sent = Command::new("kill").args(["-s", "TERM", &self.0.id().to_string()]).status();
        assert!(sent.expect("a shell's kill").success());
        self.0.wait().expect("an end").code()
    }
}

/// Reads a log to its end, so that its writer never waits for room.
fn drain(log: impl BufRead + Send + 'static) {
    std::thread::spawn(move || log.lines().for_each(drop));
}

fn address_of(worker: &str) -> String {
    format!("http://{worker}.example:30000")
}

async fn client(server: &str) -> KvIndexerClient<Channel> {
    let client = KvIndexerClient::connect(format!("http://{server}")).await.expect("a server");
    client.max_decoding_message_size(usize::MAX)
}

/// What a worker holds, by tier.
type Held = BTreeMap<i32, BTreeSet<i64>>;

async fn held(client: &mut KvIndexerClient<Channel>, worker: &str, hashes: &BTreeSet<i64>) -> Held {
    let mut held = Held::new();
    let hashes: Vec<i64> = hashes.iter().copied().collect();
    for hashes in hashes.chunks(16_384) {
        let request = MatchExternalKvRequest { hashes: hashes.to_vec(), count_as_hit: false };
        let answer = client.match_external_kv(request).await.expect("a match").into_inner();
        for found in answer.matches.into_iter().filter(|found| found.worker_id == worker) {
            assert_eq!(found.address, address_of(worker));
            for tier in found.hashes_by_tier {
                held.entry(tier.tier).or_default().extend(tier.hashes);
            }
        }
    }
    held
}

/// Asks until the worker holds what it should, and fails with what it holds in the end.
async fn wait_for(
    client: &mut KvIndexerClient<Channel>,
    worker: &str,
    asked: &BTreeSet<i64>,
    expected: &Held,
) {
    let mut last = Held::new();
    for _ in 0..TRIES {
        last = held(client, worker, asked).await;
        if last == *expected {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    assert_eq!(last, *expected, "{worker} never came to hold what it should");
}

async fn prefix_of(client: &mut KvIndexerClient<Channel>, worker: &str, hashes: Vec<i64>) -> u32 {
    let request = MatchExternalKvPrefixRequest { hashes, max_blocks: 0 };
    let answer = client.match_external_kv_prefix(request).await.expect("a prefix").into_inner();
    let found = answer.matches.iter().find(|found| found.worker_id == worker);
    found.map_or(0, |found| found.matched_prefix_blocks)
}

/// A recorded hash: SGLang writes signed numbers, vLLM unsigned ones.
fn hash_of(text: &str) -> i64 {
    text.parse().unwrap_or_else(|_| text.parse::<u64>().expect("a hash") as i64)
}

fn hashes_of(query: &Value) -> Vec<i64> {
    let hashes = query["hashes"].as_array().expect("hashes");
    hashes.iter().map(|hash| hash_of(hash.as_str().expect("text"))).collect()
}

/// The tier of a recording's medium, its group left aside.
fn tier_of(medium: &str) -> i32 {
    match medium.split('/').next() {
        Some("GPU") => 1,
        Some("CPU_PINNED") => 2,
        Some("DISK") => 3,
        _ => panic!("{medium} is no tier"),
    }
}

/// Sends a recording through the binaries and compares what comes of it.
///
/// `spec` is the bridge's variables; `answer` names the expected prefix of a query.
async fn check(name: &str, spec: &[(&str, &str)], answer: impl Fn(&Value) -> u64) {
    let capture = Capture::read(name);
    let (_server, server) = Running::server("127.0.0.1:0");
    let mut client = client(&server).await;
    let mut queries = 0;
    for (stream, expected) in capture.streams() {
        let mut publisher = Publisher::bind("").await;
        let worker = stream.replace('/', "-");
        let _bridge = Running::bridge(&worker, &server, &publisher.endpoint, spec);
        publisher.joined().await;
        for message in capture.received(&stream) {
            publisher.send_frames(message.frames.clone()).await;
        }

        let mut state = Held::new();
        for (medium, hashes) in state_of(&expected).into_iter().filter(|(_, hashes)| !hashes.is_empty()) {
            state.entry(tier_of(&medium)).or_default().extend(hashes.iter().map(|hash| hash_of(hash)));
        }
        let asked = capture.expected["queries"].as_array().expect("queries");
        let asked: Vec<&Value> = asked.iter().filter(|query| query["stream"] == stream.as_str()).collect();
        let mut all: BTreeSet<i64> = asked.iter().flat_map(|query| hashes_of(query)).collect();
        all.extend(state.values().flatten());
        wait_for(&mut client, &worker, &all, &state).await;

        for query in asked {
            let hashes = hashes_of(query);
            if !hashes.is_empty() {
                let blocks = prefix_of(&mut client, &worker, hashes).await;
                assert_eq!(u64::from(blocks), answer(query), "{name}, {stream}: {query}");
                queries += 1;
            }
        }
    }
    assert!(queries > 0, "{name} asks nothing");
}

/// The longest run that the events alone promise, over all tiers.
fn from_events(query: &Value) -> u64 {
    let prefixes = query["events_prefix"].as_object().expect("prefixes").values();
    prefixes.map(|blocks| blocks.as_u64().expect("a number")).max().expect("a tier")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_workers_of_sglang() {
    for name in ["sglang-plain-small", "sglang-eagle-bigram", "sglang-namespaces"] {
        check(name, &[], from_events).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_dialects_of_sglang() {
    for version in ["0.5.3", "0.5.10", "0.5.19", "0.5.20"] {
        check(&format!("sglang-old-{version}"), &[], from_events).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_worker_of_vllm() {
    check("vllm-plain-int", &[], from_events).await;
}

/// The contract's rules on true residency: what the engine itself reuses.
fn from_rules(query: &Value) -> u64 {
    query["seed_rule_prefix"].as_u64().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sliding_windows() {
    let spec = [("KV_INDEXER_CACHE_COMPONENTS", "full,swa"), ("KV_INDEXER_SWA_WINDOW_TOKENS", "64")];
    check("sglang-swa-components-map", &spec, from_rules).await;
    check("sglang-swa-components-array8", &spec, from_rules).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mamba_states() {
    check("sglang-mamba-components-map", &[("KV_INDEXER_CACHE_COMPONENTS", "full,mamba")], from_rules).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bridge_finds_its_server_again_and_both_stop_when_asked() {
    let (first, address) = Running::server("127.0.0.1:0");
    let mut publisher = Publisher::bind("").await;
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &[]);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored(vec![1, 2, 3])])).await;
    let asked = BTreeSet::from([1, 2, 3, 4, 5]);
    let stored = Held::from([(1, BTreeSet::from([1, 2, 3]))]);
    wait_for(&mut client(&address).await, "w0", &asked, &stored).await;

    drop(first);
    let (second, same) = Running::server(&address);
    assert_eq!(same, address);
    publisher.send(batch(&[Event::Stored(vec![4, 5]), Event::Removed(vec![4])])).await;
    let after = held(&mut client(&address).await, "w0", &BTreeSet::from([1])).await;
    assert_eq!(after, Held::new(), "an index is as empty as its process is new");
    let mut router = client(&address).await;
    for _ in 0..TRIES {
        if held(&mut router, "w0", &BTreeSet::from([4, 5])).await == Held::from([(1, BTreeSet::from([5]))]) {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    let now = held(&mut router, "w0", &BTreeSet::from([4, 5])).await;
    assert_eq!(now, Held::from([(1, BTreeSet::from([5]))]));
    assert_eq!(bridge.terminate(), Some(0));
    drop(router);
    assert_eq!(second.terminate(), Some(0));
}
