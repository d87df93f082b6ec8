//! Bridges that keep their mirror on disk, killed and started again beside engines that went on, paused or died.
//!
//! Each publisher here gives its batches later and later times, as engines do, and a replay
//! socket that has only the last few, so that what is found is not simply told again.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use common::binaries::{Running, address_of, client, held};
use common::bridge::{Bridge, apply, until_stored};
use common::peer::{Answer, Replay};
use common::publisher::{Event, Publisher, batch};
use common::server::{Recorder, free_address};
use common::{PAUSE, TRIES};
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use tonic::transport::Channel;

const BLOCKS: i64 = 3_000;

/// Batches that a replay socket still has.
const REPLAYED: usize = 50;

/// A directory of one test, removed when it ends.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        Place(std::env::temp_dir().join(format!("kv-indexer-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }

    fn bytes(&self) -> u64 {
        std::fs::metadata(self.0.join("w0.mirror")).map_or(0, |file| file.len())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An engine: what it holds, what it says, and what it says again.
struct Engine {
    publisher: Publisher,
    replay: Replay,
    sent: Arc<Mutex<Vec<Vec<Bytes>>>>,
    /// The time of the last batch.
    time: f64,
    holds: BTreeSet<i64>,
}

impl Engine {
    async fn start() -> Engine {
        let publisher = Publisher::bind("").await;
        let sent: Arc<Mutex<Vec<Vec<Bytes>>>> = Arc::default();
        let all = Arc::clone(&sent);
        let replay = Replay::start(move |_, from| {
            let all = all.lock().expect("no panic");
            let first = all.len().saturating_sub(REPLAYED).max(from as usize).min(all.len());
            Answer { batches: all[first..].to_vec(), ended: true }
        })
        .await;
        Engine { publisher, replay, sent, time: 1.0, holds: BTreeSet::new() }
    }

    async fn send(&mut self, event: Event) {
        match &event {
            Event::Cleared => self.holds.clear(),
            Event::Removed(blocks) => self.holds.retain(|block| !blocks.contains(block)),
            Event::Stored(blocks) => self.holds.extend(blocks),
        }
        self.time += 1.0;
        let mut payload = batch(&[event]);
        // After the array and the float are marked, the time.
        payload[2..10].copy_from_slice(&self.time.to_be_bytes());
        let frames = {
            let mut sent = self.sent.lock().expect("no panic");
            let number = (sent.len() as u64).to_be_bytes().to_vec();
            let frames = vec![Bytes::new(), number.into(), payload.into()];
            sent.push(frames.clone());
            frames
        };
        self.publisher.send_frames(frames).await;
    }

    async fn store(&mut self, blocks: impl IntoIterator<Item = i64>) {
        self.send(Event::Stored(blocks.into_iter().collect())).await;
    }

    /// Begins anew with nothing, under the same endpoints.
    fn restart(&mut self) {
        self.sent.lock().expect("no panic").clear();
        self.holds.clear();
    }

    /// Starts a bridge for it that keeps its mirror at a place, and waits until it listens.
    async fn follow(&mut self, server: &str, place: &Place, replays: bool) -> Running {
        let mut more = vec![("KV_INDEXER_MIRROR_DIR", place.path()), ("KV_INDEXER_IDLE_REPORT_MS", "20")];
        if replays {
            more.push(("SGLANG_KV_REPLAY_ENDPOINT", &self.replay.endpoint));
        }
        let bridge = Running::bridge("w0", server, &self.publisher.endpoint, &more);
        self.publisher.joined().await;
        bridge
    }
}

/// Waits until the server holds what is wanted.
async fn until_held(router: &mut KvIndexerClient<Channel>, wanted: &BTreeSet<i64>, what: &str) {
    let mut found = BTreeSet::new();
    for _ in 0..TRIES {
        let all: BTreeMap<String, _> = held(router, 0..BLOCKS).await;
        found = all.get("w0").map(|held| held.keys().map(|(_, block)| *block).collect()).unwrap_or_default();
        if found == *wanted {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("{what}: {} blocks instead of {}", found.len(), wanted.len());
}

/// Waits until the file has been written up to what the engine has said, as far as its length tells.
async fn until_written(place: &Place, bytes: u64) {
    for _ in 0..TRIES {
        if place.bytes() > bytes {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("{} bytes never grew past {bytes}", place.bytes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bridge_killed_under_changes_goes_on_where_it_was() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut engine = Engine::start().await;
    let place = Place::new("killed");
    let mut bridge = engine.follow(&address, &place, true).await;
    let mut seed = 5_u64;
    let mut below = |limit: u64| {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (seed >> 33) % limit
    };
    let mut compacted = false;
    for round in 0..20 {
        for _ in 0..2 {
            let before = place.bytes();
            for _ in 0..below(20) {
                let from = below(BLOCKS as u64 - 200) as i64;
                let blocks: Vec<i64> = (from..from + 1 + below(200) as i64).collect();
                let event = match below(12) {
                    0 => Event::Cleared,
                    1..=4 => Event::Removed(blocks),
                    _ => Event::Stored(blocks),
                };
                engine.send(event).await;
            }
            compacted |= place.bytes() < before;
            // The first half has arrived; what the second half is cut in, nobody knows.
            if below(2) == 0 {
                until_held(&mut router, &engine.holds, &format!("round {round}, live")).await;
            }
        }
        drop(bridge);
        for _ in 0..below(5) {
            engine.store([below(BLOCKS as u64) as i64]).await;
        }
        bridge = engine.follow(&address, &place, true).await;
        until_held(&mut router, &engine.holds, &format!("round {round}, after a kill")).await;
    }
    // Most of it is past what the replay still has, so it was kept.
    assert!(engine.sent.lock().expect("no panic").len() > 3 * REPLAYED);
    // A kill may come before anything is written, but not each time.
    let asked = engine.replay.asked();
    assert!(asked.iter().filter(|from| **from == 0).count() < asked.len() / 2, "{asked:?}");
    assert!(compacted || place.bytes() < 1024 * 1024, "{} bytes", place.bytes());
    assert_eq!(bridge.terminate(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_replay_the_next_number_with_a_later_time_goes_on_and_nothing_else() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut engine = Engine::start().await;
    let place = Place::new("without-replay");
    let bridge = engine.follow(&address, &place, false).await;
    engine.store(0..100).await;
    engine.send(Event::Removed((10..20).collect())).await;
    until_held(&mut router, &engine.holds, "live").await;
    engine.store([500]).await;
    until_held(&mut router, &engine.holds, "live").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");

    // Nothing of what was kept is told before a batch fits it; what the dead bridge told is void at once.
    let bridge = engine.follow(&address, &place, false).await;
    until_held(&mut router, &BTreeSet::new(), "unproved").await;
    engine.store([501]).await;
    until_held(&mut router, &engine.holds, "the next number fits").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");

    // A batch was missed.
    engine.store([502]).await;
    let bridge = engine.follow(&address, &place, false).await;
    engine.store([503]).await;
    until_held(&mut router, &BTreeSet::from([503]), "a number was missed").await;
    // The file follows: what was void before is not found again.
    engine.store([504]).await;
    until_held(&mut router, &BTreeSet::from([503, 504]), "live").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");
    let bridge = engine.follow(&address, &place, false).await;
    engine.store([505]).await;
    until_held(&mut router, &BTreeSet::from([503, 504, 505]), "the new content was kept").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");

    // The publisher began anew meanwhile, at its first number again.
    engine.restart();
    let bridge = engine.follow(&address, &place, false).await;
    engine.store([7]).await;
    until_held(&mut router, &BTreeSet::from([7]), "began anew").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");

    // The next number with a time that is not later is nobody's that is known.
    engine.time -= 1.0;
    let _bridge = engine.follow(&address, &place, false).await;
    engine.store([8]).await;
    until_held(&mut router, &BTreeSet::from([8]), "no later time").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_of_another_life_clears_what_was_kept() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut engine = Engine::start().await;
    let place = Place::new("another-life");
    let bridge = engine.follow(&address, &place, true).await;
    for block in 0..5 {
        engine.store([block]).await;
    }
    until_held(&mut router, &engine.holds, "live").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");

    // As many batches as before, so that numbers and times alone would fit.
    engine.restart();
    for block in 10..15 {
        engine.store([block]).await;
    }
    let bridge = engine.follow(&address, &place, true).await;
    until_held(&mut router, &engine.holds, "began anew").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");

    // An idle publisher is proved by its replay alone.
    let bridge = engine.follow(&address, &place, true).await;
    for tries in 0..=TRIES {
        // The server holds what the last bridge told until this one has begun.
        let asked = engine.replay.asked();
        if asked.last() == Some(&4) {
            break;
        }
        assert!(tries < TRIES, "{asked:?}");
        tokio::time::sleep(PAUSE).await;
    }
    until_held(&mut router, &engine.holds, "idle").await;
    assert_eq!(bridge.terminate(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withdrawn_worker_leaves_nothing_to_go_on_from() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut engine = Engine::start().await;
    let place = Place::new("withdrawn");
    let bridge = engine.follow(&address, &place, false).await;
    engine.store(0..100).await;
    until_held(&mut router, &engine.holds, "live").await;
    assert_eq!(bridge.terminate(), Some(0), "stopped when all is written");
    let full = place.bytes();
    let endpoint = engine.publisher.endpoint.clone();
    engine.publisher.close().await;
    let more = [("KV_INDEXER_MIRROR_DIR", place.path()), ("KV_INDEXER_WORKER_GRACE_MS", "50")];
    let bridge = Running::bridge("w0", &address, &endpoint, &more);
    // While the file is replaced there may be none for a moment.
    let mut bytes = 0;
    for _ in 0..TRIES {
        bytes = place.bytes();
        if (1..full / 2).contains(&bytes) {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    assert!((1..full / 2).contains(&bytes), "{bytes} of {full} bytes");
    until_held(&mut router, &BTreeSet::new(), "withdrawn").await;
    assert_eq!(bridge.terminate(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_ends_the_keeping_and_nothing_else() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut engine = Engine::start().await;
    let place = Place::new("full");
    // The shell's limit on files, whose signal is ignored, fails writes as a full disk does.
    let script = r#"trap "" XFSZ; ulimit -f 4; exec "$0""#;
    let bridge = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_kv-indexer-bridge")])
        .env_clear()
        .envs([
            ("KV_INDEXER_WORKER_ID", "w0"),
            ("KV_INDEXER_WORKER_ADDRESS", &address_of("w0")),
            ("KV_INDEXER_ENDPOINT", &format!("http://{address}")),
            ("SGLANG_KV_EVENT_ENDPOINT", &engine.publisher.endpoint),
            ("KV_INDEXER_MIRROR_DIR", place.path()),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    let mut bridge = Killed(bridge);
    engine.publisher.joined().await;
    engine.store([0]).await;
    until_written(&place, 0).await;
    for first in 1..40 {
        engine.store(first * 50..first * 50 + 50).await;
    }
    until_held(&mut router, &engine.holds, "a full disk").await;
    for _ in 0..TRIES {
        if !place.0.join("w0.mirror").exists() {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    assert!(!place.0.join("w0.mirror").exists(), "what is not kept up is removed");
    engine.store([2_500]).await;
    until_held(&mut router, &engine.holds, "goes on").await;
    assert_eq!(bridge.0.try_wait().expect("a child"), None);
}

/// A process that is killed when its test ends.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn completeness_is_kept_and_a_file_that_cannot_be_is_counted() {
    let mut engine = Engine::start().await;
    let mut server = Recorder::start(&[]).await;
    let place = Place::new("status");
    let path = place.0.clone();
    let start = |source: &str, server: &Recorder, path: PathBuf| {
        Bridge::start_with(source, &server.url(), &[], move |config| config.mirror_dir = Some(path))
    };
    let bridge = start(&engine.publisher.endpoint, &server, path.clone());
    engine.publisher.joined().await;
    engine.store([0]).await;
    bridge.until(|status| status.last_sequence == Some(0)).await;
    let complete = bridge.until(|status| status.health.batches == 1).await;
    assert!(complete.health.incomplete.is_none());
    // One goes missing.
    engine.sent.lock().expect("no panic").push(Vec::new());
    engine.store([1]).await;
    let lost = bridge.until(|status| status.last_sequence == Some(2)).await;
    let (_, why) = lost.health.incomplete.expect("a gap");
    bridge.stop().await;
    until_stored(&mut server, 1).await;

    let bridge = start(&engine.publisher.endpoint, &server, path.clone());
    engine.publisher.joined().await;
    // A server is told that nothing is known, and of no block that was only loaded.
    let (told, _) = server.next().await;
    assert!(
        told.actions.len() == 3 && told.actions.iter().all(|action| action.hashes.is_empty()),
        "{told:?}"
    );
    let unproved = bridge.until(|status| status.health.connected).await;
    assert_eq!((unproved.last_sequence, unproved.health.incomplete), (None, None));
    engine.store([2]).await;
    let mut told = BTreeSet::new();
    until_stored(&mut server, 2).await.iter().for_each(|request| apply(&mut told, request));
    assert_eq!(told, BTreeSet::from([0, 1, 2]));
    let again = bridge.until(|status| status.last_sequence == Some(3)).await;
    assert_eq!(again.health.incomplete.map(|(_, why)| why), Some(why));
    assert_eq!(again.health.mirror_file_errors, 0);
    // A second one of the same worker keeps nothing and goes on.
    let second = start(&engine.publisher.endpoint, &server, path.clone());
    second.until(|status| status.health.mirror_file_errors == 1).await;
    second.stop().await;
    bridge.stop().await;
    let file = Place::new("no-directory");
    std::fs::write(&file.0, "a file").expect("written");
    let dead = format!("tcp://{}", free_address());
    let bridge = start(&dead, &server, file.0.clone());
    bridge.until(|status| status.health.mirror_file_errors == 1).await;
    bridge.stop().await;
    let _ = std::fs::remove_file(&file.0);
}
