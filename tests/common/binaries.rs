//! Both real binaries as child processes, and a router's questions to the server.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use sgl_kv_indexer::limits::HASHES_PER_CALL_MAX;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::pb::{MatchExternalKvPrefixRequest, MatchExternalKvRequest};
use tonic::transport::Channel;

use super::{PAUSE, TRIES};

/// A process that is killed when its test ends.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    pub fn start(binary: &str, variables: &[(&str, &str)]) -> Running {
        let mut command = Command::new(binary);
        command.env_clear().envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Running(command.spawn().expect("a binary"))
    }

    /// Starts a server and reads from its log where it listens.
    pub fn server(address: &str) -> (Running, String) {
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

    pub fn bridge(worker: &str, server: &str, events: &str, more: &[(&str, &str)]) -> Running {
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
    pub fn terminate(mut self) -> Option<i32> {
        let sent = Command::new("kill").args(["-s", "TERM", &self.0.id().to_string()]).status();
        assert!(sent.expect("a shell's kill").success());
        self.0.wait().expect("an end").code()
    }
}

/// Reads a log to its end, so that its writer never waits for room.
pub fn drain(log: impl BufRead + Send + 'static) {
    std::thread::spawn(move || log.lines().for_each(drop));
}

pub fn address_of(worker: &str) -> String {
    format!("http://{worker}.example:30000")
}

pub async fn client(server: &str) -> KvIndexerClient<Channel> {
    let client = KvIndexerClient::connect(format!("http://{server}")).await.expect("a server");
    client.max_decoding_message_size(usize::MAX)
}

/// What a worker holds: tier and block, with its component mask.
pub type Held = BTreeMap<(i32, i64), u32>;

/// What every worker holds of `hashes`.
pub async fn held(
    client: &mut KvIndexerClient<Channel>,
    hashes: impl IntoIterator<Item = i64>,
) -> BTreeMap<String, Held> {
    let mut held: BTreeMap<String, Held> = BTreeMap::new();
    let hashes: Vec<i64> = hashes.into_iter().collect();
    for hashes in hashes.chunks(HASHES_PER_CALL_MAX) {
        let request = MatchExternalKvRequest { hashes: hashes.to_vec(), count_as_hit: false };
        let answer = client.match_external_kv(request).await.expect("a match").into_inner();
        for found in answer.matches {
            assert_eq!(found.address, address_of(&found.worker_id));
            let of_worker = held.entry(found.worker_id).or_default();
            for tier in found.hashes_by_tier {
                assert_eq!(tier.hashes.len(), tier.component_masks.len());
                let blocks = tier.hashes.iter().zip(&tier.component_masks);
                of_worker.extend(blocks.map(|(hash, mask)| ((tier.tier, *hash), *mask)));
            }
        }
    }
    held
}

/// Asks until the worker holds the block at HBM.
pub async fn wait_for(client: &mut KvIndexerClient<Channel>, worker: &str, hash: i64) {
    for _ in 0..TRIES {
        let held = held(client, [hash]).await;
        if held.get(worker).is_some_and(|held| held.contains_key(&(1, hash))) {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("{worker} never came to hold {hash}");
}

/// Each worker's prefix, in order of name.
pub async fn prefixes(client: &mut KvIndexerClient<Channel>, hashes: &[i64]) -> BTreeMap<String, u32> {
    let request = MatchExternalKvPrefixRequest { hashes: hashes.to_vec(), max_blocks: 0 };
    let answer = client.match_external_kv_prefix(request).await.expect("a prefix").into_inner();
    let blocks: Vec<u32> = answer.matches.iter().map(|found| found.matched_prefix_blocks).collect();
    assert!(blocks.is_sorted_by(|longer, shorter| longer >= shorter), "{blocks:?}");
    assert_eq!(answer.best_prefix_blocks, blocks.first().copied().unwrap_or(0));
    for found in &answer.matches {
        assert_eq!(found.worker_address, address_of(&found.worker_id));
    }
    answer.matches.into_iter().map(|found| (found.worker_id, found.matched_prefix_blocks)).collect()
}
