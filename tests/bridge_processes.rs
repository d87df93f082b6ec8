//! The real bridge process between publishers that fail and servers that die.
//!
//! What must hold is asked from a real server; waiting is bounded by tries.

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use common::binaries::{Held, Running, client, held, wait_for};
use common::bridge::numbered;
use common::peer::{Answer, Peer, Replay, listen};
use common::publisher::Publisher;
use common::server::free_address;
use common::{PAUSE, TRIES};
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use tokio::io::AsyncWriteExt;
use tonic::transport::Channel;

/// Asks until the worker holds exactly `wanted` of the blocks below `upto`, all at HBM.
async fn until_held(router: &mut KvIndexerClient<Channel>, worker: &str, upto: i64, wanted: &[i64]) {
    let wanted: Held = wanted.iter().map(|hash| ((1, *hash), 0)).collect();
    let mut found = BTreeMap::new();
    for _ in 0..TRIES {
        found = held(router, 0..upto).await;
        if found.get(worker).cloned().unwrap_or_default() == wanted {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("{worker} holds {found:?} instead of {wanted:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_bridge_leaves_nothing_to_the_next_one() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut publisher = Publisher::bind("").await;
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &[]);
    let other = Publisher::bind("").await;
    publisher.joined().await;
    for number in 0..4 {
        publisher.send_frames(numbered(number)).await;
    }
    wait_for(&mut router, "w0", 3).await;
    // Killed without a word; what it reported is still there.
    drop(bridge);
    until_held(&mut router, "w0", 10, &[0, 1, 2, 3]).await;

    // The next one clears, whether its publisher says anything or not, and follows what comes.
    let bridge = Running::bridge("w0", &address, &other.endpoint, &[]);
    until_held(&mut router, "w0", 10, &[]).await;
    drop(bridge);
    let _bridge = Running::bridge("w0", &address, &publisher.endpoint, &[]);
    publisher.joined().await;
    publisher.send_frames(numbered(4)).await;
    until_held(&mut router, "w0", 10, &[4]).await;
}

/// A path of this process's own, removed when the test ends.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        Place(std::env::temp_dir().join(format!("kv-indexer-{}-{name}", std::process::id())))
    }

    fn ipc(&self) -> String {
        format!("ipc://{}", self.0.display())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unix_sockets_carry_events_whoever_binds_them() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;

    let place = Place::new("publisher-binds");
    let mut publisher = Publisher::bind_at(&place.ipc(), "").await;
    let _first = Running::bridge("w0", &address, &place.ipc(), &[]);
    publisher.joined().await;
    publisher.send_frames(numbered(0)).await;
    until_held(&mut router, "w0", 10, &[0]).await;

    let place = Place::new("bridge-binds");
    // A socket that a killed process left behind does not keep the bridge from binding.
    drop(std::os::unix::net::UnixListener::bind(&place.0).expect("a new path"));
    let _second = Running::bridge("w1", &address, &place.ipc(), &[("SGLANG_KV_EVENT_BIND", "true")]);
    // Its worker is cleared before it connects to anything, so this waits for the socket itself.
    for _ in 0..TRIES {
        if std::os::unix::net::UnixStream::connect(&place.0).is_ok() {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    let mut publisher = Publisher::connect(&place.ipc(), "").await;
    publisher.joined().await;
    publisher.send_frames(numbered(1)).await;
    until_held(&mut router, "w1", 10, &[1]).await;
    until_held(&mut router, "w0", 10, &[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_in_trouble_leave_the_others_alone() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut good = [Publisher::bind("").await, Publisher::bind("").await];

    // One floods its bridge with messages that are no batches, as fast as they are taken.
    let (listener, flooding) = listen().await;
    let flooded = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&flooded);
    tokio::spawn(async move {
        let mut peer = Peer::accept(&listener, "PUB").await;
        for number in 0_u64.. {
            let payload = Bytes::from(vec![0xc1; 1_000]);
            let frames = [Bytes::new(), number.to_be_bytes().to_vec().into(), payload];
            if !peer.send(&frames).await {
                return;
            }
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    // One speaks no ZeroMQ at all, again and again.
    let (listener, foreign) = listen().await;
    let knocks = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&knocks);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            let _ = socket.write_all(&[b'x'; 65_536]).await;
        }
    });
    let dead = format!("tcp://{}", free_address());

    let place = Place::new("streams.json");
    let endpoints = [&good[0].endpoint, &dead, &flooding, &foreign, &good[1].endpoint];
    let streams: Vec<serde_json::Value> = endpoints
        .iter()
        .enumerate()
        .map(|(index, endpoint)| {
            let address = format!("http://w{index}.example:30000");
            serde_json::json!({"id": format!("w{index}"), "address": address, "endpoint": endpoint})
        })
        .collect();
    std::fs::write(&place.0, serde_json::json!({ "streams": streams }).to_string()).expect("written");
    let file = place.0.to_str().expect("UTF-8").to_owned();
    // Without one worker's settings, and with the server's as the default of all.
    let bridge = Running::bridge("unused", &address, "tcp://127.0.0.1:9", &[("KV_INDEXER_STREAMS", &file)]);

    for publisher in &mut good {
        publisher.joined().await;
    }
    for number in 0..200 {
        for publisher in &mut good {
            publisher.send_frames(numbered(number)).await;
        }
        if number == 100 {
            // Both kinds of trouble are there before the good streams go on.
            for _ in 0..TRIES {
                if flooded.load(Ordering::SeqCst) > 10_000 && knocks.load(Ordering::SeqCst) > 0 {
                    break;
                }
                tokio::time::sleep(PAUSE).await;
            }
            assert!(flooded.load(Ordering::SeqCst) > 10_000 && knocks.load(Ordering::SeqCst) > 0);
        }
    }
    let all: Vec<i64> = (0..200).collect();
    for worker in ["w0", "w4"] {
        until_held(&mut router, worker, 300, &all).await;
    }
    let before = flooded.load(Ordering::SeqCst);
    for _ in 0..TRIES {
        if flooded.load(Ordering::SeqCst) > before {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    assert!(flooded.load(Ordering::SeqCst) > before, "the flood went on all the while");
    assert_eq!(bridge.terminate(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_gives_history_and_what_went_missing_and_proves_who_is_back() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let sent = Arc::new(AtomicU64::new(0));
    let upto = Arc::clone(&sent);
    let replay = Replay::start(move |_, from| Answer {
        batches: (from..upto.load(Ordering::SeqCst)).map(numbered).collect(),
        ended: true,
    })
    .await;
    let settings = [("SGLANG_KV_REPLAY_ENDPOINT", replay.endpoint.as_str())];
    let mut publisher = Publisher::bind("").await;

    // Three batches were sent before the bridge came.
    sent.store(3, Ordering::SeqCst);
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &settings);
    publisher.joined().await;
    until_held(&mut router, "w0", 20, &[0, 1, 2]).await;
    assert_eq!(replay.asked(), [0]);

    // Two are lost on the way.
    sent.store(6, Ordering::SeqCst);
    publisher.send_frames(numbered(5)).await;
    until_held(&mut router, "w0", 20, &[0, 1, 2, 3, 4, 5]).await;

    // The connection breaks, and one is sent meanwhile; nothing is cleared, as the replay proves the life.
    let endpoint = publisher.close().await;
    sent.store(7, Ordering::SeqCst);
    let mut publisher = Publisher::bind_at(&endpoint, "").await;
    publisher.joined().await;
    until_held(&mut router, "w0", 20, &[0, 1, 2, 3, 4, 5, 6]).await;
    assert!(replay.asked().contains(&5), "asked from the last one applied: {:?}", replay.asked());

    // A new bridge begins with all that there is.
    drop(bridge);
    sent.store(8, Ordering::SeqCst);
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &settings);
    publisher.joined().await;
    until_held(&mut router, "w0", 20, &[0, 1, 2, 3, 4, 5, 6, 7]).await;
    assert_eq!(replay.asked().last(), Some(&0));
    assert_eq!(bridge.terminate(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_returns_begins_from_empty_and_one_that_stays_away_is_withdrawn() {
    let (_server, address) = Running::server("127.0.0.1:0");
    let mut router = client(&address).await;
    let mut publisher = Publisher::bind("").await;
    let never = [("KV_INDEXER_WORKER_GRACE_MS", "0")];
    let bridge = Running::bridge("w0", &address, &publisher.endpoint, &never);
    publisher.joined().await;
    for number in 0..3 {
        publisher.send_frames(numbered(number)).await;
    }
    until_held(&mut router, "w0", 10, &[0, 1, 2]).await;
    // Its numbers go on as if nothing had been; without a replay nothing proves that.
    let mut publisher = Publisher::bind_at(&publisher.close().await, "").await;
    publisher.joined().await;
    publisher.send_frames(numbered(3)).await;
    until_held(&mut router, "w0", 10, &[3]).await;
    drop(bridge);

    let soon = [("KV_INDEXER_WORKER_GRACE_MS", "50")];
    let _bridge = Running::bridge("w0", &address, &publisher.endpoint, &soon);
    publisher.joined().await;
    publisher.send_frames(numbered(4)).await;
    until_held(&mut router, "w0", 10, &[4]).await;
    publisher.close().await;
    until_held(&mut router, "w0", 10, &[]).await;
}
